"""Bytes by category at every operator of one training step: torch's MemTracker, adapted to Lightning's loop.

Differences from torch's tracker:

- Lightning runs forward and backward inside ``optimizer.step(closure)``, which torch counts as optimizer state.
- torch raises into the user's forward or backward: for a frozen parameter, or a leaf passed to
  ``torch.autograd.grad``. Here nothing is raised; the first failure ends the tracking.
- torch records the moments of every module, which takes ten times as long; here only the step's peak and end.
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
from lightning_memprof.capture.sources.saved_graph import saved_by_functions
from lightning_memprof.capture.sources.tensors import dense_parts, tensors_in
from lightning_memprof.capture.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    MemTracker,
    Reducer,
    TorchDispatchMode,
    _current_graph_task_id,
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
from lightning_memprof.capture.tracker.report import Figures, TrackerReport

_TOTAL: Final = "Total"


class _Kind(_RefType):
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
    """Tracks any model on any device; one object tracks one step.

    Attributes:
        guard: holds the failure that ended the tracking early.
    """

    kinds = Kinds(_Kind.PARAM, _Kind.BUFFER, _Kind.GRAD, _Kind.ACT, _Kind.TEMP, _Kind.OPT, _Kind.INP)
    peaks: tuple[_State, _State] = (_ModState.PEAK_FW, _ModState.PEAK_BW)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.guard = Guard()
        self._ref_class = type(self.kinds.parameter)
        self._makes_state = False
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
            for parameter in model.parameters():
                self._update_and_maybe_create_winfos(parameter, self.kinds.parameter)
            for buffer in model.buffers():
                self._update_and_maybe_create_winfos(buffer, self.kinds.buffer)
            self.add_gradients(model)
            for optimizer in optimizers:
                self._track_optimizer_states(self.kinds.optimizer_state, optimizer)
            for tensor in tensors_in(batch):
                self._update_and_maybe_create_winfos(tensor, self.kinds.input)
            del batch  # tracking must not extend its lifetime
            self._watch_optimizers(undo)
            self._watch_gradients(model, undo)
            self._watch_resize(undo)
            self._watch_buckets(undo)
            self._fake_mode_on_entry = active_fake_mode()
            self._peak_mem_snap = self.get_tracker_snapshot()
            self._peak_mem = {device: figures[_TOTAL] for device, figures in self._peak_mem_snap.items()}
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

    def report(self) -> TrackerReport:
        """Return the step's peak and the current state."""
        return TrackerReport(
            self._figures(self.get_tracker_snapshot("peak")), self._figures(self.get_tracker_snapshot())
        )

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

    def _track(self, reftype: _RefType, t: torch.Tensor) -> None:
        if isinstance(t, FakeTensor) and t.fake_mode is not self._fake_mode_on_entry:
            # A compiler's, which also makes views of its tensors outside of its fake mode.
            return
        for part in dense_parts(t):
            super()._track(reftype, part)

    def _watch_optimizers(self, undo: ExitStack) -> None:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._makes_state = next(iter(optimizer.state), None) is None
            # With a closure, forward and backward come first, see before_optimizer_step.
            self._in_opt = (args[1] if len(args) > 1 else kwargs.get("closure")) is None

        def after(optimizer: torch.optim.Optimizer) -> None:
            self._track_optimizer_states(self.kinds.optimizer_state, optimizer)
            self._in_opt = False

        undo.callback(register_optimizer_step_pre_hook(lambda *values: self.guard.run(before, *values)).remove)
        undo.callback(register_optimizer_step_post_hook(lambda it, *_: self.guard.run(after, it)).remove)

    def _watch_gradients(self, model: nn.Module, undo: ExitStack) -> None:
        """Let gradients count as such from the moment when they are accumulated."""
        for gathered in _gathered(model):
            self._update_and_maybe_create_winfos(gathered, self.kinds.parameter)
        for parameter in model.parameters():
            if not isinstance(parameter, UninitializedParameter) and parameter.requires_grad and parameter.is_leaf:
                self._hook_gradient(parameter, undo)

    def _hook_gradient(self, parameter: torch.Tensor, undo: ExitStack) -> None:
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._update_and_maybe_create_winfos(parameter.grad, self.kinds.gradient)

        def remove() -> None:
            handle.remove()
            if not had and not parameter._post_accumulate_grad_hooks:  # noqa: SLF001 torch has no other way back
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment] # noqa: SLF001

        had = parameter._post_accumulate_grad_hooks is not None  # noqa: SLF001
        handle = parameter.register_post_accumulate_grad_hook(lambda it: self.guard.run(accumulated, it))  # type: ignore[no-untyped-call]
        undo.callback(remove)

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
        kinds, is_backward = self.kinds, _current_graph_task_id() != -1
        if self._kind is not None:
            kind = self._kind
        elif torch.is_grad_enabled():
            # Also where a checkpoint computes again in backward, or an optimizer calls its closure.
            kind = kinds.activation
        elif is_backward:
            kind = kinds.temporary
        elif self._in_opt:
            # An optimizer's first step mostly allocates its state, which is added after the step.
            kind = kinds.optimizer_state if self._makes_state else kinds.temporary
        else:
            kind = kinds.activation
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._track(kind, leaf)
        self._update_peak_stats(self.peaks[is_backward])

    def _figures(self, snapshot: dict[torch.device, dict[str, int]]) -> tuple[Figures, ...]:
        found = []
        for device, figures in snapshot.items():
            kinds = {key.value: count for key, count in figures.items() if isinstance(key, _RefType)}
            if padding := self._padding.get(device, 0):
                kinds[self.kinds.parameter.value] -= padding
                kinds["Padding"] = padding
            found.append(Figures(str(device), kinds, figures[_TOTAL]))
        return tuple(found)


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
