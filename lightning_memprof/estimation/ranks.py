"""Training on several devices, of which one is simulated: its process group, and how it shards a model.

The group is torch's "fake" one, whose collectives return at once. FSDP2 and DTensor run on it as they are; FSDP1 does
not, and FSDP2 with the same units takes its place. DDP's buckets are modelled.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import torch
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import enable_wrap

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.torch_internals import FakeStore, FSDPParamGroup, ShardingPropagator
from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.changes import repeated_blocks
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from lightning_memprof.estimation.storages import StorageTracer


_KNOWN: Final = "ddp, fsdp and fsdp2"
# Both are Lightning's DDP strategies by class.
_OTHERS: Final = (DeepSpeedStrategy, XLAStrategy)
_FIRST_BUCKET: Final = MIB
_BUCKET: Final = 25 * MIB
_COMMUNICATION: Final = "communication"
_HALVES: Final = {"16": torch.float16, "bf16": torch.bfloat16}
_FSDP1: Final = "FSDP is simulated as FSDP2 with the same units, which shards each parameter instead of a flat one"
_OFFLOADED: Final = (
    "ModelParallelStrategy of Lightning 2.6 moves offloaded parameters to the GPU, where torch refuses them: override"
    " its model_to_device"
)
_LIBRARY: Final = "buffers of the communication library (NCCL) are not included"
_WHOLE: Final = MappingProxyType(
    {
        "fsdp": "no auto_wrap_policy: the whole model is gathered at once;"
        " FSDPStrategy(auto_wrap_policy={Block}) needs less",
        "fsdp2": "no fully_shard in configure_model, and no blocks that repeat: the whole model is gathered at once",
    }
)


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that train together.

    Attributes:
        kind: ``ddp``, ``fsdp``, ``fsdp2``, or empty for one device without any of them.
        data_parallel: ranks that have different batches.
        tensor_parallel: ranks that share a batch.
        strategy: Lightning's, with its options.
        nodes: number of machines.
        dtype: of gathered parameters and reduced gradients under FSDP1; None keeps the parameters'.
        is_offloaded: whether all shards, and with them gradients and the optimizer's state, are in host memory.
        rank: the one that is simulated.
    """

    kind: Literal["", "ddp", "fsdp", "fsdp2"] = ""
    data_parallel: int = 1
    tensor_parallel: int = 1
    strategy: Any = None
    nodes: int = 1
    dtype: torch.dtype | None = None
    is_offloaded: bool = False
    rank: int = 0

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.data_parallel * self.tensor_parallel

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has a part of each parameter."""
        return self.kind in {"fsdp", "fsdp2"}

    @property
    def name(self) -> str:
        """What a reader calls it."""
        if self.kind != "fsdp2" or self.tensor_parallel == 1:
            return self.kind
        return "model parallel" if self.data_parallel == 1 else "fsdp2 and model parallel"

    def assumptions(self, *, units: int, offloads: bool) -> Iterator[str]:
        """Yield what the figures rest on, a sentence each.

        Args:
            units: number of modules whose parameters FSDP gathers together.
            offloads: whether parameters are in host memory.
        """
        if units == 1 and self.data_parallel > 1:
            yield _WHOLE[self.kind]
        if self.kind:
            has_largest = self.is_sharded and not self.rank and self.tensor_parallel == 1
            largest = ", which has the largest shards" if has_largest else ""
            yield f"rank {self.rank} is simulated{largest}; all ranks have batches of the same size"
            yield _LIBRARY
        if self.kind == "fsdp":
            yield _FSDP1
        elif offloads:
            yield _OFFLOADED
        if self.kind == "ddp" and self.strategy._ddp_comm_hook is not None:  # noqa: SLF001 no public one
            yield "the buffers of DDP's communication hook are not included"

    @contextmanager
    def group(self, device_type: str) -> Iterator[DeviceMesh | None]:
        """Be a rank of a process group, and yield the mesh of its devices."""
        if not self.kind:
            yield None
            return
        distributed.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.count)
        try:
            names = ("data_parallel", "tensor_parallel")
            mesh = init_device_mesh(device_type, (self.data_parallel, self.tensor_parallel), mesh_dim_names=names)
            with wrapped(FSDPParamGroup, "__init__", _offloading) if self.is_offloaded else nullcontext():
                yield mesh
        finally:
            distributed.destroy_process_group()

    def wrapping(self, mesh: DeviceMesh | None) -> AbstractContextManager[None]:
        """Let ``wrap()``, in ``configure_model`` for FSDP1, shard modules."""
        if self.kind != "fsdp" or mesh is None:
            return nullcontext()
        return enable_wrap(wrapper_cls=lambda module, **_: self._shard(module, mesh, is_root=False))

    def shard(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Shard the units of a model on ``meta``, and its root, unless it has done so itself."""
        if not self.is_sharded or mesh is None:
            return
        if self.kind == "fsdp":
            _setup_activation_checkpointing(model, self.strategy._activation_checkpointing_kwargs)  # noqa: SLF001
        elif any(isinstance(module, FSDPModule) for module in model.modules()) or self.data_parallel == 1:
            return
        for unit in self._units(model):
            if not isinstance(unit, FSDPModule):
                self._shard(unit, mesh, is_root=False)
        if not isinstance(model, FSDPModule):
            self._shard(model, mesh, is_root=True)

    def buckets(
        self, model: nn.Module, tracer: StorageTracer, is_synchronized: Callable[[], bool]
    ) -> DDPBuckets | None:
        """Return DDP's buckets; None without DDP.

        Args:
            model: on the simulated device.
            tracer: of its storages.
            is_synchronized: whether the current backward exchanges gradients.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.kind != "ddp" or not trained:
            return None
        return DDPBuckets(trained, self.strategy._ddp_kwargs, tracer, is_synchronized)  # noqa: SLF001 no public one

    @contextmanager
    def labelled(self, tracer: StorageTracer) -> Iterator[None]:
        """Give the category of communication to what FSDP2 makes for it."""

        def making(link: Link) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                with tracer.making(_COMMUNICATION):
                    result = link.call(*args, **named)
                # FSDP pads and pins its shards in the first forward.
                shards = [(shard.sharded_param, shard.offload_to_cpu) for shard in args[0].fsdp_params]
                tracer.label(((None, shard) for shard, _ in shards), "parameter")
                hosted = (shard.grad for shard, is_on_host in shards if is_on_host)
                tracer.label(((None, gradient) for gradient in hosted if gradient is not None), "gradient")
                return result

            return call

        def shapes(link: Link) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                with tracer.paused():
                    return link.call(*args, **named)

            return call

        with ExitStack() as undo:
            # A DTensor computes shapes on tensors as large as the whole.
            undo.enter_context(wrapped(ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes))
            for name in ("unshard", "wait_for_unshard", "post_backward") if self.is_sharded else ():
                undo.enter_context(wrapped(FSDPParamGroup, name, making))
            yield

    def _units(self, model: nn.Module) -> list[nn.Module]:
        policy = self.strategy.kwargs.get("auto_wrap_policy") if self.kind == "fsdp" else None
        if self.kind == "fsdp2":
            return repeated_blocks(model)
        return [] if policy is None else list(_chosen(model, policy)[0])

    def _shard(self, module: nn.Module, mesh: DeviceMesh, *, is_root: bool) -> nn.Module:
        options: dict[str, Any] = {"mesh": mesh["data_parallel"]}
        if self.kind == "fsdp":
            sharding = self.strategy.sharding_strategy.name
            given = self.strategy.mixed_precision
            policy = MixedPrecisionPolicy(
                param_dtype=self.dtype if given is None else given.param_dtype,
                reduce_dtype=self.dtype if given is None else given.reduce_dtype,
            )
            options |= {
                "mesh": self._hybrid(mesh) if "HYBRID" in sharding else mesh["data_parallel"],
                # Backward begins with the root's parameters: FSDP1 keeps them too.
                "reshard_after_forward": sharding in {"FULL_SHARD", "HYBRID_SHARD"} and not is_root,
                "mp_policy": policy,
            }
        shard: Any = fully_shard
        sharded: nn.Module = shard(module, **options)
        return sharded

    def _hybrid(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh that shards within a machine and replicates between machines."""
        return init_device_mesh(
            mesh.device_type, (self.nodes, self.count // self.nodes), mesh_dim_names=("replicated", "sharded")
        )


class DDPBuckets:
    """The buffers in which DDP exchanges gradients.

    They are modelled after ``BucketCapacityConfig`` of ``torch/nn/parallel/distributed.py`` and
    ``torch/csrc/distributed/c10d/reducer.cpp``: the reducer itself reads addresses, which tensors without data do not
    have.

    Args:
        parameters: with gradients.
        options: of ``DistributedDataParallel``.
        tracer: of the storages.
        is_synchronized: whether the current backward exchanges gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        options: Mapping[str, Any],
        tracer: StorageTracer,
        is_synchronized: Callable[[], bool],
    ) -> None:
        self._tracer = tracer
        self._is_synchronized = is_synchronized
        self._has_views = bool(options.get("gradient_as_bucket_view"))
        cap = options.get("bucket_cap_mb")
        self._limits = (_FIRST_BUCKET, _BUCKET) if cap is None else (int(cap * MIB),) * 2
        self._is_final = bool(options.get("find_unused_parameters")) and not options.get("static_graph")
        # By identity, in the order in which backward makes their gradients.
        self._ready: dict[int, nn.Parameter] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._make(parameters, self._limits if self._is_final else (sys.maxsize,) * 2)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def begin_step(self, step: int) -> None:
        """Replace the buckets, of which the first is as large as all gradients, before the second step's forward."""
        if step and not self._is_final:
            self._is_final = True
            self._make(list(self._ready.values()), self._limits)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if isinstance(parameter, nn.Parameter) and self._is_synchronized():
            self._ready[id(parameter)] = parameter
            if self._has_views:
                parameter.grad = self._views[id(parameter)]

    def _make(self, parameters: Sequence[nn.Parameter], limits: tuple[int, int]) -> None:
        # Views are copied into new buckets; others are freed before.
        views = dict(self._views) if self._has_views else {}
        self._views.clear()
        for bucket in _buckets(parameters, limits):
            sizes = [parameter.numel() for parameter in bucket]
            with self._tracer.making(_COMMUNICATION):
                buffer = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for parameter, view in zip(bucket, torch.split(buffer, sizes), strict=True):
                self._views[id(parameter)] = view.view(parameter.shape)
                if parameter.grad is not None and parameter.grad is views.get(id(parameter)):
                    parameter.grad = self._views[id(parameter)]


def _buckets(parameters: Iterable[nn.Parameter], limits: tuple[int, int]) -> list[list[nn.Parameter]]:
    """Return parameters of one dtype each, until they have as many bytes as the first or, later, the second limit."""
    found: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, list[nn.Parameter]] = {}
    full: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        dtype = parameter.dtype
        if dtype not in last:
            last[dtype] = []
            found.append(last[dtype])
        last[dtype].append(parameter)
        if sum(owner.nbytes for owner in last[dtype]) >= limits[min(full[dtype], 1)]:
            full[dtype] += 1
            del last[dtype]
    return found


def ranks_of(given: Mapping[str, Any]) -> Ranks:
    """Return the ranks that a Trainer's arguments ask for.

    Args:
        given: the arguments by name; ``strategy`` may also be ``fsdp2``.

    Raises:
        ConfigError: the strategy is unknown, or cannot be simulated.
    """
    if given.get("accelerator") == "tpu":
        raise ConfigError("estimate: the accelerator tpu is not simulated; GPUs and the CPU are")
    nodes = int(given.get("num_nodes") or 1)
    count = _devices(given.get("devices")) * nodes
    strategy = _strategy(given.get("strategy") or "auto", count)
    if strategy is None or isinstance(strategy, SingleDeviceStrategy):
        return Ranks()
    if isinstance(strategy, DDPStrategy) and not isinstance(strategy, _OTHERS):
        return Ranks(kind="ddp", data_parallel=count, strategy=strategy, nodes=nodes)
    if isinstance(strategy, FSDPStrategy):
        if strategy.sharding_strategy.name == "NO_SHARD":
            return Ranks(kind="ddp", data_parallel=count, strategy=DDPStrategy(), nodes=nodes)
        number = str(given.get("precision") or "32-true").partition("-")[0]
        return Ranks(
            kind="fsdp",
            data_parallel=count,
            strategy=strategy,
            nodes=nodes,
            dtype=_HALVES.get(number),
            is_offloaded=strategy.cpu_offload.offload_params,
        )
    if isinstance(strategy, ModelParallelStrategy):
        data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size  # noqa: SLF001 no public ones
        tensor = tensor if tensor != "auto" else count // (nodes if data == "auto" else data)
        if count % tensor:
            raise ConfigError(f"--devices {count}: must be a multiple of tensor_parallel_size {tensor}")
        return Ranks(
            kind="fsdp2", data_parallel=count // tensor, tensor_parallel=tensor, strategy=strategy, nodes=nodes
        )
    raise _unknown(type(strategy).__name__)


def offloaded(model: nn.Module) -> set[int]:
    """Return the numbers, by ``id``, of a model's sharded parameters that are in host memory."""
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))  # noqa: SLF001
    # torch before 2.13 has one group for a module.
    found = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states)  # noqa: SLF001
    shards = (shard for groups in found for group in groups if group is not None for shard in group.fsdp_params)
    return {id(shard.sharded_param) for shard in shards if shard.offload_to_cpu}


def _offloading(link: Link) -> Callable[..., None]:
    signature = inspect.signature(link.call)

    def init(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named)
        given.arguments["offload_policy"] = CPUOffloadPolicy()
        link.call(*given.args, **given.kwargs)

    return init


def _unknown(name: str) -> ConfigError:
    alike = "; ZeRO stage 3 shards like fsdp2, with offload like fsdp2+offload" if "deepspeed" in name.lower() else ""
    return ConfigError(f"estimate: the strategy {name} is not simulated; {_KNOWN} are{alike}")


def _devices(devices: Any) -> int:
    """Return the number of devices of a machine; ``auto`` takes as many as this one has."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = "auto" if devices is None else str(devices)
    if text in {"auto", "-1"}:
        return max(torch.cuda.device_count(), 1)
    names = [name for name in text.split(",") if name]
    if len(names) == 1 and not (names[0].isdecimal() and int(names[0]) > 0):
        raise ConfigError(f"--devices {text}: must be a number of at least 1")
    return int(names[0]) if len(names) == 1 else len(names)


def _strategy(strategy: Any, count: int) -> Any:
    """Return Lightning's strategy of a name; None for one device."""
    if not isinstance(strategy, str):
        return strategy
    if strategy == "auto":
        return DDPStrategy() if count > 1 else None
    if strategy == "fsdp2":
        return ModelParallelStrategy(count, 1)
    if strategy not in StrategyRegistry:
        raise ConfigError(f"--strategy {strategy}: unknown strategy; {_KNOWN} are simulated")
    # Some cannot be made where their library is missing.
    if issubclass(dict.__getitem__(StrategyRegistry, strategy)["strategy"], _OTHERS):
        raise _unknown(strategy)
    return StrategyRegistry.get(strategy)


def _chosen(module: nn.Module, policy: Any) -> tuple[list[nn.Module], int]:
    """Return the modules below that a policy of FSDP1 wraps, children first, and their parameters' elements."""
    units: list[nn.Module] = []
    taken = 0
    for child in module.children():
        whole = sum(parameter.numel() for parameter in child.parameters())
        below, inside = (
            _chosen(child, policy) if policy(module=child, recurse=True, nonwrapped_numel=whole) else ([], 0)
        )
        units += below
        if policy(module=child, recurse=False, nonwrapped_numel=whole - inside):
            units.append(child)
            inside = whole
        taken += inside
    return units, taken
