"""Every private API of torch that this package uses: where it is, what for, and what happens without it.

Other modules import from here, by torch's names. A name is looked up when it is imported: importing this module loads
neither torch's memory trackers nor its data loaders. All were seen in torch 2.10 to 2.15.
"""

from __future__ import annotations

import inspect
import pkgutil
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import _get_tracing_state as _get_tracing_state
    from torch._C._autograd import _profiler_enabled as _profiler_enabled
    from torch._C._autograd import _profiler_type as _profiler_type
    from torch._C._profiler import _RecordFunctionFast as _RecordFunctionFast
    from torch._guards import active_fake_mode as active_fake_mode
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.cuda.memory import _record_memory_history as _record_memory_history
    from torch.cuda.memory import _snapshot as _snapshot
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker as FSDPMemTracker
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPModState as _FSDPModState
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPRefType as _FSDPRefType
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPState as _FSDPState
    from torch.distributed._tools.mem_tracker import MemTracker as MemTracker
    from torch.distributed._tools.mem_tracker import _ModState as _ModState
    from torch.distributed._tools.mem_tracker import _RefType as _RefType
    from torch.distributed._tools.mem_tracker import _State as _State
    from torch.distributed._tools.mem_tracker import _UpdateType as _UpdateType
    from torch.distributed._tools.mod_tracker import ModTracker as ModTracker
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as ShardingPropagator
    from torch.optim.optimizer import _foreach_supported_types as _foreach_supported_types
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _get_current_dispatch_mode_stack
    from torch.utils._python_dispatch import _pop_mode as _pop_mode
    from torch.utils._python_dispatch import _push_mode as _push_mode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map

    # torch's stubs do not have these, or only a part of them.
    DispatchKey: Any
    DispatchKeySet: Any
    SavedTensor: Any
    _ExcludeDispatchKeyGuard: Any
    _get_privateuse1_backend_name: Callable[[], str]
    _BaseDataLoaderIter: type
    _IterableDatasetFetcher: type
    _MapDatasetFetcher: type
    _MultiProcessingDataLoaderIter: type
    _cuda_attach_out_of_memory_observer: Callable[[Callable[[int, int, int, int], None]], None]
    Reducer: type
    _FrameAction: Any
    _FrameExecStrategy: Any
    _cuda_isHistoryEnabled: Callable[[], bool]  # noqa: N816 torch's name
    _ProfilerDisableOptions: Callable[[bool, bool], Any]
    _disable_profiler_legacy: Callable[[Any], object]
    _current_autograd_node: Callable[[], Any]
    _current_graph_task_id: Callable[[], int]
    _get_sequence_nr: Callable[[], int]
    _pop_saved_tensors_default_hooks: Callable[[], None]
    _utils: Any
    _storage_Use_Count: Callable[[int], int]  # noqa: N816 torch's name
    _push_saved_tensors_default_hooks: Callable[[Any, Any], None]
    _top_saved_tensors_default_hooks: Callable[[bool], tuple[Any, Any] | None]
    callback_handler: Any
    set_code_exec_strategy: Callable[[Any, Any], None]
    set_eval_frame: Callable[[Any], Any]


class Absent:
    """Stands for a function or a class that the installed torch does not have: it has no instances."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise RuntimeError(f"torch {torch.__version__} misses a private API: see lightning-memprof doctor")


@dataclass(frozen=True, kw_only=True)
class Internal:
    """Private names of one owner, for one purpose.

    Attributes:
        owner: a module, or ``module:class`` for attributes of a class and of its instances.
        names: as torch spells them, separated by spaces.
        used_for: the purpose.
        without: what happens in a version of torch without them.
        fallback: stands for a missing name of a module; None raises ImportError when the name is imported.
        cuda: only a build for CUDA or ROCm has them.
    """

    owner: str
    names: str
    used_for: str
    without: str
    fallback: Any = Absent
    cuda: bool = False

    def path(self, name: str) -> str:
        """Return where a name is, in the form of :func:`pkgutil.resolve_name`."""
        return f"{self.owner}{'.' if ':' in self.owner else ':'}{name}"

    def is_there(self, name: str) -> bool:
        """Return whether the installed torch has a name; an attribute of instances is one that a method uses."""
        try:
            pkgutil.resolve_name(self.path(name))
        except ImportError:
            return False
        except AttributeError:
            classes = getattr(pkgutil.resolve_name(self.owner), "__mro__", ())
            methods = (method for cls in classes for method in vars(cls).values() if inspect.isfunction(method))
            return any(name in method.__code__.co_names for method in methods)
        return True


def expected() -> Iterator[tuple[str, Internal]]:
    """Yield name and row of each private API that this build of torch should have."""
    for row in INTERNALS:
        if not row.cuda or torch.version.cuda or torch.version.hip:
            yield from ((name, row) for name in row.names.split())


def missing() -> dict[str, str]:
    """Return the private APIs that the installed torch does not have, each with what happens without it."""
    return {row.path(name).replace(":", "."): row.without for name, row in expected() if not row.is_there(name)}


def __getattr__(name: str) -> Any:
    for row in INTERNALS:
        if name in row.names.split() and ":" not in row.owner:
            try:
                return pkgutil.resolve_name(row.path(name))
            except (AttributeError, ImportError) as error:
                if row.fallback is None:
                    raise ImportError(f"{error}; {row.without}") from error
                return row.fallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NO_TRACKER: Final = "ModuleMemory and FSDPMemory are not available"
_NO_SAVED: Final = "SavedTensors is not available"
_NO_ESTIMATE: Final = "lightning-memprof estimate is not available"
_ONE_DEVICE: Final = "lightning-memprof estimate knows one device only"

INTERNALS: Final = (
    Internal(
        owner="torch._C",
        names="DisableTorchFunction",
        used_for="read tensors without calling the __torch_function__ of the program's subclasses and modes",
        without="__torch_function__ of the program's tensor subclasses and modes sees the profiler's reads",
        fallback=nullcontext,
    ),
    Internal(
        owner="torch._C",
        names="_current_graph_task_id",
        used_for="tell a checkpoint's recomputation in backward from a forward",
        without="saved activations and RSS by module include what reentrant checkpointing recomputes",
        fallback=lambda: -1,
    ),
    Internal(
        owner="torch._C._autograd",
        names="SavedTensor _get_sequence_nr",
        used_for="recognize saved tensors in autograd's graph, and the module whose forward saved them",
        without=_NO_SAVED,
    ),
    Internal(
        owner="torch._C._autograd:SavedTensor",
        names="data unpack_hook",
        used_for="read saved tensors without unpacking them",
        without=_NO_SAVED,
    ),
    Internal(
        owner="torch.autograd.function:BackwardCFunction",
        names="_raw_saved_tensors _sequence_nr",
        used_for="read what the nodes of autograd's graph save, those of C++ in _raw_saved_NAME, and their order",
        without="SavedTensors is disabled and reported",
    ),
    Internal(
        owner="torch._C._autograd",
        names="_pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks _top_saved_tensors_default_hooks",
        used_for="count saved bytes with hooks that come out from below the program's own",
        without="FunctionMemory(saved_tensors_hooks=True) is disabled and reported",
    ),
    Internal(
        owner="torch:Tensor",
        names="_base _indices _post_accumulate_grad_hooks _use_count _values _version",
        used_for="views, sparse tensors, references, checks of in-place operations, ranges of gradient hooks",
        without="collectors that read tensors are disabled and reported",
    ),
    Internal(
        owner="torch:UntypedStorage",
        names="_cdata _free_weak_ref _weak_ref",
        used_for="identify storages: empty ones have no address",
        without="collectors that read tensors are disabled and reported",
    ),
    Internal(
        owner="torch.distributed.tensor:DTensor",
        names="_local_tensor _spec",
        used_for="read this rank's part of a sharded tensor, and how it is sharded",
        without="collectors that read tensors are disabled and reported for sharded models",
    ),
    Internal(
        owner="torch._C._profiler",
        names="_RecordFunctionFast",
        used_for="ranges of modules, actions and hooks at 0.2 µs each",
        without="torch.profiler.record_function is used, which takes longer",
        fallback=torch.profiler.record_function,
    ),
    Internal(
        owner="torch._C._distributed_c10d",
        names="_dump_fr_trace_json _dump_nccl_trace_json",
        used_for="the last collectives of a rank in a step that does not end",
        without="the page does not compare the collectives of ranks that hang",
        fallback=bytes,
        cuda=True,
    ),
    Internal(
        owner="torch._C._autograd",
        names="_ProfilerDisableOptions _disable_profiler_legacy _profiler_enabled _profiler_type",
        used_for="leave Kineto to another profiler that is recording; stop recording in forked workers",
        without="of two profilers at once, the first one loses its data; workers that start in a window grow",
        fallback=lambda *_: False,
    ),
    Internal(
        owner="torch.autograd.profiler:profile",
        names="_prepare_trace _start_trace",
        used_for="give Kineto to a profiler that the program starts during a window",
        without="OperatorTrace is disabled and reported",
    ),
    Internal(
        owner="torch.autograd.profiler_util:EventList",
        names="_build_tree",
        used_for="ExtendedPyTorchProfiler.function_events",
        without="function_events raises AttributeError",
    ),
    Internal(
        owner="torch._C._dynamo.eval_frame",
        names="set_eval_frame",
        used_for="keep Dynamo from compiling the garbage collector's callback",
        without="Dynamo may compile the callback",
        fallback=lambda _callback: None,
    ),
    Internal(
        owner="torch._C._dynamo.eval_frame",
        names="_FrameAction _FrameExecStrategy set_code_exec_strategy",
        used_for="keep Dynamo from compiling wrappers of forwards",
        without="collectors by module are disabled and reported once torch has compiled something",
        fallback=None,
    ),
    Internal(
        owner="torch._dynamo.callback",
        names="callback_handler",
        used_for="remove wrappers of forwards while torch compiles; time compilations",
        without="collectors by module are disabled and reported once torch has compiled something",
        fallback=None,
    ),
    Internal(
        owner="torch._C._distributed_c10d",
        names="Reducer",
        used_for="recognize DDP's gradient buckets",
        without=_NO_TRACKER,
        fallback=None,
    ),
    Internal(
        owner="torch._C._distributed_c10d:Reducer",
        names="_rebuild_buckets",
        used_for="recognize DDP's gradient buckets",
        without="ModuleMemory and FSDPMemory are disabled and reported",
    ),
    Internal(
        owner="torch._dynamo.eval_frame",
        names="OptimizedModule",
        used_for="recognize compiled modules",
        without="compiled modules get hooks, and torch compiles them again",
    ),
    Internal(
        owner="torch.nn:Module",
        names="_backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks "
        "_forward_pre_hooks _parameters",
        used_for="watch forwards, name the program's hooks, read parameters that are made only when used",
        without="collectors by module are disabled and reported",
    ),
    Internal(
        owner="torch._C",
        names="_get_tracing_state",
        used_for="leave torch.jit.trace its own call of a module",
        without="a program that traces a module in a window gets scopes without names",
        fallback=lambda: None,
    ),
    Internal(
        owner="torch._ops:OpOverload",
        names="_schema",
        used_for="estimates: name the arguments of operators whose result has a shape that depends on values",
        without=_NO_ESTIMATE,
    ),
    Internal(
        owner="torch.nn.modules.module",
        names="_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks",
        used_for="name the program's global hooks in the trace",
        without="the trace does not name global hooks",
    ),
    Internal(
        owner="torch._guards",
        names="active_fake_mode",
        used_for="leave out operators on fake tensors, which allocate nothing",
        without="operators of shape inference are counted",
        fallback=lambda: None,
    ),
    Internal(
        owner="torch.utils._python_dispatch",
        names="is_traceable_wrapper_subclass",
        used_for="read the parts of tensor subclasses such as DTensor",
        without="tensor subclasses without storage have no bytes",
        fallback=lambda _tensor: False,
    ),
    Internal(
        owner="torch.utils._python_dispatch",
        names="TorchDispatchMode _get_current_dispatch_mode_stack _pop_mode _push_mode",
        used_for="see every operator, and leave the program's own dispatch modes in place",
        without="Throughput(flops=True), ModuleMemory and FSDPMemory are disabled and reported",
    ),
    Internal(
        owner="torch.utils._pytree",
        names="tree_leaves tree_map",
        used_for="find and replace the tensors in an operator's arguments and results",
        without=f"{_NO_TRACKER}; {_NO_ESTIMATE}",
        fallback=None,
    ),
    Internal(
        owner="torch.distributed._tools.mem_tracker",
        names="MemTracker _ModState _RefType _State _UpdateType",
        used_for="bytes by category at every operator",
        without=_NO_TRACKER,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed._tools.mem_tracker:MemTracker",
        names="_WINFO _curr_mem_snap _in_ac _in_opt _mod_tracker _peak_mem _peak_mem_snap _post_bw_hook _post_fw_hook "
        "_pre_bw_hook _pre_fw_hook _ref_class _track _track_inputs_or_outputs _track_module_params_and_buffers "
        "_track_optimizer_states _update_and_maybe_create_winfos _update_peak_stats _update_snap",
        used_for="adapt the tracker to Lightning's loop",
        without="ModuleMemory and FSDPMemory are disabled and reported",
    ),
    Internal(
        owner="torch.distributed._tools.mod_tracker",
        names="ModTracker",
        used_for="the modules in forward or backward",
        without=_NO_TRACKER,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed._tools.mod_tracker:ModTracker",
        names="_active_module_cnt _fw_post_hook _fw_pre_hook _known_modules _maybe_set_engine_callback "
        "_post_bw_callbacks_to_enqueue _user_post_bw_hook _user_post_fw_hook _user_pre_bw_hook _user_pre_fw_hook",
        used_for="track modules that are called several times",
        without="ModuleMemory and FSDPMemory are disabled and reported",
    ),
    Internal(
        owner="torch.distributed._tools.fsdp2_mem_tracker",
        names="FSDPMemTracker _FSDPModState _FSDPRefType _FSDPState",
        used_for="bytes by category under fully_shard",
        without=_NO_TRACKER,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker",
        names="_fsdp_param_group_post_backward _fsdp_param_group_pre_backward _fsdp_state _fsdp_state_post_forward "
        "_fsdp_state_pre_forward",
        used_for="put the tracker between fully_shard's hooks",
        without="FSDPMemory is disabled and reported",
    ),
    Internal(
        owner="torch.distributed.fsdp:FSDPModule",
        names="_get_fsdp_state",
        used_for="put the tracker between fully_shard's hooks",
        without="FSDPMemory is disabled and reported",
    ),
    Internal(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names="_fsdp_param_group _post_forward_hook_handle _pre_forward_hook_handle",
        used_for="put the tracker between fully_shard's hooks",
        without="FSDPMemory is disabled and reported",
    ),
    Internal(
        owner="torch:ops.c10d",
        names="_allgather_base_ _reduce_scatter_base_",
        used_for="recognize the buffers of fully_shard's collectives",
        without="FSDPMemory is disabled and reported",
    ),
    Internal(
        owner="torch.distributed.fsdp._fully_shard._fsdp_param_group",
        names="FSDPParamGroup",
        used_for="recognize the buffers of communication in estimates",
        without=_ONE_DEVICE,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed.tensor._sharding_prop",
        names="ShardingPropagator",
        used_for="leave out tensors on which a DTensor computes shapes",
        without=_ONE_DEVICE,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed.tensor._sharding_prop:ShardingPropagator",
        names="_propagate_tensor_meta_non_cached",
        used_for="leave out tensors on which a DTensor computes shapes",
        without=_ONE_DEVICE,
    ),
    Internal(
        owner="torch.testing._internal.distributed.fake_pg",
        names="FakeStore",
        used_for="estimate one of several ranks in one process",
        without=_ONE_DEVICE,
        fallback=None,
    ),
    Internal(
        owner="torch.distributed.fsdp:FullyShardedDataParallel",
        names="_fsdp_wrapped_module _handle",
        used_for="name modules under FSDP1, and count the tensors into which it gathers parameters",
        without="ModuleMemory is disabled and reported under FSDP1",
    ),
    Internal(
        owner="torch.utils.data.dataloader",
        names="_BaseDataLoaderIter _MultiProcessingDataLoaderIter _utils",
        used_for="time samplers, the wait for workers, and their work",
        without="HookTimings has no rows of samplers and workers, HostMemory no times of workers",
    ),
    Internal(
        owner="torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
        names="_dataset _get_data _next_data _next_index",
        used_for="time samplers, and the wait for workers; count the batches that are ready",
        without="HookTimings has no rows of samplers and workers, HostMemory no queue of batches",
    ),
    Internal(
        owner="torch.utils.data._utils.fetch",
        names="_IterableDatasetFetcher _MapDatasetFetcher",
        used_for="time data sets and their collation",
        without="HookTimings has no rows of data sets and collation",
    ),
    Internal(
        owner="torch.cuda.memory",
        names="_record_memory_history _snapshot",
        used_for="the allocator's history and snapshots; torch documents these names",
        without="AllocatorHistory is disabled and reported; OOM events have no snapshot",
    ),
    Internal(
        owner="torch._C",
        names="_cuda_isHistoryEnabled",
        used_for="leave a history that the program records as it is",
        without="a history that the program records ends with the first window",
        fallback=lambda: False,
        cuda=True,
    ),
    Internal(
        owner="torch._C",
        names="_cuda_attach_out_of_memory_observer",
        used_for="read the allocator before torch raises",
        without="OOMAutopsy is disabled and reported on CUDA",
        cuda=True,
    ),
    Internal(
        owner="torch._subclasses.fake_tensor",
        names="DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode",
        used_for="estimates: run a step without memory; leave out operators on fake tensors, which allocate nothing",
        without=f"operators of shape inference are counted; {_NO_ESTIMATE}",
    ),
    Internal(
        owner="torch.optim.optimizer",
        names="_foreach_supported_types",
        used_for="estimates: optimizers take their implementation for devices",
        without=_NO_ESTIMATE,
        fallback=None,
    ),
    Internal(
        owner="torch.utils.backend_registration",
        names="_setup_privateuseone_for_python_backend",
        used_for="estimates: a device that exists in name only",
        without=_NO_ESTIMATE,
        fallback=None,
    ),
    Internal(
        owner="torch._C",
        names="DispatchKey DispatchKeySet _ExcludeDispatchKeyGuard _current_autograd_node "
        "_get_privateuse1_backend_name _storage_Use_Count",
        used_for="estimates: register the device, autocast on it, find what backward does in place",
        without=_NO_ESTIMATE,
    ),
    Internal(
        owner="torch.library:Library",
        names="_destroy",
        used_for="estimates: remove the rules of autocast and attention again",
        without=_NO_ESTIMATE,
    ),
    Internal(
        owner="torch:ops.aten",
        names="_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention",
        used_for="estimates: attention as CUDA computes it",
        without="lightning-memprof estimate fails for models with attention",
    ),
)
