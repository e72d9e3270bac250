"""The remedies: what to do, to which programs it applies, and how ``lightning-memprof try`` applies it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import force_setattr, replace

Need = Literal[
    "lightning",
    "other program",
    "training",
    "inference",
    "eager",
    "compiled",
    "no graphs",
    "stacks",
    "no stacks",
    "ranks",
    "one rank",
    "optimizer loop",
    "sends float32",
]


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A next step.

    Attributes:
        id: its name in this module, in small letters; stable, unlike the text.
        text: one action that a person can type or paste; with the fields of :meth:`filled`.
        in_torch: the same for a program without a Trainer, where that is another text; ``try`` cannot apply it.
        needs: what has to hold of the program.
        change: the argument of ``try --remedy`` that applies it (``workers={workers}``), empty where nothing can.
        is_look: whether it only shows more, and recovers nothing.
    """

    text: str
    id: str = ""
    in_torch: str = ""
    needs: frozenset[Need] = frozenset()
    change: str = ""
    is_look: bool = False

    @property
    def fields(self) -> dict[str, str]:
        """The id and the text, for programs."""
        return {"id": self.id, "text": self.text}

    def filled(self, **values: Any) -> Remedy:
        """Return the remedy with values in its texts and its change."""
        texts = {name: getattr(self, name).format(**values) for name in ("text", "in_torch", "change")}
        return replace(self, **texts)

    def in_program(self, holds: AbstractSet[Need]) -> Remedy:
        """Return the remedy with the text for a program of which ``holds`` is true."""
        is_other = self.in_torch and "other program" in holds
        return replace(self, text=self.in_torch, in_torch="", change="") if is_other else self


def _set_ids(names: Mapping[str, object]) -> None:
    for name, value in names.items():
        if isinstance(value, Remedy):
            force_setattr(value, "id", name.lower())


def applicable(holds: AbstractSet[Need], *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the remedies for a program of which ``holds`` is true, with their texts for it."""
    return tuple(choice.in_program(holds) for choice in choices if choice.needs <= holds)


# Loading

WORKERS: Final = Remedy(
    text="Use worker processes: DataLoader(num_workers={workers}, persistent_workers=True).",
    change="workers={workers}",
)
MORE_WORKERS_PER_RANK: Final = Remedy(
    text="Use more worker processes, up to the cores of each rank: a higher DataLoader(num_workers=...)."
)
FEWER_WORKERS: Final = Remedy(
    text="Use fewer worker processes: DataLoader(num_workers={workers}).",
    change="workers={workers}",
)
SHARE_SAMPLES: Final = Remedy(
    text="Share the samples of the IterableDataset among the workers: torch.utils.data.get_worker_info()."
)
PERSISTENT_WORKERS: Final = Remedy(
    text="Keep the workers from epoch to epoch: DataLoader(persistent_workers=True).",
    change="persistent_workers",
)
PREFETCH: Final = Remedy(
    text="Prefetch more batches: DataLoader(prefetch_factor={batches}).",
    change="prefetch={batches}",
)
PIN_MEMORY: Final = Remedy(
    text="Overlap copies with the step: DataLoader(pin_memory=True).",
    in_torch="Pin the batches: DataLoader(pin_memory=True), batch.to(device, non_blocking=True).",
    change="pin_memory",
)
FASTER_FETCH: Final = Remedy(
    text="Make {owner} faster: read, decode and tokenize once, before training, and cache what does not change."
)
FASTER_COLLATE: Final = Remedy(
    text="Make {owner} faster: whole tensors (torch.stack, pad_sequence), no loops over values."
)
FASTER_SAMPLER: Final = Remedy(text="Draw all indices of an epoch at once: torch.multinomial(weights, count).tolist().")
FETCH_AT_ONCE: Final = Remedy(
    text="Fetch whole batches by a list of indices: DataLoader(..., sampler=BatchSampler(...), batch_size=None)."
)
WITHOUT_LOCK: Final = Remedy(
    text="Remove the lock in {owner}: give each worker its own file or connection, opened in worker_init_fn."
)
GROUP_BY_LENGTH: Final = Remedy(
    text="Batch samples of similar length: sort by length, then shuffle whole batches (batch_sampler)."
)
PAD_TO_LONGEST: Final = Remedy(text="Pad each batch to its longest sample in collate_fn, not to a fixed length.")

# Callbacks, hooks, validation, checkpoints, logging

LESS_OFTEN: Final = Remedy(
    text="Do the work of {owner} every N batches, once per epoch, or in a thread.",
    change="rare_callback={object}",
)
IN_WORKERS: Final = Remedy(text="Do the work of {owner} in worker processes: in collate_fn or the data set.")
REMOVE_HOOK: Final = Remedy(
    text="Remove the hook {owner} after use (handle.remove()), register it once, or return at once in most batches."
)
DYNAMIC_SHAPES: Final = Remedy(
    text="Compile once for all shapes: torch.compile(model, dynamic=True). TORCH_LOGS=recompiles prints each cause."
)
FEW_SHAPES: Final = Remedy(text="Use few shapes: pad batches to a few lengths, such as multiples of 64.")
METRIC_PER_EPOCH: Final = Remedy(
    text="Compute metrics once per epoch: update() in the steps, {object}.compute() in on_train_epoch_end.",
    in_torch="Compute metrics once per epoch: update() in the steps, {object}.compute() after the epoch.",
)
VALIDATE_LESS_OFTEN: Final = Remedy(
    text="Validate less often, or on less data: Trainer({setting}, limit_val_batches=50).",
    in_torch="Validate less often, or on less data.",
)
SAVE_LESS_OFTEN: Final = Remedy(
    text="Save less often: ModelCheckpoint(every_n_train_steps=1000) or (train_time_interval=timedelta(minutes=30)).",
    in_torch="Save less often: every N steps, not in each epoch.",
)
SAVE_LESS: Final = Remedy(
    text="Save less: ModelCheckpoint(save_weights_only=True, save_top_k=1), save_hyperparameters(ignore=[...]).",
    in_torch="Save less: the state_dict() of the model alone, and less often.",
)
SAVE_ASYNC: Final = Remedy(
    text="Save in the background: Trainer(plugins=[AsyncCheckpointIO()]) from lightning.pytorch.plugins.io.",
    in_torch="Save checkpoints less often, or in the background: torch.distributed.checkpoint.async_save.",
)
NO_HYPERPARAMETERS: Final = Remedy(
    text="Leave large arguments out of the hyper-parameters: self.save_hyperparameters(ignore=[{names}])."
)
NO_BUFFERS: Final = Remedy(
    text="Leave fixed tensors out of checkpoints: self.register_buffer(name, tensor, persistent=False)."
)
LOG_LESS_OFTEN: Final = Remedy(
    text="Log less often: Trainer(log_every_n_steps=50).",
    in_torch="Log less often: in every 50th step.",
    change="log_every=50",
)
SELF_LOG_LESS_OFTEN: Final = Remedy(
    text="Call self.log every 50th batch, or once: self.log_dict(values, on_step=False, on_epoch=True)."
)
NO_SYNC: Final = Remedy(text="Log without sync_dist=True in the steps, or average one stacked tensor over the ranks.")
WRITE_LESS: Final = Remedy(text="Write less in {owner}: every N batches, in a thread, or by appending to the file.")
CODE_AROUND_BATCHES: Final = Remedy(
    text="Look at the code around the batches: a loop of your own, metrics, self.log with many values.",
    in_torch="Look at the code around the batches: metrics, logging, a validation outside recording.validation().",
)
FIND_COLLECT: Final = Remedy(
    text="Find the gc.collect() call in the program or a callback: it runs a full collection every step."
)
FREEZE_OBJECTS: Final = Remedy(
    text="Call gc.collect(); gc.freeze() in on_train_start, or gc.disable() with gc.collect() every 100 steps.",
    in_torch="Call gc.collect(); gc.freeze() before the steps, or gc.disable() with gc.collect() every 100 steps.",
    change="gc_freeze",
)
COMPARE_STEPS: Final = Remedy(
    text="Compare the batches of these steps with the others: longer samples, shapes that recompile."
)
RARER_WORK: Final = Remedy(
    text=(
        "Do the extra work of the {part} in these steps less often. To see it, record one: "
        "MemProfilerCallback(schedule=Schedule(steps=({step},), active=1))."
    ),
    in_torch="Do the extra work of the {part} in these steps less often.",
)
CATCH_STEP: Final = Remedy(
    text="Let the next slow step open a window: MemProfilerCallback(triggers=Triggers(anomalies=[SlowStep()])).",
    in_torch="Let the next slow step open a window: record(..., triggers=Triggers(anomalies=[SlowStep()])).",
)
GRADIENTS_AT_ONCE: Final = Remedy(
    text="Handle all gradients in one call in {owner}: Trainer(gradient_clip_val=1.0), torch._foreach_norm.",
    in_torch="Handle all gradients in one call in {owner}: clip_grad_norm_(..., foreach=True), torch._foreach_norm.",
)
BUILD_ONCE: Final = Remedy(
    text="Build it once: read the data in setup(), and keep Trainer(reload_dataloaders_every_n_epochs=0).",
    in_torch="Build it once, before the loop.",
)
RETURN_TENSORS: Final = Remedy(
    text="Return tensors from collate_fn, not lists of numbers: the transfer visits each object of a batch."
)
WHOLE_BATCH: Final = Remedy(
    text="Handle the whole batch at once in {owner}: it calls {often}, once per sample or part."
)
REUSE_OUTPUTS: Final = Remedy(
    text="Use the outputs of the step in {owner} instead of the forward of {module}, or run it every N batches."
)

# Python, lines of the program, loops, passes

WORK_LESS: Final = Remedy(
    text="Do the work of {owner} once, less often, or on whole tensors; cache constant tensors (register_buffer)."
)
WAIT_OUTSIDE: Final = Remedy(
    text="Move the wait in {owner} out of the step: before training, or into a thread (ThreadPoolExecutor.submit)."
)
DECOMPOSE_LESS: Final = Remedy(
    text="Decompose matrices every 10th step only, or approximate: spectral_norm, svd_lowrank, solve(A, b)."
)
SORT_LESS: Final = Remedy(
    text="Sort less: torch.topk or kthvalue for a few values, torch.bincount for counts; sort constant data once."
)
COPY_LESS: Final = Remedy(
    text="Copy less: keep references, copy in place (torch._foreach_copy_), no .to(), .clone() or cat in each step."
)
FUSED_ATTENTION: Final = Remedy(
    text="Use torch.nn.functional.scaled_dot_product_attention, or MultiheadAttention(need_weights=False)."
)
KEEP_ITERATOR: Final = Remedy(
    text="Create the iterator once, in on_train_start, or let the Trainer load both: CombinedLoader([first, second]).",
    in_torch="Create the iterator once, before the loop.",
)
WHOLE_TENSORS: Final = Remedy(
    text="Compute on whole tensors (torch.stack, a sum), and read or print one value (.item()) every N steps only."
)
CACHE_PARAMETERS: Final = Remedy(
    text="Compute the parameters of {owner} once: run the loop under torch.nn.utils.parametrize.cached()."
)
VECTORIZE: Final = Remedy(
    text="Vectorize the loop in {owner}: one batched operator (bmm, einsum) on the torch.stack of all slices, or vmap."
)
LARGER_BATCH: Final = Remedy(
    text="Use larger batches: DataLoader(batch_size={samples}), with a learning rate to match."
)
JOIN_BATCHES: Final = Remedy(
    text="Join {joined} batches: DataLoader(batch_size={samples}), Trainer(accumulate_grad_batches={left}).",
    in_torch="Join {joined} batches: DataLoader(batch_size={samples}), and accumulate over {left}.",
)
SUM_LOSSES: Final = Remedy(
    text="Run one backward on the sum of the losses: with retain_graph=True each one runs through the whole graph."
)
THREAD_LESS: Final = Remedy(
    text="Reduce the work of {owner}, or run it in a process: multiprocessing.get_context('spawn').Process(...)."
)
DETACH_STATE: Final = Remedy(
    text="Detach the state that one step passes to the next (hidden states, losses): backward runs through all."
)
FIND_KEPT: Final = Remedy(
    text="Find what {owner} adds to in each step and iterates over: a list, a cache, hooks, parameter groups, a file."
)

# Operators, modules, optimizers, cores

FLOAT32: Final = Remedy(
    text="Compute in float32: .float() on inputs from NumPy, no .double(), no torch.set_default_dtype(torch.float64)."
)
THREADS: Final = Remedy(
    text="Set the number of threads: torch.set_num_threads({threads}), or OMP_NUM_THREADS={threads}.",
    change="threads={threads}",
)
NO_ANOMALY_DETECTION: Final = Remedy(
    text="Disable it: Trainer(detect_anomaly=False), and no torch.autograd.detect_anomaly() in the program.",
    in_torch="Disable it: no torch.autograd.set_detect_anomaly(True), and no torch.autograd.detect_anomaly().",
    change="no_anomaly_detection",
)
FUSED_OPTIMIZER: Final = Remedy(
    text="Update all parameters at once: torch.optim.{optimizer}(..., {kernels}=True).",
    needs=frozenset({"training", "optimizer loop"}),
    change="{kernels}_optimizer",
)
FUSED_UPDATES: Final = Remedy(
    text="Update the parameters in one kernel: torch.optim.AdamW(..., fused=True); Adam, SGD and Adagrad have it, too."
)
FOREACH_IN_STEP: Final = Remedy(
    text="Update all tensors at once in {optimizer}.step: torch._foreach_add_ and similar, on lists of tensors."
)
JOIN_GROUPS: Final = Remedy(
    text="Merge the parameter groups that have the same settings: {settings} instead of {groups}."
)
ACCUMULATE: Final = Remedy(
    text="Step less often: Trainer(accumulate_grad_batches=4).",
    in_torch="Step less often: accumulate gradients, with DistributedDataParallel under model.no_sync().",
    needs=frozenset({"training"}),
    change="accumulate=4",
)
SPARSE_EMBEDDING: Final = Remedy(
    text="Update only the rows that a batch uses: torch.nn.Embedding(..., sparse=True) with torch.optim.SparseAdam."
)
SAME_SHAPE: Final = Remedy(
    text="Give prediction and target the same shape, such as prediction.squeeze(-1) for (N, 1) and (N,)."
)
DETACH_PARTS: Final = Remedy(
    text="Train one part at a time: discriminator(generated.detach()), self.toggle_optimizer(optimizer)."
)
FREEZE: Final = Remedy(
    text="Freeze it: self.{module}.requires_grad_(False); under torch.no_grad() if nothing before it trains."
)
LAZY_PENALTY: Final = Remedy(
    text="If these gradients are for a penalty, apply it every 16th step, with 16 times its weight."
)
SAVE_ACTIVATIONS: Final = Remedy(
    text="Save the activations: no torch.utils.checkpoint (gradient_checkpointing=False), or every second module only."
)
FORWARD_ONCE: Final = Remedy(
    text="Run the forward once per step and reuse its output; join different inputs into one batch (torch.cat)."
)
COMPILE: Final = Remedy(
    text="Fuse its operators: compile {module} with torch.compile(module).",
    change="compile",
)
FUSE_OPERATORS: Final = Remedy(
    text="Fuse operators: torch.compile(model).", needs=frozenset({"eager"}), change="compile"
)
BFLOAT16: Final = Remedy(
    text="Compute in bfloat16: Trainer(precision='bf16-mixed').",
    in_torch='Compute in bfloat16: torch.autocast("cuda", torch.bfloat16).',
    needs=frozenset({"training"}),
    change="precision=bf16-mixed",
)
FLOAT16: Final = Remedy(
    text="Compute in float16: Trainer(precision='16-mixed').",
    in_torch='Compute in float16: torch.autocast("cuda", torch.float16) with torch.amp.GradScaler().',
    needs=frozenset({"training"}),
    change="precision=16-mixed",
)
SMALLER_WEIGHTS: Final = Remedy(
    text="Keep the model in bfloat16: Trainer(precision='bf16-true').",
    in_torch="Keep the model in bfloat16: model.to(torch.bfloat16).",
    needs=frozenset({"inference"}),
)
TF32: Final = Remedy(
    text='Or keep 32 bits and multiply in TF32: torch.set_float32_matmul_precision("high").',
    change="matmul_precision=high",
)
UNDER_AUTOCAST: Final = Remedy(
    text="Let autocast run it in half precision: remove .float() and autocast(enabled=False) before it."
)
CHANNELS_LAST: Final = Remedy(
    text="Try channels_last for images: model.to(memory_format=torch.channels_last), inputs too.",
    change="channels_last",
)
WITH_LIBRARY: Final = Remedy(
    text="Use a build of torch with oneDNN, a GPU, or the device mps: these convolutions run without a library."
)
LESS_WORK: Final = Remedy(
    text="Give {module} less work (smaller layers, shorter inputs), or use a GPU: fusing does little for {family}."
)
MORE_WORK: Final = Remedy(text="Give each operator more work: a larger batch, and sizes that are multiples of 8.")

# Ranks

SHARE_CALLBACK: Final = Remedy(
    text="Share the work of {owner} on rank {rank}{host} among all ranks, or do it less often.",
    change="rare_callback={object}",
)
EQUAL_DATA: Final = Remedy(
    text="Check the data of rank {rank}{host}{owner}: its share of samples, its disk, its DataLoader workers."
)
EQUAL_BATCHES: Final = Remedy(
    text="Sort samples by length, and deal them out: rank {rank} gets {own} elements per batch, the others {others}."
)
COMPARE_RANK: Final = Remedy(text="Compare {what} of rank {rank}{host} with those of the others.")
MERGE_TRACES: Final = Remedy(
    text="See all ranks on one timeline: lightning-memprof merge -o merged.json.gz {files}.",
    needs=frozenset({"ranks"}),
    is_look=True,
)
FIND_HOST_MEMORY: Final = Remedy(
    text="Find what only rank {rank} holds: gathered outputs, rank_zero_only caches, longer batches, more workers."
)
FREE_CORES: Final = Remedy(
    text="Find the processes that use the cores (top): end them, or lower their priority (renice 19 -p PID)."
)

# Memory

CHECKPOINTING: Final = Remedy(
    text="Checkpoint each of {blocks}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).",
    needs=frozenset({"training"}),
    change="checkpointing",
)
SMALLER_BATCH: Final = Remedy(
    text="Use {batch} and Trainer(accumulate_grad_batches={times}): the same gradients from smaller batches.",
    in_torch="Use {batch}, and an optimizer step after {times}: the same gradients from smaller batches.",
    needs=frozenset({"training"}),
    change="accumulate={times}",
)
SMALLER_INPUT: Final = Remedy(
    text="Use smaller batches (the DataLoader's batch_size), or shorter inputs: the results stay the same.",
    needs=frozenset({"inference"}),
)
NO_GRAD: Final = Remedy(
    text="Run {name} under torch.no_grad() if nothing trains on the outputs.",
    needs=frozenset({"inference"}),
)
SHARD_MODEL: Final = Remedy(
    text="Shard the model and its optimizer over devices: Trainer(strategy='fsdp'), or fully_shard in configure_model.",
    in_torch="Shard the model and its optimizer over devices: torch.distributed.fsdp.fully_shard(model).",
)
LESS_OPTIMIZER_STATE: Final = Remedy(
    text="Use an optimizer with less state: torch.optim.Adafactor, 8-bit Adam; fused=True needs no temporaries."
)
SMALLER_DTYPE: Final = Remedy(
    text="Keep the samples in the dtype of their files ({small}), and convert each in {method}: {name} is {dtype}."
)
MAP_FILE: Final = Remedy(
    text="Map files instead of reading them: numpy.load(..., mmap_mode='r'), torch.load(..., 'cpu', mmap=True)."
)
IN_PARTS: Final = Remedy(
    text="Split the work of {owner} into parts, or accumulate it in each batch: it needs {size} beyond the steps."
)
START_SMALLER: Final = Remedy(
    text="Load and compute in parts before the steps: torch.load(mmap=True), setup(), configure_optimizers().",
    in_torch="Load and compute in parts before the steps: torch.load(mmap=True).",
)
RECORD_FROM_START: Final = Remedy(
    text="Record the memory from the start: lightning_memprof.start_memory_history() before the Trainer.",
    in_torch="Record the memory from the start: torch.cuda.memory._record_memory_history(stacks='python').",
)
SAMPLES_IN_ARRAYS: Final = Remedy(
    text="Store the samples in numpy.array(...) or torch.tensor(...) instead of lists, dicts and strings."
)
BOUND_WORKER_CACHE: Final = Remedy(
    text="Bound the data that {sample} or a function it calls keeps: an attribute, a global, lru_cache(maxsize=None)."
)
AGGREGATE_VALIDATION: Final = Remedy(
    text="Aggregate in validation_step, in a metric or a sum, instead of keeping each batch's outputs."
)
BOUND_HOLDER: Final = Remedy(text="Clear or bound {place}{assigned}{detached}.")
WITHOUT_GRAPHS: Final = Remedy(
    text="Keep {place} without graphs{assigned}: store .detach() or .item(), or compute it under torch.no_grad()."
)
COPY_PARTS: Final = Remedy(
    text="Store copies in {place}{assigned}: .clone() of each part; a view keeps its whole tensor alive."
)
RELEASE_TENSORS: Final = Remedy(
    text="Find the list, dict or object that keeps {made}: store .item() or .detach().cpu(), or clear it."
)
DROP_GRAPH: Final = Remedy(
    text="Remove retain_graph=True, and keep loss.detach(), not the loss: a graph holds its activations."
)
TRACE_NATIVE: Final = Remedy(
    text="Look for a library that keeps buffers: python -m memray run --native, then memray flamegraph --leaks."
)
EVEN_LENGTHS: Final = Remedy(text="Pad batches to a few lengths, or set MALLOC_ARENA_MAX=2 before the training.")
STOP_OTHERS: Final = Remedy(
    text="Run nvidia-smi to see which processes use the device, and stop leftovers of earlier runs."
)
FREE_DEVICE: Final = Remedy(
    text="Give each process a free device: CUDA_VISIBLE_DEVICES, or Trainer(devices=find_usable_cuda_devices(1)).",
    in_torch="Give each process a free device: CUDA_VISIBLE_DEVICES.",
)
RAISE_LIMIT: Final = Remedy(text="Raise the limit: {limit}.")
SPLIT_OPERATION: Final = Remedy(
    text="Split the operation on the line above into chunks; for attention, use scaled_dot_product_attention."
)

# Traces and devices

VIEW_TRACE: Final = Remedy(text="See every operator on a timeline: {command}", is_look=True)
RECORD_LATER: Final = Remedy(
    text="Record later steps, or the replay of a graph: Schedule(wait=10, warmup=2, active=3).",
    in_torch="Record later steps, or the replay of a graph: torch.profiler.schedule(wait=10, warmup=2, active=3).",
)
RECORD_LESS: Final = Remedy(text="Record less per step: {profiler}({less}).")
RECORD_ALL_EVENTS: Final = Remedy(text="Use a trace with all events of a few steps.")
RECORD_SHAPES: Final = Remedy(
    text="Record the input shapes of operators to get their FLOP/s: profile(record_shapes=True)."
)
RECORD_PYTHON_STACKS: Final = Remedy(
    text="Record the Python stacks with {profiler}(with_stack=True), then move that code out of the step.",
    needs=frozenset({"no stacks"}),
)
RECORD_RANKS: Final = Remedy(text="Record the other ranks too: a collective waits for the last rank to arrive.")
RECORD_DEVICE: Final = Remedy(
    text="Record host and device: torch.profiler.profile(activities=torch.profiler.supported_activities()).",
    is_look=True,
)
RECORD_RUN: Final = Remedy(text='Record a training run: Trainer(profiler="memprof"), or record(model) around a loop.')
RECORD_STEP: Final = Remedy(
    text="Record such steps: MemProfilerCallback(schedule=Schedule(steps=({steps},), active=1)).",
    in_torch="Record such steps: record(..., schedule=Schedule(steps=({steps},), active=1)).",
)
MORE_STEPS: Final = Remedy(
    text="Run at least {steps} steps; a Trainer that has reached max_epochs needs more epochs.",
    in_torch="Run at least {steps} steps.",
)
LAUNCH_LESS: Final = Remedy(
    text="Launch fewer and longer kernels: torch.compile(model{mode}).",
    needs=frozenset({"no graphs"}),
    change="compile",
)
ALL_GPUS: Final = Remedy(
    text="Use all GPUs at once: DistributedDataParallel with a process per GPU, or a pipeline of micro-batches."
)
COPY_BETWEEN_LESS: Final = Remedy(
    text="Copy less between GPUs: keep a layer and its inputs on one GPU, and copy each tensor once per step."
)
FILL_LESS: Final = Remedy(
    text="Fill less: torch.empty where every element is written, optimizer.zero_grad(set_to_none=True)."
)
KEEP_ON_DEVICE: Final = Remedy(
    text="Keep values on the device: loss.detach(), not .item() or .cpu(); torch.where, not if; self.log(name, loss).",
    in_torch="Keep values on the device: loss.detach(), not .item() or .cpu(); torch.where, not if.",
    change="log_every=50",
)
FIXED_SIZES: Final = Remedy(
    text="Avoid sizes that depend on values, which stop the host: torch.where instead of a boolean index."
)
NO_SYNCHRONIZE: Final = Remedy(
    text="Remove torch.cuda.synchronize() from the steps: time them with torch.cuda.Event, and read it steps later."
)
FIND_SYNC_CALLS: Final = Remedy(text='Find the calls: torch.cuda.set_sync_debug_mode("warn") prints the line of each.')
COPY_FROM_PINNED: Final = Remedy(
    text="Copy from pinned memory without blocking: tensor.pin_memory().to(device, non_blocking=True)."
)
KEEP_PINNED: Final = Remedy(
    text="Keep pinned memory from step to step: pinned = torch.empty(n, pin_memory=True), pinned.copy_(x)."
)
STAY_ON_GPU: Final = Remedy(
    text="Leave it on the GPU: remove the .to(device) and .cpu() of a module or tensor from the steps."
)
COPY_FEWER_BYTES: Final = Remedy(
    text="Copy fewer bytes: uint8 images, bfloat16 tensors, int32 indices; keep data on the GPU if it fits."
)
COPY_IN_STREAM: Final = Remedy(
    text="Overlap copies with kernels: start each early in a torch.cuda.Stream(), and wait for its event before use."
)
RUN_ON_GPU: Final = Remedy(
    text="Run {operator} on the GPU, not on the CPU: make its tensors there (device={device}), or move them once."
)
MOVE_OUT_OF_STEP: Final = Remedy(text="Move this out of the step: {place}.")
EXPANDABLE_SEGMENTS: Final = Remedy(
    text="Let segments grow: PYTORCH_CUDA_ALLOC_CONF={settings}.",
    change="expandable_segments",
)
CACHING_ALLOCATOR: Final = Remedy(
    text="Use torch's allocator: unset PYTORCH_NO_CUDA_MEMORY_CACHING, and remove backend:cudaMallocAsync."
)
NO_EMPTY_CACHE: Final = Remedy(
    text="Remove torch.cuda.empty_cache() from the training loop: the allocator reuses its cache."
)
RETURN_CACHE: Final = Remedy(
    text="Return the allocator's cache between stages, or before another program: torch.cuda.empty_cache()."
)
OVERLAP_GRADIENTS: Final = Remedy(
    text="Overlap gradients with backward: DDPStrategy(bucket_cap_mb={size}, static_graph=True).",
    in_torch="Overlap gradients with backward: DistributedDataParallel(..., bucket_cap_mb={size}, static_graph=True).",
    needs=frozenset({"training"}),
    change="static_graph",
)
PREFETCH_PARAMETERS: Final = Remedy(
    text="Prefetch parameters: FSDPStrategy(forward_prefetch=True), or fully_shard's set_modules_to_forward_prefetch.",
    in_torch="Prefetch parameters: module.set_modules_to_forward_prefetch([next_module]) of FSDP2.",
)
FILL_PIPELINE: Final = Remedy(
    text="Fill the pipeline: more micro-batches per step, stages of equal duration, or ScheduleInterleaved1F1B."
)
EARLY_TRANSFER: Final = Remedy(
    text="Start the transfer early and wait late (async_op=True), with work of another layer or batch in between."
)
SEND_BFLOAT16: Final = Remedy(
    text="Send bfloat16: DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook).",
    in_torch="Send bfloat16: model.register_comm_hook(None, default_hooks.bf16_compress_hook).",
    needs=frozenset({"training", "sends float32"}),
)
SHARD_IN_NODE: Final = Remedy(
    text='Shard within a node only: FSDPStrategy(sharding_strategy="HYBRID_SHARD"), or "SHARD_GRAD_OP" if it fits.',
    in_torch="Gather once per step: fully_shard(module, reshard_after_forward=False), or shard in a node (mesh=...).",
    needs=frozenset({"training"}),
)
SEND_FEWER_BYTES: Final = Remedy(
    text="Send less: layers split over fewer devices, larger batches, more of the traffic within a node."
)
SEND_HALF: Final = Remedy(text="Send bfloat16 instead of float32.", needs=frozenset({"sends float32"}))
FIND_LATE_RANK: Final = Remedy(
    text="Find the late rank: {collective} takes {times}. Record all ranks and compare them."
)

# Snapshots

SMALLER_CACHE: Final = Remedy(
    text="Make the cache smaller: a shorter maximum length, fewer sequences at once; vLLM: gpu_memory_utilization=..."
)
FREE_GRADIENTS: Final = Remedy(
    text="Free gradients earlier: step each parameter in Tensor.register_post_accumulate_grad_hook."
)

# Recording

FEWER_WINDOWS: Final = Remedy(
    text="Train some steps outside windows: MemProfilerCallback(schedule=Schedule(wait=10, active=2)).",
    in_torch="Train some steps outside windows: record(..., schedule=Schedule(wait=10, active=2)).",
)
REMOVE_PROFILER: Final = Remedy(
    text="Remove the other profiler: torch.profiler.profile(...), cProfile or Trainer(profiler=...).",
    in_torch="Remove the other profiler: torch.profiler.profile(...), cProfile.",
)
REPORT_ERROR: Final = Remedy(text="Report this error to the developers of lightning-memprof.")

# Hangs

WITHOUT_WORKERS: Final = Remedy(
    text="Run with DataLoader(num_workers=0), which shows the line, or DataLoader(timeout=60), which raises."
)
SAME_COLLECTIVES: Final = Remedy(
    text="Call the same collectives on every rank, in the same order and with the same shapes."
)
SAME_BATCHES: Final = Remedy(
    text="Give every rank the same number of batches: DistributedSampler(drop_last=True), or limit_train_batches=N."
)
LOOK_AT_NETWORK: Final = Remedy(
    text="All ranks wait in one collective: check the network of the nodes; for NCCL set NCCL_DEBUG=INFO."
)
LOOK_AT_LINE: Final = Remedy(text="Look at {place}: {what}.", is_look=True)
READ_STACKS: Final = Remedy(text="Read the stacks of all threads in {file}.")
READ_OUTPUT: Final = Remedy(text="Read the end of the output of rank {rank}{kernel}.")
CONTINUE_PROCESS: Final = Remedy(text="Continue it: `kill -CONT {pid}` on {host}.")
DUMP_STACKS: Final = Remedy(text="Dump its stacks: `py-spy dump --pid {pid}` on {host}.")
FEWER_WORKERS_FOR_MEMORY: Final = Remedy(
    text="Use fewer workers if the kernel killed it for memory: `dmesg | grep -i oom` on the node."
)
SHARED_MEMORY: Final = Remedy(
    text="Shared memory is full: enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers."
)

_set_ids(vars())
