"""The remedies: what to do, to which programs it applies, and how ``lightning-memprof try`` applies it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

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
        id: stable, unlike the text.
        text: one action that a person can type or paste; with the fields of :meth:`filled`.
        in_torch: the same for a program without a Trainer, where that is another text; ``try`` cannot apply it.
        needs: what has to hold of the program of a trace or a snapshot.
        change: the argument of ``try --remedy`` that applies it (``workers={workers}``), empty where nothing can.
    """

    id: str
    text: str
    in_torch: str = ""
    needs: frozenset[Need] = frozenset()
    change: str = ""

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


def applicable(holds: AbstractSet[Need], *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the remedies for a program of which ``holds`` is true, with their texts for it."""
    return tuple(choice.in_program(holds) for choice in choices if choice.needs <= holds)


# Loading

WORKERS: Final = Remedy(
    id="workers",
    text="Load in worker processes: DataLoader(num_workers={workers}, persistent_workers=True).",
    change="workers={workers}",
)
MORE_WORKERS: Final = Remedy(
    id="more_workers",
    text="Use more worker processes: DataLoader(num_workers={workers}).",
    change="workers={workers}",
)
MORE_FOR_WAITS: Final = Remedy(
    id="more_workers_than_cores",
    text="If {owner} waits for disk or network, use more workers than cores: DataLoader(num_workers={workers}).",
    change="workers={workers}",
)
MORE_OF_TRACE: Final = Remedy(
    id="more_workers_per_rank",
    text="Use more worker processes, up to the cores of each rank: a higher DataLoader(num_workers=...).",
)
FEWER_WORKERS: Final = Remedy(
    id="fewer_workers",
    text="Use fewer worker processes: DataLoader(num_workers={wanted}) for {cores}.",
    change="workers={wanted}",
)
SHARE_SAMPLES: Final = Remedy(
    id="share_samples",
    text=(
        "Share the samples of the IterableDataset among the workers with torch.utils.data.get_worker_info(): each "
        "worker iterates over its own copy."
    ),
)
PERSISTENT_WORKERS: Final = Remedy(
    id="persistent_workers",
    text="Keep the workers from epoch to epoch: DataLoader(persistent_workers=True).",
    change="persistent_workers",
)
LONGER_EPOCHS: Final = Remedy(
    id="longer_epochs", text="Make epochs longer: several passes over the data set in one epoch."
)
PREFETCH: Final = Remedy(
    id="prefetch",
    text="Prefetch more batches: DataLoader(prefetch_factor={batches}).",
    change="prefetch={batches}",
)
PIN_MEMORY: Final = Remedy(
    id="pin_memory",
    text="Overlap copies with the step: DataLoader(pin_memory=True).",
    in_torch="Pin the batches: DataLoader(pin_memory=True), batch.to(device, non_blocking=True).",
    change="pin_memory",
)
FASTER_FETCH: Final = Remedy(
    id="faster_fetch",
    text=(
        "Make {owner} faster: read, decode and tokenize once, before training; cache results that do not "
        "change; skip copies and random numbers that are not used."
    ),
)
FASTER_COLLATE: Final = Remedy(
    id="faster_collate",
    text="Make {owner} faster: whole tensors (torch.stack, pad_sequence), no loops over values.",
)
FASTER_SAMPLER: Final = Remedy(
    id="faster_sampler",
    text=(
        "Make the sampler faster: draw all indices of an epoch at once, such as torch.multinomial(weights, "
        "count).tolist(). Workers do not run the sampler."
    ),
)
FETCH_AT_ONCE: Final = Remedy(
    id="fetch_at_once",
    text=(
        "Fetch all samples of a batch at once: DataLoader(dataset, "
        "sampler=BatchSampler(RandomSampler(dataset), {samples}, drop_last=True), batch_size=None); the "
        "data set is then indexed with a list."
    ),
)
WITHOUT_LOCK: Final = Remedy(
    id="without_lock",
    text="Remove the lock in {owner}: give each worker its own file or connection, opened in worker_init_fn.",
)
SLOW_BATCH: Final = Remedy(
    id="slow_batch", text="Look at the samples of the slow batch; if it starts an epoch, set persistent_workers=True."
)
GROUP_BY_LENGTH: Final = Remedy(
    id="group_by_length",
    text=(
        "Batch samples of similar length, and pad to the longest of each batch: sort by length, then shuffle whole "
        "batches (batch_sampler)."
    ),
)
PAD_TO_LONGEST: Final = Remedy(
    id="pad_to_longest", text="Pad each batch to its longest sample in collate_fn, not to a fixed length."
)

# Callbacks, hooks, validation, checkpoints, logging

LESS_OFTEN: Final = Remedy(
    id="less_often",
    text="Do the work of {owner} every N batches, in on_train_epoch_end, or in a thread.",
    change="rare_callback={object}",
)
IN_WORKERS: Final = Remedy(
    id="in_workers", text="Do the work of {owner} in worker processes: in collate_fn or the data set."
)
REMOVE_HOOK: Final = Remedy(
    id="remove_hook",
    text="Remove the hook {owner} after use, or register it once: its registration returns a handle with remove().",
)
SKIP_HOOK: Final = Remedy(
    id="skip_hook", text="Run the hook {owner} every N batches: return at once in the other batches."
)
DYNAMIC_SHAPES: Final = Remedy(
    id="dynamic_shapes",
    text="Compile for all shapes: dynamic=True in torch.compile, or torch._dynamo.mark_dynamic(tensor, dimension).",
)
FEW_SHAPES: Final = Remedy(
    id="few_shapes", text="Use few shapes: pad to a multiple of 64, or group samples of similar length."
)
LOG_RECOMPILES: Final = Remedy(
    id="log_recompiles", text="Log the cause of each recompilation: set TORCH_LOGS=recompiles in the environment."
)
METRIC_PER_EPOCH: Final = Remedy(
    id="metric_per_epoch",
    text="Compute metrics once per epoch: call update() in the steps and {object}.compute() in on_train_epoch_end.",
)
METRIC_OF_SUMS: Final = Remedy(
    id="metric_of_sums",
    text="Choose a metric that keeps sums instead of all predictions, such as thresholds=100 for curves.",
)
VALIDATE_PER_EPOCH: Final = Remedy(
    id="validate_per_epoch", text="Validate once per epoch: Trainer(val_check_interval=1.0)."
)
VALIDATE_LESS_OFTEN: Final = Remedy(
    id="validate_less_often", text="Validate after every 5th epoch: Trainer(check_val_every_n_epoch=5)."
)
VALIDATE_ON_LESS: Final = Remedy(id="validate_on_less", text="Validate on less data: Trainer(limit_val_batches=50).")
SAVE_LESS_OFTEN: Final = Remedy(
    id="save_less_often",
    text="Save less often: ModelCheckpoint(every_n_train_steps=1000) or (train_time_interval=timedelta(minutes=30)).",
)
SAVE_LESS: Final = Remedy(
    id="save_less", text="Save less: ModelCheckpoint(save_weights_only=True, save_top_k=1, save_last=False)."
)
SAVE_ASYNC: Final = Remedy(
    id="save_async",
    text="Save in the background: Trainer(plugins=[AsyncCheckpointIO()]) from lightning.pytorch.plugins.io.",
    in_torch="Save checkpoints less often, or in the background: torch.distributed.checkpoint.async_save.",
)
LOG_LESS_OFTEN: Final = Remedy(
    id="log_less_often",
    text="Log less often: Trainer(log_every_n_steps=50).",
    change="log_every=50",
)
SELF_LOG_LESS_OFTEN: Final = Remedy(
    id="self_log_less_often",
    text="Call self.log in every Nth batch (if batch_idx % 50 == 0): log_every_n_steps does not make calls cheaper.",
)
LOG_AT_ONCE: Final = Remedy(
    id="log_at_once",
    text="Log several values at once, as epoch means: self.log_dict(values, on_step=False, on_epoch=True).",
)
LOG_CHEAPLY: Final = Remedy(
    id="log_cheaply",
    text="Make {owner} append to its file or write in a thread; log no images, histograms or gradients.",
)
CODE_AROUND_BATCHES: Final = Remedy(
    id="code_around_batches",
    text="Look at the code around the batches: a loop of your own, metrics, self.log with many values.",
)
FIND_COLLECT: Final = Remedy(
    id="find_collect",
    text="Find the gc.collect() call in the program or a callback: it runs a full collection every step.",
)
FREEZE_OBJECTS: Final = Remedy(
    id="freeze_objects",
    text="Exempt permanent objects from collections: call gc.collect() and gc.freeze() in on_train_start.",
    change="gc_freeze",
)
CHOOSE_COLLECTIONS: Final = Remedy(
    id="choose_collections",
    text="Collect on all ranks in the same steps: gc.disable() in on_train_start, gc.collect() every 100 batches.",
)
BREAK_CYCLES: Final = Remedy(
    id="break_cycles",
    text="Break the cycles that hold tensors: store no tensor on an object that refers to itself or its owner.",
)

NO_BENCHMARK: Final = Remedy(
    id="no_benchmark",
    text="Disable cuDNN's benchmark: Trainer(benchmark=False), or pad batches to a few shapes.",
)
COMPARE_STEPS: Final = Remedy(
    id="compare_steps",
    text="Compare the batches of these steps with the others: longer samples, shapes that recompile.",
)
RECORD_STEP: Final = Remedy(
    id="record_step",
    text="Record such a step: MemProfilerCallback(schedule=Schedule(steps=({step},), active=1)).",
)
CATCH_STEP: Final = Remedy(
    id="catch_step",
    text=("Let the next slow step open a window: MemProfilerCallback(triggers=Triggers(anomalies=[SlowStep()]))."),
)
REFRESH_LESS_OFTEN: Final = Remedy(id="refresh_less_often", text="Draw less often: {object}(refresh_rate=20).")
GRADIENTS_AT_ONCE: Final = Remedy(
    id="gradients_at_once",
    text=(
        "Handle all gradients in one call in {owner}, or every N batches: Trainer(gradient_clip_val=1.0), "
        "torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0), torch._foreach_norm."
    ),
)
BUILD_ONCE: Final = Remedy(
    id="build_once",
    text=(
        "Build it once: read the data in setup(), and keep Trainer(reload_dataloaders_every_n_epochs=0), the default."
    ),
)
SCHEDULE_ONCE: Final = Remedy(
    id="schedule_once",
    text=(
        "Compute the factors of the learning rate once, into a list, or update it once per epoch: "
        '{{"interval": "epoch"}}.'
    ),
)
ON_GPU: Final = Remedy(
    id="on_gpu",
    text="Do the work of {owner} on the GPU, in on_after_batch_transfer, or in workers: in collate_fn or the data set.",
)
RETURN_TENSORS: Final = Remedy(
    id="return_tensors",
    text="Return tensors from collate_fn, not lists of numbers: the transfer visits each object of a batch.",
)
WHOLE_BATCH: Final = Remedy(
    id="whole_batch", text="Handle the whole batch at once in {owner}: it calls {often}, once per sample or part."
)
REUSE_OUTPUTS: Final = Remedy(
    id="reuse_outputs",
    text=(
        "Use the outputs of the step in {owner} instead of the forward of {module} (return them from training_step); "
        "for other data, run it every N batches."
    ),
)
READ_ONE_VALUE: Final = Remedy(
    id="read_one_value",
    text=(
        "Read one value in {owner}: stack the tensors, reduce them on the GPU, then .item(). If no code "
        "needs the value in every batch, read it every N batches."
    ),
)
NO_SYNC: Final = Remedy(
    id="no_sync",
    text=(
        "Log without sync_dist=True in the steps, or average one stacked tensor over ranks: each synced "
        "value is a separate collective."
    ),
)
NO_BUFFERS: Final = Remedy(
    id="no_buffers",
    text=(
        "Leave fixed tensors out of checkpoints: self.register_buffer(name, tensor, persistent=False); "
        "recreate them in __init__."
    ),
)

LEAVE_OUT: Final = Remedy(
    id="leave_out",
    text=(
        "Leave large objects out of the checkpoint: self.save_hyperparameters(ignore=[...]); store less in "
        "on_save_checkpoint."
    ),
)

# Python, lines of the program, loops, passes

WORK_LESS: Final = Remedy(
    id="work_less",
    text="Do the work of {owner} once, less often, or on whole tensors; cache constant tensors (register_buffer).",
)
WAIT_OUTSIDE: Final = Remedy(
    id="wait_outside",
    text=(
        "Move the wait in {owner} out of the step: do it before training, or in a thread (ThreadPoolExecutor.submit)."
    ),
)
DECOMPOSE_LESS: Final = Remedy(
    id="decompose_less",
    text=(
        "Decompose matrices less often, such as every 10th step, or approximate: power iteration "
        "(spectral_norm) for the largest singular value, torch.svd_lowrank for a few; solve(A, b) instead "
        "of an inverse."
    ),
)
SORT_LESS: Final = Remedy(
    id="sort_less",
    text=(
        "Sort less: torch.topk or kthvalue for a few values, torch.bincount or histc for counts; sort "
        "constant data once."
    ),
)
DRAW_FEWER: Final = Remedy(
    id="draw_fewer", text="Draw fewer random numbers: dropout in fewer places, noise only where it is used."
)
MOVE_LESS: Final = Remedy(
    id="move_less",
    text=(
        "Copy less: write into one existing tensor, keep one dtype and layout instead of .to(), "
        ".contiguous() and .clone() in each step, and stack once instead of calling cat for each part."
    ),
)
ACCUMULATE_ONCE: Final = Remedy(
    id="accumulate_once", text="Compute running sums once for all positions, or only for the positions that are used."
)
FUSED_ATTENTION: Final = Remedy(
    id="fused_attention",
    text=(
        "Use the fused kernel: torch.nn.functional.scaled_dot_product_attention(query, key, value), or "
        "MultiheadAttention(need_weights=False) if the weights are not used."
    ),
)
FUSED_MODULE: Final = Remedy(
    id="fused_module",
    text="Use torch.nn.{fused} instead of {owner}: one fused operator that also saves fewer activations for backward.",
)
COPY_LESS: Final = Remedy(
    id="copy_less",
    text=(
        "Copy less in {owner}: keep references to unchanged tensors, copy in place (torch._foreach_copy_), "
        "or copy every N batches."
    ),
)
WRITE_LESS: Final = Remedy(id="write_less", text="Write less often in {owner}: every N batches, or in a thread.")
KEEP_ITERATOR: Final = Remedy(
    id="keep_iterator",
    text=(
        "Keep the iterator: create it once, iterator = iter(loader) in on_train_start, and call "
        "next(iterator) in the steps; or let the Trainer load both: CombinedLoader."
    ),
)
LOAD_BOTH: Final = Remedy(
    id="load_both",
    text="Let the Trainer load both, with workers: return CombinedLoader([first, second]) from train_dataloader.",
)
WHOLE_TENSORS: Final = Remedy(
    id="whole_tensors",
    text="Compute on whole tensors, and read values back (.item(), .tolist()) every N steps only.",
)
NO_TEXT: Final = Remedy(
    id="no_text",
    text='Format tensors as text every N steps only, and in log messages lazily: logger.debug("%s", tensor).',
)
CACHE_PARAMETERS: Final = Remedy(
    id="cache_parameters",
    text="Compute the parameters of {owner} once: run the loop under torch.nn.utils.parametrize.cached().",
)
VECTORIZE: Final = Remedy(
    id="vectorize",
    text=(
        "Vectorize the loop in {owner}: one batched operator (bmm, einsum, scaled_dot_product_attention) on the "
        "torch.stack of all slices, or torch.vmap."
    ),
)
COMPILE_LOOP: Final = Remedy(
    id="compile_loop",
    text="Compile the loop into a few fused kernels: torch.compile(module).",
    change="compile",
)
LARGER_BATCHES: Final = Remedy(
    id="larger_batch",
    text="Use larger batches: DataLoader(batch_size={samples}), with a learning rate to match.",
)
STEP_LESS_OFTEN: Final = Remedy(
    id="step_less_often",
    text="Where memory is short, step less often: Trainer(accumulate_grad_batches=8).",
)
JOIN_BATCHES: Final = Remedy(
    id="join_batches",
    text=(
        "Use one batch instead of {joined} small ones: DataLoader(batch_size={samples}), "
        "Trainer(accumulate_grad_batches={left})."
    ),
)
REDUCE_LAST: Final = Remedy(
    id="reduce_last",
    text=(
        "All-reduce gradients in the last pass only: run forward and manual_backward of the other passes under "
        "self.trainer.strategy.block_backward_sync() (no_sync() of DistributedDataParallel)."
    ),
)
TRAINER_ACCUMULATES: Final = Remedy(
    id="trainer_accumulates",
    text="Or use automatic optimization with Trainer(accumulate_grad_batches={passes}), which does the same.",
)
SUM_LOSSES: Final = Remedy(
    id="sum_losses",
    text=(
        "Run one backward on the sum of the losses: each backward with retain_graph=True runs through the whole graph."
    ),
)
THREAD_LESS: Final = Remedy(
    id="thread_less", text="Reduce the work of {owner}, or make it sleep longer between iterations."
)
THREAD_AS_PROCESS: Final = Remedy(
    id="thread_as_process",
    text="Run it in a separate process: multiprocessing.get_context('spawn').Process(target=...).",
)
DETACH_STATE: Final = Remedy(
    id="detach_state",
    text=(
        "Detach the state that one step passes to the next (hidden states, losses): backward also runs "
        "through earlier steps. Remove hooks that each step registers: handle.remove()."
    ),
)
FIND_KEPT: Final = Remedy(
    id="find_kept",
    text="Find state that {owner} accumulates from step to step and iterates over each time: {kept}.",
)
RECORD_BOTH_ENDS: Final = Remedy(
    id="record_both_ends",
    text=(
        "Record steps at both ends and compare: "
        "MemProfilerCallback(schedule=Schedule(steps=({first}, {last}), active=1))."
    ),
)
SHUFFLE: Final = Remedy(id="shuffle", text="If batches get longer from step to step, shuffle them.")

# Operators, modules, optimizers, cores

FLOAT32: Final = Remedy(
    id="float32",
    text=(
        "Compute in float32: cast inputs with .float(); remove .double(), "
        "torch.set_default_dtype(torch.float64) and Trainer(precision='64-true'); NumPy defaults to "
        "float64."
    ),
)
THREADS: Final = Remedy(
    id="threads",
    text="Use as many threads as cores: torch.set_num_threads({threads}), or OMP_NUM_THREADS={threads}.",
    change="threads={threads}",
)
NO_ANOMALY_DETECTION: Final = Remedy(
    id="no_anomaly_detection",
    text="Disable it: Trainer(detect_anomaly=False), torch.autograd.set_detect_anomaly(False).",
    change="no_anomaly_detection",
)
NO_ANOMALY_REGION: Final = Remedy(
    id="no_anomaly_region",
    text=(
        "Remove torch.autograd.detect_anomaly() or set_detect_anomaly(True) from the program: it is on in "
        "forward, but not when the fit starts."
    ),
)
FUSED_OPTIMIZER: Final = Remedy(
    id="fused_optimizer",
    text="Update all parameters in one kernel: torch.optim.{optimizer}(..., fused=True).",
    change="fused_optimizer",
)
SPLIT_OPTIMIZER: Final = Remedy(
    id="split_optimizer",
    text=(
        "Use a separate optimizer for the parameters with dense gradients, torch.optim.{optimizer}(..., fused=True); "
        "fused does not support sparse gradients."
    ),
)
FOREACH_OPTIMIZER: Final = Remedy(
    id="foreach_optimizer",
    text="Update the parameters in groups: torch.optim.{optimizer}(..., foreach=True).",
    change="foreach_optimizer",
)
FOREACH_IN_STEP: Final = Remedy(
    id="foreach_in_step",
    text=(
        "Update all tensors at once in {optimizer}.step: torch._foreach_add_, torch._foreach_mul_ and "
        "similar, on lists of tensors."
    ),
)
JOIN_GROUPS: Final = Remedy(
    id="join_groups",
    text="Merge the parameter groups that have the same settings: {settings} instead of {groups}.",
)
DECOMPOSE_IN_STEP: Final = Remedy(
    id="decompose_in_step",
    text=("Decompose in {optimizer}.step less often, such as every 20th step, and reuse the factors in between."),
)
ACCUMULATE: Final = Remedy(
    id="accumulate",
    text=(
        "Step less often: Trainer(accumulate_grad_batches=4), or a larger batch; a step reads and writes all "
        "parameters."
    ),
    change="accumulate=4",
)
SPARSE_EMBEDDING: Final = Remedy(
    id="sparse_embedding",
    text=(
        "Update only the rows that a batch uses: torch.nn.Embedding(..., sparse=True) with torch.optim.SparseAdam (or "
        "SGD) for it; two optimizers need self.automatic_optimization = False."
    ),
)
SAME_SHAPE: Final = Remedy(
    id="same_shape",
    text=(
        "Give prediction and target the same shape, such as prediction.squeeze(-1) for (N, 1) and (N,): they broadcast "
        "to (N, N)."
    ),
)
OWN_BUFFERS: Final = Remedy(
    id="own_buffers",
    text="Do not send constant buffers: DDPStrategy(broadcast_buffers=False), with SyncBatchNorm for BatchNorm.",
)
PLAIN_ATTRIBUTE: Final = Remedy(
    id="plain_attribute", text="Keep {buffer} as a plain attribute, not as a registered buffer."
)
DETACH_PARTS: Final = Remedy(
    id="detach_parts",
    text="Cut the graph with detach() where a loss trains one part only: discriminator(generated.detach()).",
)
TOGGLE_OPTIMIZER: Final = Remedy(
    id="toggle_optimizer",
    text="Train one part at a time: self.toggle_optimizer(optimizer), self.untoggle_optimizer(optimizer).",
)
FREEZE: Final = Remedy(
    id="freeze",
    text=(
        "Freeze it: self.{module}.requires_grad_(False); if no module before it trains, call it under torch.no_grad()."
    ),
)
LAZY_PENALTY: Final = Remedy(
    id="lazy_penalty",
    text=(
        "If these gradients are for a penalty, apply it every 16th step, with 16 times its weight (lazy "
        "regularization)."
    ),
)
NO_CREATE_GRAPH: Final = Remedy(
    id="no_create_graph", text="Remove create_graph=True where nothing differentiates the gradients."
)
SAVE_ACTIVATIONS: Final = Remedy(
    id="save_activations",
    text=(
        "Save the activations: call the modules without torch.utils.checkpoint "
        "(gradient_checkpointing=False), or checkpoint only every second module."
    ),
)
FORWARD_ONCE: Final = Remedy(
    id="forward_once",
    text=(
        "Run the forward once per step and reuse its output; where the inputs differ, join them into one batch "
        "(torch.cat)."
    ),
)
COMPILE: Final = Remedy(
    id="compile",
    text="Fuse its operators: compile {module} with torch.compile(module).",
    change="compile",
)
BFLOAT16: Final = Remedy(
    id="bfloat16",
    text="Compute in bfloat16: Trainer(precision='bf16-mixed').",
    in_torch='Compute in bfloat16: torch.autocast("cuda", torch.bfloat16).',
    change="precision=bf16-mixed",
)
CHANNELS_LAST: Final = Remedy(
    id="channels_last",
    text="Store images as channels_last: model.to(memory_format=torch.channels_last), inputs too.",
    change="channels_last",
)
COMPARE_CHANNELS_LAST: Final = Remedy(
    id="compare_channels_last",
    text=(
        "Measure channels_last with lightning-memprof try: some convolutions of images are faster on this CPU, others "
        "slower."
    ),
    change="channels_last",
)
WITH_LIBRARY: Final = Remedy(
    id="with_library",
    text=(
        "Use a build of torch with oneDNN (torch.backends.mkldnn.is_available()), a GPU, or on a Mac the "
        "device mps: these convolutions run without a library."
    ),
)
FUSE_OPERATORS: Final = Remedy(
    id="fuse_operators", text="Fuse operators: torch.compile(model).", needs=frozenset({"eager"}), change="compile"
)
LESS_WORK: Final = Remedy(
    id="less_work",
    text=(
        "Give {module} less work (fewer or smaller layers, shorter inputs), or use a GPU: {family} leaves little to "
        "fuse."
    ),
)
NO_PAIRS: Final = Remedy(
    id="no_pairs",
    text="Avoid a tensor of all pairs: use torch.cdist, a matrix product, or chunks of the pairs.",
)
MORE_WORK: Final = Remedy(id="more_work", text="Give each step more work: a larger batch.")
RECORD_RANKS: Final = Remedy(
    id="record_ranks", text="Record the other ranks too: a collective waits for the last rank to arrive."
)
RECORD_DEVICE: Final = Remedy(
    id="record_device", text="Record host and device: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
)
RECORD_RUN: Final = Remedy(id="record_run", text='Record a training run: Trainer(profiler="memprof").')
RECORD_OPERATORS: Final = Remedy(
    id="record_operators", text='Record the operators of some steps too: Trainer(..., profiler="memprof")'
)
MORE_STEPS: Final = Remedy(id="more_steps", text="Run at least {steps} steps.")
MORE_EPOCHS: Final = Remedy(
    id="more_epochs", text="If the Trainer has reached max_epochs, increase max_epochs: a second fit ends at once."
)
VIEW_TRACE: Final = Remedy(id="view_trace", text="See every operator on a timeline: {command}")

# Ranks

SHARE_CALLBACK: Final = Remedy(
    id="share_callback",
    text="Share the work of {owner} on rank {rank}{host} among all ranks, or do it less often.",
    change="rare_callback={object}",
)
EQUAL_DATA: Final = Remedy(
    id="equal_data",
    text="Check the data of rank {rank}{host}{owner}: its share of samples, its disk, its DataLoader workers.",
)
EQUAL_BATCHES: Final = Remedy(
    id="equal_batches",
    text=(
        "Give all ranks batches of equal size: sort samples by length, and distribute them round-robin "
        "over the ranks. Rank {rank} gets {own} elements per batch, the others {others}."
    ),
)
COMPARE_PARAMETERS: Final = Remedy(
    id="compare_parameters",
    text="Compare the parameters that rank {rank}{host} updates with those of the other ranks.",
)
COMPARE_TIMELINES: Final = Remedy(
    id="compare_timelines",
    text="Compare the timeline of rank {rank}{host} {moment} with that of another rank.",
)
COMPARE_DEVICES: Final = Remedy(
    id="compare_devices",
    text="Compare rank {rank}{host} with the others: its batch lengths, its device clock and temperature.",
)
COMPARE_LINE: Final = Remedy(
    id="compare_line",
    text="Do less in {owner} on rank {rank}{host}, or the same amount on all ranks: the others wait for it.",
)
COMPARE_BATCHES: Final = Remedy(
    id="compare_batches",
    text="Compare rank {rank}{host} with the others: its batch lengths, and other processes on its cores.",
)
COMPARE_PART: Final = Remedy(
    id="compare_part",
    text="Compare {check} of rank {rank} with that of the others: its {part} takes {own}, theirs {others}.",
)
MERGE_TRACES: Final = Remedy(
    id="merge_traces",
    text="See all ranks on one timeline: lightning-memprof merge -o merged.json.gz {files}.",
    needs=frozenset({"ranks"}),
)
FIND_TENSORS: Final = Remedy(
    id="find_tensors",
    text="Find device tensors that only rank {rank} has: rank_zero_only code, longer batches, more layers.",
)
LOAD_TO_HOST: Final = Remedy(
    id="load_to_host",
    text=(
        "Load checkpoints to the host: torch.load(path, map_location='cpu'), so that not all ranks load to one device."
    ),
)
FIND_HOST_MEMORY: Final = Remedy(
    id="find_host_memory",
    text=(
        "Find host memory that only rank {rank} has: gathered outputs of all ranks, rank_zero_only caches, "
        "more workers."
    ),
)
FREE_CORES: Final = Remedy(
    id="free_cores",
    text=(
        "Find the processes that use the cores (top): end them, lower their priority (renice 19 -p PID), or move them "
        "to other cores (taskset)."
    ),
)
RAISE_CPU_LIMIT: Final = Remedy(
    id="raise_cpu_limit",
    text=(
        "Give the container or job more than its {quota} of {cores} cores (cpu.max, --cpus), or use fewer threads "
        "and DataLoader workers."
    ),
)
FEWER_THREADS: Final = Remedy(
    id="fewer_threads",
    text="Use fewer threads: torch.set_num_threads({threads}), or OMP_NUM_THREADS={threads}.",
    change="threads={threads}",
)

# Memory

CHECKPOINT_BLOCKS: Final = Remedy(
    id="checkpointing",
    text="Checkpoint each of {blocks}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).",
    needs=frozenset({"training"}),
    change="checkpointing",
)
CHECKPOINT_WITH_FSDP: Final = Remedy(
    id="checkpoint_with_fsdp", text="Or in the strategy: FSDPStrategy(activation_checkpointing_policy={{Block}})."
)
SMALLER_BATCH: Final = Remedy(
    id="smaller_batch",
    text="Save fewer activations: a smaller batch with Trainer(accumulate_grad_batches=2).",
    in_torch="Save fewer activations: a smaller batch, and an optimizer step after several.",
    needs=frozenset({"training"}),
    change="accumulate=2",
)
HALF_PRECISION: Final = Remedy(
    id="half_precision",
    text="Halve the activations: Trainer(precision='bf16-mixed').",
    in_torch="Halve the activations: torch.autocast('cuda', dtype=torch.bfloat16) around forward and loss.",
    needs=frozenset({"training"}),
    change="precision=bf16-mixed",
)
SHARD_STATE: Final = Remedy(
    id="shard_state",
    text=(
        "Shard it over the ranks: FSDPStrategy(), ModelParallelStrategy() with fully_shard, or ZeroRedundancyOptimizer."
    ),
)
LESS_STATE: Final = Remedy(
    id="less_optimizer_state",
    text="Use an optimizer with less state: torch.optim.Adafactor, SGD without momentum, or 8-bit state.",
)
SMALLER_DTYPE: Final = Remedy(
    id="smaller_dtype",
    text=(
        "Keep the samples in the dtype of their files ({small}) and convert each one in {method}: {name} is {dtype}."
    ),
)
MAP_FILE: Final = Remedy(
    id="map_file",
    text="Map a file instead of reading it: numpy.load(path, mmap_mode='r'), torch.load(path, mmap=True).",
)
IN_PARTS: Final = Remedy(
    id="in_parts",
    text=(
        "Split the work of {owner} into parts, or accumulate it in each batch: it needs {size} beyond the "
        "training steps."
    ),
)
VALIDATE_IN_SMALLER_BATCHES: Final = Remedy(
    id="validate_in_smaller_batches",
    text="Validate in smaller batches: batch_size of the DataLoader that val_dataloader returns.",
)
NO_GRAD: Final = Remedy(
    id="no_grad",
    text="Call models in {name} under torch.no_grad() if nothing trains on their outputs, or in smaller batches.",
)
RECORD_FROM_START: Final = Remedy(
    id="record_from_start",
    text="Record the memory from the start: lightning_memprof.start_memory_history() before the Trainer.",
)
SAMPLES_IN_ARRAYS: Final = Remedy(
    id="samples_in_arrays",
    text=(
        "Store the samples in arrays or tensors instead of lists, dicts and strings: numpy.array(...), "
        "torch.tensor(...)."
    ),
)
BOUND_WORKER_CACHE: Final = Remedy(
    id="bound_worker_cache",
    text=(
        "Find the data that {sample} or a function it calls keeps (attribute, global, "
        "lru_cache(maxsize=None)), and bound it."
    ),
)
SHARE_CACHE: Final = Remedy(id="share_cache", text="Each worker has its own copy: cache on disk or in a shared tensor.")
AGGREGATE_VALIDATION: Final = Remedy(
    id="aggregate_validation",
    text="Aggregate in validation_step, in a metric or a sum, instead of keeping each batch's outputs.",
)
BOUND_HOLDER: Final = Remedy(id="bound_holder", text="Clear or bound {place}{assigned}{detached}.")
STORE_LESS: Final = Remedy(
    id="store_less",
    text="Look for data that {owner} stores in each batch: store a number instead, or clear its list or dict.",
)
RELEASE_TENSORS: Final = Remedy(
    id="release_tensors",
    text=(
        "Find the object that keeps {made}, such as a list: store numbers (.item()) or copies on the host "
        "(.detach().cpu()), or clear it{record}."
    ),
)
RELEASE_NATIVE: Final = Remedy(
    id="release_native", text="Find the extension or scripted module that keeps {made} after its step."
)
DROP_GRAPH: Final = Remedy(
    id="drop_graph",
    text="Remove retain_graph=True, and keep loss.detach(), not the loss: a graph holds its activations.",
)
TRACE_NATIVE: Final = Remedy(
    id="trace_native",
    text="Look for a library that keeps buffers: python -m memray run --native, then memray flamegraph --leaks.",
)
EVEN_LENGTHS: Final = Remedy(
    id="even_lengths",
    text="Pad batches to a few lengths, or set MALLOC_ARENA_MAX=2 before the training.",
)
STORE_DETACHED: Final = Remedy(
    id="store_detached",
    text="Store loss.item() or loss.detach(), not the loss, and clear lists of outputs in on_train_epoch_end.",
)
FIND_APPENDS: Final = Remedy(id="find_appends", text="Find callbacks and metrics that append to a list in each batch.")

# A failed allocation

RELEASE_EARLIER: Final = Remedy(
    id="release_earlier",
    text=(
        "Release unused blocks earlier: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,garbage_collection_threshold:0.8."
    ),
)
EMPTY_BETWEEN_STAGES: Final = Remedy(
    id="empty_between_stages",
    text="Return the cache between stages with other shapes: torch.cuda.empty_cache() in on_validation_end.",
)
STOP_OTHERS: Final = Remedy(
    id="stop_others",
    text="Run nvidia-smi to see which processes use the device, and stop leftovers of earlier runs.",
)
OWN_DEVICES: Final = Remedy(
    id="own_devices",
    text="Give each rank a device of its own: Trainer(devices=...) with as many devices as ranks.",
)
FREE_DEVICE: Final = Remedy(
    id="free_device",
    text=(
        "Use a free device: Trainer(devices=lightning.pytorch.accelerators.find_usable_cuda_devices(1)), or "
        "CUDA_VISIBLE_DEVICES."
    ),
)
LIMIT_SHARES: Final = Remedy(
    id="limit_shares",
    text="If processes must share the device, limit each with torch.cuda.set_per_process_memory_fraction(0.5).",
)
RAISE_FRACTION: Final = Remedy(
    id="raise_fraction",
    text="Raise the fraction in torch.cuda.set_per_process_memory_fraction, or remove the call.",
)
RAISE_MEMORY_LIMIT: Final = Remedy(
    id="raise_memory_limit",
    text=(
        "Raise the limit: ulimit -v unlimited in the shell that starts the program, or more memory for its "
        "container or job (docker run --memory, sbatch --mem)."
    ),
)
SHARD_MODEL: Final = Remedy(
    id="shard_model",
    text=(
        "Shard the model over devices: Trainer(strategy='fsdp'), or ModelParallelStrategy() with fully_shard in "
        "configure_model."
    ),
)
CREATE_SHARDED: Final = Remedy(
    id="create_sharded",
    text=(
        "Create large modules in configure_model with fully_shard, so that each process holds its shard only, or "
        "on torch.device('meta') until their weights are loaded."
    ),
)
HALF_MODEL: Final = Remedy(
    id="half_model",
    text='Halve the model itself: Trainer(precision="bf16-true").',
)
LOAD_MAPPED: Final = Remedy(
    id="load_mapped",
    text=(
        "Load weights with torch.load(..., map_location='cpu', mmap=True): on the device they would exist twice "
        "until load_state_dict returns."
    ),
)
TABLES_ON_HOST: Final = Remedy(
    id="tables_on_host",
    text="Keep large tables, buffers and evaluation-only models on the host.",
)
SPLIT_OPERATION: Final = Remedy(
    id="split_operation",
    text=(
        "Split the operation on the line above into chunks; for attention, use "
        "torch.nn.functional.scaled_dot_product_attention, which never builds the full attention matrix."
    ),
)
EVALUATE_WITHOUT_GRADIENTS: Final = Remedy(
    id="evaluate_without_gradients",
    text=(
        "This step needs no gradients: keep Trainer(inference_mode=True), store no outputs on the device between "
        "batches, and use a smaller batch_size in its DataLoader."
    ),
)
FIND_CONTAINERS: Final = Remedy(
    id="find_containers",
    text=(
        "Look for growing containers: lists of step outputs (store loss.item() or .detach().cpu()), caches in a "
        "Dataset; lightning-memprof show has the RSS of every step."
    ),
)
FEWER_LOADING_PROCESSES: Final = Remedy(
    id="fewer_loading_processes",
    text=(
        "Use fewer data loading processes: DataLoader({fewer}), and memory-map large arrays with "
        "numpy.load(mmap_mode='r')."
    ),
)
HALF_BATCH: Final = Remedy(
    id="half_batch",
    text="Use {half} and Trainer(accumulate_grad_batches={times}): same gradients from smaller batches.",
)
SMALLER_EVALUATION_BATCH: Final = Remedy(
    id="smaller_evaluation_batch",
    text="Use {half}: outside of training this does not change the results.",
)
FUSED_STATES: Final = Remedy(
    id="fused_states",
    text=(
        "Reduce the memory of the optimizer step: {optimizer}(..., fused=True) avoids the parameter-sized "
        "temporaries of foreach=True; an 8-bit optimizer (bitsandbytes) needs a quarter of the state."
    ),
)

# Traces and devices

RECORD_LATER: Final = Remedy(
    id="record_later",
    text="Record later steps: Schedule(wait=10, warmup=2, active=3).",
    in_torch="Record later steps: torch.profiler.schedule(wait=10, warmup=2, active=3).",
)
RECORD_REPLAY: Final = Remedy(
    id="record_replay",
    text=(
        "Record a replay of the graph: start the profiler after the capture. During the capture an idle "
        "GPU is expected."
    ),
)
RECORD_ALL_EVENTS: Final = Remedy(
    id="record_all_events",
    text="Use a trace with all events of a few steps.",
)
RECORD_SHAPES: Final = Remedy(
    id="record_shapes",
    text="Record the input shapes of operators to get their FLOP/s: profile(record_shapes=True).",
)
RECORD_PYTHON_STACKS: Final = Remedy(
    id="record_python_stacks",
    text="Record the Python stacks with {profiler}(with_stack=True), then move that code out of the step.",
    needs=frozenset({"no stacks"}),
)

ALL_AT_ONCE: Final = Remedy(
    id="update_all_at_once",
    text="Update all parameters at once: torch.optim.{optimizer}(..., {kernels}=True).",
    needs=frozenset({"training", "optimizer loop"}),
    change="{kernels}_optimizer",
)
FUSE_KERNELS: Final = Remedy(
    id="fuse_kernels",
    text='Fuse them: torch.compile(model), or torch.compile(model, mode="reduce-overhead") with CUDA graphs.',
    needs=frozenset({"eager"}),
    change="compile",
)
LAUNCH_LESS: Final = Remedy(
    id="launch_less",
    text="Launch fewer and longer kernels: torch.compile(model{mode}).",
    needs=frozenset({"eager", "no graphs"}),
    change="compile",
)
LAUNCH_AT_ONCE: Final = Remedy(
    id="launch_at_once",
    text="Launch each compiled part at once: torch.compile(model{mode}).",
    needs=frozenset({"compiled", "no graphs"}),
)
COMPILE_ONCE: Final = Remedy(
    id="compile_once",
    text=(
        "Compile once, not in each step: TORCH_LOGS=recompiles prints why torch.compile recompiles; for "
        "varying sizes use torch.compile(dynamic=True), for a number that changes, a tensor."
    ),
)
CHECK_FEWER_GUARDS: Final = Remedy(
    id="check_fewer_guards",
    text=(
        "Check fewer guards: compile fewer and larger parts (TORCH_LOGS=graph_breaks), and after the first steps "
        "torch.compiler.set_stance(skip_guard_eval_unsafe=True)."
    ),
)
REPLAY_GRAPHS: Final = Remedy(
    id="replay_graphs",
    text="Record each graph of kernels once and replay it: pad batches to a few shapes.",
)
BATCH_OPERATORS: Final = Remedy(
    id="batch_operators",
    text="Batch the tiny operators: stack their inputs and call one operator, or torch.compile(model).",
    needs=frozenset({"eager"}),
    change="compile",
)
LARGER_SHAPES: Final = Remedy(
    id="larger_shapes",
    text="Give each operator more work: a larger batch, and sizes that are multiples of 8.",
)
LARGER_KERNELS: Final = Remedy(
    id="larger_kernels",
    text="Give each kernel more work: a larger batch, scaled_dot_product_attention, fused norms.",
)
MIXED_PRECISION: Final = Remedy(
    id="mixed_precision",
    text='Train in mixed precision: Trainer(precision="{precision}").',
    in_torch='Train in mixed precision: torch.autocast("cuda", torch.{dtype}){scaler}.',
    needs=frozenset({"training"}),
    change="precision={precision}",
)
LOWER_PRECISION: Final = Remedy(
    id="lower_precision",
    text='Compute in half precision: Trainer(precision="{precision}").',
    in_torch="Compute in half precision: model.to(torch.{dtype}).",
    needs=frozenset({"inference"}),
)
TF32: Final = Remedy(
    id="tf32",
    text='Or keep 32 bits and multiply in TF32: torch.set_float32_matmul_precision("high").',
    change="matmul_precision=high",
)
MULTIPLES_OF_8: Final = Remedy(
    id="multiples_of_8",
    text="Make the sizes of layers and batches multiples of 8.",
)
UNDER_AUTOCAST: Final = Remedy(
    id="under_autocast",
    text="Let autocast run it in half precision: remove .float() and autocast(enabled=False) before it.",
)
DEVICES_AT_ONCE: Final = Remedy(
    id="devices_at_once",
    text=("Run the GPUs in parallel: split each batch over them, or use micro-batches (torch.distributed.pipelining)."),
)
COPY_BETWEEN_LESS: Final = Remedy(
    id="copy_between_less",
    text=("Copy less between GPUs: keep a layer and its inputs on one GPU, and copy each tensor once per step."),
)
FILL_LESS: Final = Remedy(
    id="fill_less",
    text="Fill less: torch.empty where every element is written, optimizer.zero_grad(set_to_none=True).",
)

KEEP_ON_DEVICE: Final = Remedy(
    id="keep_on_device",
    text=(
        "Keep values on the device: loss.detach() instead of loss.item(), torch.where instead of if, self.log(name, "
        "tensor) with Trainer(log_every_n_steps=50)."
    ),
    in_torch=(
        "Keep values on the device: loss.detach() instead of loss.item(), torch.where instead of if; read them every "
        "50 steps."
    ),
    change="log_every=50",
)
FIXED_SIZES: Final = Remedy(id="fixed_sizes", text="Avoid value-dependent sizes, which stop the host: {instead}.")
NO_BRANCH: Final = Remedy(
    id="no_branch",
    text="Do not branch on a tensor's value in a step: torch.where instead of if.",
)
NO_SYNCHRONIZE: Final = Remedy(
    id="no_synchronize",
    text="Remove torch.cuda.synchronize() from the steps: time them with torch.cuda.Event.",
)
READ_EVENTS_LATER: Final = Remedy(
    id="read_events_later",
    text="Read event times after several steps, not in each: event.synchronize() stops the host.",
)
FIND_SYNC_CALLS: Final = Remedy(
    id="find_sync_calls",
    text='Find the calls: torch.cuda.set_sync_debug_mode("warn") prints the line of each.',
)
COPY_FROM_PINNED: Final = Remedy(
    id="copy_from_pinned",
    text="Copy from pinned memory without blocking: tensor.pin_memory().to(device, non_blocking=True).",
)
MOVE_RESULTS_LESS_OFTEN: Final = Remedy(
    id="move_results_less_often",
    text="Move results to the host less often: .cpu() every N steps, self.log(name, tensor) instead of a list.",
    in_torch="Move results to the host less often: .cpu() every N steps.",
)
KEEP_PINNED: Final = Remedy(
    id="keep_pinned",
    text="Keep pinned memory from step to step: pinned = torch.empty(n, pin_memory=True), pinned.copy_(x).",
)
STAY_ON_GPU: Final = Remedy(
    id="stay_on_gpu",
    text="Leave it on the GPU: remove the .to(device) and .cpu() of a module or tensor from the steps.",
)
COPY_FEWER_BYTES: Final = Remedy(
    id="copy_fewer_bytes",
    text="Copy fewer bytes: uint8 images, bfloat16 tensors, int32 indices; keep data on the GPU if it fits.",
)
COPY_IN_STREAM: Final = Remedy(
    id="copy_in_stream",
    text=(
        "Overlap copies with kernels: start each copy early in a torch.cuda.Stream(), and wait for its event before "
        "using it."
    ),
)
MAKE_ON_GPU: Final = Remedy(
    id="make_on_gpu",
    text="Make the tensor on the GPU: {call}(..., device={device}); {operator} runs on the CPU.",
)
RUN_ON_GPU: Final = Remedy(
    id="run_on_gpu",
    text="Run {operator} on the GPU: move its tensors there once, tensor.to({device}); it runs on the CPU.",
)
COLLECT_BETWEEN_STEPS: Final = Remedy(
    id="collect_between_steps",
    text="Collect garbage between steps: gc.freeze() after setup, gc.disable(), gc.collect() every 100 steps.",
    change="gc_freeze",
)
MOVE_OUT_OF_STEP: Final = Remedy(
    id="move_out_of_step",
    text="Move this code out of the step: {place}.",
)
CALL_ONCE: Final = Remedy(
    id="call_once",
    text="Call {call} once, before the steps: it takes up to {longest} on the host.",
)
FIND_SLOW_LINES: Final = Remedy(
    id="find_slow_lines",
    text="Find the slow lines in {place}: python -m cProfile shows the functions that it calls.",
)

EXPANDABLE_SEGMENTS: Final = Remedy(
    id="expandable_segments",
    text="Let segments grow instead of being returned: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    change="expandable_segments",
)
FREE_MEMORY: Final = Remedy(
    id="free_memory",
    text="Free memory: a smaller batch with Trainer(accumulate_grad_batches=2), or activation checkpointing.",
    in_torch="Free memory: a smaller batch with gradient accumulation, or activation checkpointing.",
    needs=frozenset({"training"}),
    change="accumulate=2",
)
CACHING_ALLOCATOR: Final = Remedy(
    id="caching_allocator",
    text=(
        "Use the caching allocator: unset PYTORCH_NO_CUDA_MEMORY_CACHING (on ROCm also PYTORCH_NO_HIP_MEMORY_CACHING)."
    ),
)
NATIVE_ALLOCATOR: Final = Remedy(
    id="native_allocator",
    text="Use PyTorch's native allocator: remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF.",
)

SMALLER_BUCKETS: Final = Remedy(
    id="smaller_buckets",
    text="Send gradients earlier, in smaller buckets: DDPStrategy(bucket_cap_mb={size}).",
    in_torch="Send gradients earlier, in smaller buckets: DistributedDataParallel(model, bucket_cap_mb={size}).",
    needs=frozenset({"training"}),
)
OVERLAP_GRADIENTS: Final = Remedy(
    id="overlap_gradients",
    text="Overlap gradients with backward: DDPStrategy(bucket_cap_mb=50, static_graph=True).",
    in_torch="Overlap gradients with backward: DistributedDataParallel(model, bucket_cap_mb=50, static_graph=True).",
    needs=frozenset({"training"}),
    change="static_graph",
)
PREFETCH_PARAMETERS: Final = Remedy(
    id="prefetch_parameters",
    text="Prefetch parameters: FSDPStrategy(forward_prefetch=True), or fully_shard's set_modules_to_forward_prefetch.",
    in_torch="Prefetch parameters: module.set_modules_to_forward_prefetch([next_module]) of FSDP2.",
)
FILL_PIPELINE: Final = Remedy(
    id="fill_pipeline",
    text=(
        "Fill the pipeline: more micro-batches per step, stages of equal duration, or an interleaved "
        "schedule (torch.distributed.pipelining.ScheduleInterleaved1F1B)."
    ),
)
EARLY_TRANSFER: Final = Remedy(
    id="early_transfer",
    text="Start the transfer early and wait late (async_op=True), with work of another layer or batch in between.",
)
SEND_LESS_OFTEN: Final = Remedy(
    id="send_less_often",
    text="Send less often: Trainer(accumulate_grad_batches=2).",
    in_torch="Send less often: accumulate gradients under model.no_sync().",
    needs=frozenset({"training"}),
)
SEND_BFLOAT16: Final = Remedy(
    id="send_bfloat16",
    text=(
        "Send bfloat16: "
        "DDPStrategy(ddp_comm_hook=torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)."
    ),
    in_torch=(
        "Send bfloat16: model.register_comm_hook(None, "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)."
    ),
    needs=frozenset({"training", "sends float32"}),
)
SEND_LESS_PER_TOKEN: Final = Remedy(
    id="send_less_per_token",
    text="Send less per token: split layers over fewer devices, or use larger batches.",
    needs=frozenset({"inference"}),
)
SHARD_IN_NODE: Final = Remedy(
    id="shard_in_node",
    text='Shard within a node only: FSDPStrategy(sharding_strategy="HYBRID_SHARD"), or "SHARD_GRAD_OP" if it fits.',
    needs=frozenset({"lightning", "training"}),
)
GATHER_ONCE: Final = Remedy(
    id="gather_once",
    text=(
        "Gather parameters once per step if they fit: fully_shard(module, reshard_after_forward=False); or shard "
        "within a node only (mesh=..., 2-D)."
    ),
    needs=frozenset({"other program", "training"}),
)
SEND_HALF: Final = Remedy(
    id="send_half",
    text="Send bfloat16 instead of float32.",
    needs=frozenset({"sends float32"}),
)
STAY_IN_NODE: Final = Remedy(
    id="stay_in_node",
    text="Keep more of the traffic within a node.",
)
SEND_FEWER_BYTES: Final = Remedy(
    id="send_fewer_bytes",
    text="Send less: split layers over fewer devices, or give each step a larger batch.",
)
FIND_LATE_RANK: Final = Remedy(
    id="find_late_rank",
    text="Find the late rank: {collective} takes {times}. Record all ranks and compare them.",
)
COMBINE_COLLECTIVES: Final = Remedy(
    id="combine_collectives",
    text="Combine {count} collectives of less than {size}.",
)

# Snapshots

SMALLER_INPUT: Final = Remedy(
    id="smaller_input",
    text="Use a smaller batch or shorter inputs: activations and caches shrink with them.",
    needs=frozenset({"inference"}),
)
SMALLER_WEIGHTS_OR_CACHE: Final = Remedy(
    id="smaller_weights_or_cache",
    text="If these are weights, load them in fewer bytes (dtype=torch.bfloat16); if it is a cache, make it smaller.",
    needs=frozenset({"inference"}),
)
SMALLER_WEIGHTS: Final = Remedy(
    id="smaller_weights",
    text="Load the weights in fewer bytes: dtype=torch.bfloat16.",
)
WITHOUT_GRADIENTS: Final = Remedy(
    id="without_gradients",
    text=(
        "Run the model under torch.no_grad() if it does not train; else save fewer activations: "
        "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)."
    ),
    needs=frozenset({"inference"}),
)
SMALLER_CACHE: Final = Remedy(
    id="smaller_cache",
    text=(
        "Make the cache smaller: a shorter maximum length, or fewer sequences at once; with vLLM, "
        "LLM(gpu_memory_utilization=..., max_model_len=...)."
    ),
)
FREE_GRADIENTS: Final = Remedy(
    id="free_gradients",
    text=(
        "Free gradients earlier: step each parameter in backward (Tensor.register_post_accumulate_grad_hook); with "
        "several GPUs, shard them: {sharded}."
    ),
)
SMALLER_STATES: Final = Remedy(
    id="smaller_states",
    text="Use an optimizer with smaller states, such as 8-bit Adam; with several GPUs, shard them: {sharded}.",
)
FUSE_GRADIENTS: Final = Remedy(
    id="fuse_gradients",
    text=(
        "If these are gradients of activations, use one fused operator in place of several, such as torch.softmax or "
        "torch.nn.functional.scaled_dot_product_attention, or a smaller batch."
    ),
)
CLEAR_GRADIENTS: Final = Remedy(
    id="clear_gradients",
    text=(
        "Gradients of the last backward are live in forward: unless you accumulate them, call "
        "optimizer.zero_grad(set_to_none=True) before forward."
    ),
)
NAME_HOLDER: Final = Remedy(
    id="name_holder",
    text="Record a run with MemProfilerCallback(): if memory grows, its page names the variable that keeps it.",
    needs=frozenset({"lightning"}),
)
GROW_SEGMENTS: Final = Remedy(
    id="grow_segments",
    text="Let segments grow: PYTORCH_CUDA_ALLOC_CONF={settings}.",
    change="expandable_segments",
)
ROUND_ALLOCATIONS: Final = Remedy(
    id="round_allocations",
    text="Or round allocations: PYTORCH_CUDA_ALLOC_CONF={settings}.",
)
FEW_LENGTHS: Final = Remedy(
    id="few_lengths",
    text="Pad batches to a few lengths: sizes that change with every batch leave pieces that fit nothing else.",
)
RETURN_CACHE: Final = Remedy(
    id="return_cache",
    text="Return the allocator's cache before another program needs it: torch.cuda.empty_cache().",
)
NO_EMPTY_CACHE: Final = Remedy(
    id="no_empty_cache",
    text="Remove torch.cuda.empty_cache() from the training loop: the allocator reuses its cache.",
)
LIMIT_ALL_GATHERS: Final = Remedy(
    id="limit_all_gathers",
    text="With FSDP1, keep FullyShardedDataParallel(limit_all_gathers=True); FSDP2 does not use record_stream.",
)
WAIT_FOR_EVENT: Final = Remedy(
    id="wait_for_event",
    text="With a stream of your own, wait for its event before the tensor is freed instead of record_stream.",
)
ONE_POOL: Final = Remedy(
    id="one_pool",
    text="Capture graphs that never run at the same time into one pool: torch.cuda.graph(graph, pool=other.pool()).",
)
FEW_INPUT_SHAPES: Final = Remedy(
    id="few_input_shapes",
    text="With torch.compile(mode='reduce-overhead'), use few input shapes: each has its own graph.",
)
FIND_ALLOCATIONS: Final = Remedy(
    id="find_allocations",
    text="Find the allocation sites at the peak: MemProfilerCallback(collectors=[AllocatorHistory()]).",
    in_torch="Find the allocation sites: torch.cuda.memory._record_memory_history(stacks='python').",
)
RECORD_STACKS_FROM_START: Final = Remedy(
    id="record_stacks_from_start",
    text="Record stacks from the start of the program: {share} of the {whole} has no stack.",
)

# Recording

FEWER_WINDOWS: Final = Remedy(
    id="fewer_windows",
    text="Train some steps outside windows: MemProfilerCallback(schedule=Schedule(wait=10, active=2)).",
)
RECORD_LESS: Final = Remedy(id="record_less", text="Record less per step: {profiler}({less}).")
REMOVE_TORCH_PROFILER: Final = Remedy(
    id="remove_profiler",
    text='Remove the other profiler: torch.profiler.profile(...) or Trainer(profiler="pytorch").',
)
REMOVE_PYTHON_PROFILER: Final = Remedy(
    id="remove_python_profiler",
    text=(
        "Remove the other profiler, or use it for a few steps: cProfile, sys.setprofile(...) or "
        'Trainer(profiler="advanced").'
    ),
)

COMPARE_WITH_PULSE: Final = Remedy(
    id="compare_with_pulse",
    text="Before acting on idle times, compare with the steps outside windows (in the pulse).",
    in_torch="Before acting on idle times, compare with the step time without the profiler.",
)
REPORT_ERROR: Final = Remedy(
    id="report_error",
    text="Report this error to the developers of lightning-memprof.",
)

# Hangs

TIMEOUT: Final = Remedy(
    id="loader_timeout", text="Make a stuck worker raise: DataLoader(timeout=60); num_workers=0 shows the line."
)
SAME_CALLS: Final = Remedy(
    id="same_collectives",
    text="Call the same collectives on every rank, in the same order and with the same shapes.",
)
SAME_BATCHES: Final = Remedy(
    id="same_batches",
    text="Give every rank the same number of batches: DistributedSampler(drop_last=True), or limit_train_batches=N.",
)
LOOK_AT_NETWORK: Final = Remedy(
    id="look_at_network",
    text="All ranks wait in one collective: check the network of the nodes; for NCCL set NCCL_DEBUG=INFO.",
)
LOOK_AT_LINE: Final = Remedy(id="look_at_line", text="Look at {place}: {what}.")
READ_STACKS: Final = Remedy(id="read_stacks", text="Read the stacks of all threads in {file}.")
READ_OUTPUT: Final = Remedy(id="read_output", text="Read the end of the output of rank {rank}{kernel}.")
CONTINUE_PROCESS: Final = Remedy(id="continue_process", text="Continue it: `kill -CONT {pid}` on {host}.")
DUMP_STACKS: Final = Remedy(id="dump_stacks", text="Dump its stacks: `py-spy dump --pid {pid}` on {host}.")
WITHOUT_WORKERS: Final = Remedy(
    id="without_workers",
    text="Run with DataLoader(num_workers=0): the main process then shows the error with its line.",
)
FEWER_WORKERS_OF_MEMORY: Final = Remedy(
    id="fewer_workers_for_memory",
    text=(
        "The kernel kills processes when memory runs out: use fewer workers; `dmesg | grep -i oom` on the node "
        "confirms it."
    ),
)
SHARED_MEMORY: Final = Remedy(
    id="shared_memory",
    text="Shared memory is full: enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers.",
)
