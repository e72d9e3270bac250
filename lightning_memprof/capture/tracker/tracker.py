"""Bytes by category at every operator of one training step: torch's MemTracker, adapted to Lightning's loop.

Differences from torch's tracker:

- Lightning runs forward and backward inside ``optimizer.step(closure)``, which torch counts as optimizer state.
- torch raises into the user's forward or backward: for a module that is called twice by no other module, a frozen
  parameter, a leaf passed to ``torch.autograd.grad``. Here nothing is raised; the first failure ends the tracking.
- A module may be called any number of times. A call inside another call of the same module is part of it: under DDP
  and FSDP1 the LightningModule is called for the step, and by its own ``self(batch)`` in it.
- torch updates all modules after every operator; here only those that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memprof.capture.observe import Guard, Link, take_out, wrapped
from lightning_memprof.capture.sources.compiled import is_compiled
from lightning_memprof.capture.sources.saved_graph import saved_by_functions
from lightning_memprof.capture.sources.tensors import dense_parts, tensors_in
from lightning_memprof.capture.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    MemTracker,
    Reducer,
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _get_sequence_nr,
    _ModState,
    _pop_mode,
    _push_mode,
    _RefType,
    _State,
    _UpdateType,
    active_fake_mode,
    tree_leaves,
)
from lightning_memprof.capture.tracker.paths import PathTracker
from lightning_memprof.capture.tracker.report import Figures, ModuleFigures, TrackerReport

_TOTAL: Final = "Total"
# A parent of every module: torch takes a second call by "Global" alone for the next iteration.
_STEP: Final = "Step"


class Kind(_RefType):
    """Categories under the words that torch prints."""

    PARAM = "Parameter"
    BUFFER = "Buffer"
    GRAD = "Gradient"
    ACT = "Activation"
    TEMP = "Temp"
    OPT = "Optstate"
    INP = "Inputs"
    OTH = "Other"


class Kinds(NamedTuple):
    """A tracker's categories, in its own enumeration."""

    parameter: _RefType
    buffer: _RefType
    gradient: _RefType
    activation: _RefType
    temporary: _RefType
    optimizer_state: _RefType
    input: _RefType


class CategoryTracker(MemTracker):  # type: ignore[no-untyped-call]
    """The common part of both trackers; one object tracks one step.

    Attributes:
        guard: holds the failure that ended the tracking early.
    """

    kinds: Kinds
    peaks: tuple[_State, _State]
    memory_tracking: Any

    def __init__(self, root: nn.Module, *args: Any) -> None:
        super().__init__(*args)
        self.guard = Guard()
        self._root = root
        self._mod_tracker: Any = PathTracker(root, self.guard)
        self._stats_by_name: dict[str, Any] = {}
        self._last_totals: dict[torch.device, int] = {}
        self._makes_state = False
        self._is_compiled = is_compiled(root)
        # Autograd's number of the first node of the step.
        self._first_node = _get_sequence_nr()
        # The category of every operator's result, while torch makes buffers of its own.
        self._kind: _RefType | None = None
        self._padding: dict[torch.device, int] = {}

    @contextmanager
    def tracking(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> Iterator[None]:
        """Track the operators inside the context, in addition to the existing tensors.

        Args:
            model: its parameters, buffers and gradients exist already.
            optimizers: their states exist already.
            batch: nested containers of tensors that count as input.
        """
        with ExitStack() as undo:
            undo.callback(self._WINFO.clear)
            self._padding = _padding(model)
            self._add_model(model)
            for optimizer in optimizers:
                self._track_optimizer_states(self.kinds.optimizer_state, optimizer)
            for tensor in tensors_in(batch):
                self._update_and_maybe_create_winfos(tensor, self.kinds.input)
            del batch  # tracking must not extend its lifetime
            self._hook(model, undo)
            self._fake_mode_on_entry = active_fake_mode()
            self._peak_mem_snap = self.get_tracker_snapshot()
            self._peak_mem = {device: figures[_TOTAL] for device, figures in self._peak_mem_snap.items()}
            self._mod_tracker.__enter__()
            undo.callback(self._mod_tracker.__exit__)
            _push_mode(self)
            undo.callback(take_out, _pop, _push_mode, lambda mode: mode is self)
            yield

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled: under other modes torch runs them uncompiled."""
        return True

    def add_saved(self, outputs: Any) -> None:
        """Add results of a forward, and the tensors that its compiled parts saved: compiled code runs no operators."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for tensor in (*tensors, *saved_by_functions(tensors, self._first_node)):
            self._track(self.kinds.activation, tensor)
        self._update_peak_stats(self.peaks[False])

    def before_optimizer_step(self) -> None:
        """Note that the closure's forward and backward are done: the optimizer follows."""
        self._in_opt = True

    def add_gradients(self, model: nn.Module) -> None:
        """Add the existing gradients."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._update_and_maybe_create_winfos(parameter.grad, self.kinds.gradient)

    def report(self, root_path: str = "") -> TrackerReport:
        """Return peak, current state and each module's figures; ``root_path`` is the root's path in the model."""
        name = type(self._root).__name__
        modules = []
        for module, stats in self.memory_tracking.items():
            below = str(self._mod_tracker.get_known_fqn(module)).removeprefix(name).removeprefix(".")
            path = ".".join(part for part in (root_path, below) if part)
            for state, snapshots in stats.snapshots.items():
                modules += [
                    ModuleFigures(
                        name=stats.mod_fqn, path=path, state=state.value, call=call, figures=self._figures(snapshot)
                    )
                    for call, snapshot in enumerate(snapshots, start=1)
                ]
        return TrackerReport(
            self._figures(self.get_tracker_snapshot("peak")), self._figures(self.get_tracker_snapshot()), tuple(modules)
        )

    def get_tracker_snapshot(self, type: str = "current") -> dict[torch.device, dict[str, int]]:  # noqa: A002 torch's
        """Return a copy of the current figures, or those at the peak."""
        source = self._curr_mem_snap if type == "current" else self._peak_mem_snap
        return {device: dict(figures) for device, figures in source.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The DTensor splits itself; the operators on its parts come here.
        if DTensor in types:
            return NotImplemented
        # Called from Python, an operator would dispatch to the program's Tensor subclasses a second time.
        with DisableTorchFunction():
            result = func(*args, **kwargs or {})
        # A DTensor computes shapes under its own fake mode, where nothing is allocated.
        if self.guard.failure is None and active_fake_mode() is self._fake_mode_on_entry:
            self.guard.run(self._see, func, args, result)
        return result

    def _update_and_maybe_create_winfos(
        self,
        t: torch.Tensor,
        reftype: _RefType,
        update_existing: bool = False,  # noqa: FBT001, FBT002 torch's signature
    ) -> set[Any]:
        # torch's own supports neither sparse tensors nor those without storage.
        add = super()._update_and_maybe_create_winfos
        with DisableTorchFunction():
            return {info for part in dense_parts(t) for info in add(part, reftype, update_existing)}

    def _track_optimizer_states(self, reftype: _RefType, optimizer: torch.optim.Optimizer) -> None:
        # torch's own raises for an entry that is not a dictionary.
        for tensor in tensors_in(dict(optimizer.state)):
            self._update_and_maybe_create_winfos(tensor, reftype)

    def _track_inputs_or_outputs(self, args: Any) -> int:
        # torch's own raises for a sparse tensor.
        found: int = super()._track_inputs_or_outputs([part for each in tensors_in(args) for part in dense_parts(each)])
        return found

    def _track(self, reftype: _RefType, t: torch.Tensor) -> None:
        if isinstance(t, FakeTensor) and t.fake_mode is not self._fake_mode_on_entry:
            # A compiler's, which also makes views of its tensors outside of its fake mode.
            return
        for part in dense_parts(t):
            super()._track(reftype, part)

    def _add_model(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            self._update_and_maybe_create_winfos(parameter, self.kinds.parameter)
        for buffer in model.buffers():
            self._update_and_maybe_create_winfos(buffer, self.kinds.buffer)
        self.add_gradients(model)

    def _hook(self, model: nn.Module, undo: ExitStack) -> None:  # noqa: ARG002 for overriding
        """Add the hooks that separate the categories; their removal goes onto ``undo``."""

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._makes_state = next(iter(optimizer.state), None) is None
            # With a closure, forward and backward come first, see before_optimizer_step.
            self._in_opt = (args[1] if len(args) > 1 else kwargs.get("closure")) is None

        def after(optimizer: torch.optim.Optimizer) -> None:
            self._track_optimizer_states(self.kinds.optimizer_state, optimizer)
            self._in_opt = False

        undo.callback(register_optimizer_step_pre_hook(lambda *values: self.guard.run(before, *values)).remove)
        undo.callback(register_optimizer_step_post_hook(lambda it, *_: self.guard.run(after, it)).remove)
        self._watch_resize(undo)
        self._watch_buckets(undo)

    def _watch_buckets(self, undo: ExitStack) -> None:
        # In its second forward DDP allocates gradient buckets in the order of the first backward.
        def wrap(link: Link) -> Callable[..., Any]:
            def rebuild(reducer: Any) -> Any:
                earlier, self._kind = self._kind, self.kinds.gradient
                try:
                    return link.call(reducer)
                finally:
                    self._kind = earlier

            return rebuild

        undo.enter_context(wrapped(Reducer, "_rebuild_buckets", wrap))

    def _watch_resize(self, undo: ExitStack) -> None:
        # No dispatch mode sees a storage change its size.
        def resized(storage: torch.UntypedStorage) -> None:
            known, _ = self._WINFO.get(storage, (None, None))  # type: ignore[no-untyped-call]
            if known is not None and known.size != storage.size():
                before = known.mem_consumed
                known.update_mem_consumed(storage)
                self._update_snap(_UpdateType.SIZE, known, old_mem_consumed=before)

        def wrap(link: Link) -> Callable[..., Any]:
            def resize(storage: torch.UntypedStorage, size: int) -> Any:
                result = link.call(storage, size)
                self.guard.run(resized, storage)
                return result

            return resize

        undo.enter_context(wrapped(torch.UntypedStorage, "resize_", wrap))

    def _see(self, func: Any, args: Any, result: Any) -> None:  # noqa: ARG002 for overriding
        kinds = self.kinds
        backward = self._mod_tracker.is_bw
        if self._kind is not None:
            kind = self._kind
        elif backward and not self._in_ac:
            kind = kinds.temporary
        elif self._in_opt:
            # An optimizer's first step mostly allocates its state, which is added after the step.
            kind = kinds.optimizer_state if self._makes_state else kinds.temporary
        else:
            kind = kinds.activation
        if type(result) is torch.Tensor:
            self._track(kind, result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._track(kind, leaf)
        self._update_peak_stats(self.peaks[backward])

    def _update_peak_stats(self, peak_state: _State) -> None:
        for device, figures in self._curr_mem_snap.items():
            total = figures[_TOTAL]
            if total > self._last_totals.get(device, -1):
                self._raise_module_peaks(peak_state, device, figures)
                if self._peak_mem.get(device, 0) < total:
                    self._peak_mem[device] = total
                    self._peak_mem_snap[device] = dict(figures)
            self._last_totals[device] = total

    def _raise_module_peaks(self, peak_state: _State, device: torch.device, figures: dict[str, int]) -> None:
        if len(self._stats_by_name) != len(self.memory_tracking):
            self._stats_by_name = {stats.mod_fqn: stats for stats in self.memory_tracking.values()}
        for name in self._mod_tracker.parents:
            stats = self._stats_by_name.get(name)
            if stats is None or peak_state not in stats.snapshots:
                continue
            if stats.local_peak.get(device, 0) < figures[_TOTAL]:
                stats.local_peak[device] = figures[_TOTAL]
                stats.snapshots[peak_state][-1][device] = dict(figures)

    def _module_begins(self) -> None:
        # No optimizer runs a module's forward: the closure was called again.
        self._in_opt = False
        self._last_totals.clear()

    def _figures(self, snapshot: dict[torch.device, dict[str, int]]) -> tuple[Figures, ...]:
        found = []
        for device, figures in snapshot.items():
            kinds = {key.value: count for key, count in figures.items() if isinstance(key, _RefType)}
            if padding := self._padding.get(device, 0):
                kinds[self.kinds.parameter.value] -= padding
                kinds["Padding"] = padding
            found.append(Figures(str(device), kinds, figures[_TOTAL]))
        return tuple(found)


class ModuleTracker(CategoryTracker):  # type: ignore[no-untyped-call]
    """Tracks any model on any device."""

    kinds = Kinds(Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.ACT, Kind.TEMP, Kind.OPT, Kind.INP)
    peaks = (_ModState.PEAK_FW, _ModState.PEAK_BW)

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self._ref_class = Kind

    def _hook(self, model: nn.Module, undo: ExitStack) -> None:
        super()._hook(model, undo)
        for gathered in _gathered(model):
            self._update_and_maybe_create_winfos(gathered, Kind.PARAM)
        for parameter in model.parameters():
            if not isinstance(parameter, UninitializedParameter) and parameter.requires_grad and parameter.is_leaf:
                self._hook_gradient(parameter, undo)
        modules = self._mod_tracker
        modules.register_user_hooks(self._pre_fw_hook, self._post_fw_hook, self._pre_bw_hook, self._post_bw_hook)
        undo.callback(modules.clear_user_hooks)

    def _hook_gradient(self, parameter: torch.Tensor, undo: ExitStack) -> None:
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._update_and_maybe_create_winfos(parameter.grad, Kind.GRAD)

        def remove() -> None:
            handle.remove()
            if not had and not parameter._post_accumulate_grad_hooks:  # noqa: SLF001 torch has no other way back
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment] # noqa: SLF001

        had = parameter._post_accumulate_grad_hooks is not None  # noqa: SLF001
        handle = parameter.register_post_accumulate_grad_hook(lambda it: self.guard.run(accumulated, it))  # type: ignore[no-untyped-call]
        undo.callback(remove)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        self._module_begins()
        parents = self._mod_tracker.parents
        parents.add(_STEP)
        try:
            super()._pre_fw_hook(module, inputs)
        finally:
            parents.discard(_STEP)
        stats = self.memory_tracking[module]
        self._stats_by_name[stats.mod_fqn] = stats

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._is_compiled and not self._mod_tracker.is_bw:
            self.add_saved(outputs)
        super()._post_fw_hook(module, inputs, outputs)

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        self._last_totals.clear()
        super()._pre_bw_hook(module, args)

    def _track_module_params_and_buffers(
        self,
        module: nn.Module,  # noqa: ARG002 torch's signature
        install_grad_hooks: bool = True,  # noqa: ARG002, FBT001, FBT002 torch's signature
    ) -> tuple[int, int]:
        # Those of the whole model are added at the start of the step.
        return 0, 0


def _pop() -> TorchDispatchMode | None:
    return _pop_mode() if _get_current_dispatch_mode_stack() else None


def _gathered(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors into which FSDP1 gathers parameters; outside the forward of their module they are empty."""
    for module in model.modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None  # noqa: SLF001 no other way
        for name in ("_full_param_padded", "_full_prec_full_param_padded"):
            tensor = getattr(handle.flat_param, name, None) if handle is not None else None
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _padding(model: nn.Module) -> dict[torch.device, int]:
    """Return the padding bytes that make shards as large as those of the other ranks."""
    held: dict[int, tuple[torch.device, int]] = {}
    used: dict[torch.device, int] = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor  # noqa: SLF001 to_local() would be an operator
            storage = local.untyped_storage()
            held[storage._cdata] = (local.device, storage.nbytes())  # noqa: SLF001 empty storages have no address
            used[local.device] = used.get(local.device, 0) + local.numel() * local.element_size()
    padding = {device: -count for device, count in used.items()}
    for device, count in held.values():
        padding[device] += count
    return padding
