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
    from collections.abc import Iterator, Mapping

    # The base classes of classes; other names are of any type.
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker as FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker as MemTracker
    from torch.distributed._tools.mem_tracker import _RefType as _RefType
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class Absent:
    """Stands for a function or a class that the installed torch does not have: it has no instances."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise RuntimeError(f"torch {torch.__version__} misses a private API: see lightning-memprof doctor")


@dataclass(frozen=True, kw_only=True)
class Internal:
    """Private names of torch for one purpose.

    Attributes:
        names: by owner, a module, or ``module:class`` for attributes of a class and of its instances; as torch spells
            them, separated by spaces.
        used_for: the purpose.
        without: what happens in a version of torch without them.
        fallback: stands for a missing name of a module; None raises ImportError when the name is imported.
        cuda: only a build for CUDA or ROCm has them.
    """

    names: Mapping[str, str]
    used_for: str
    without: str
    fallback: Any = Absent
    cuda: bool = False


def path_of(owner: str, name: str) -> str:
    """Return where a name is, in the form of :func:`pkgutil.resolve_name`."""
    return f"{owner}{'.' if ':' in owner else ':'}{name}"


def is_there(owner: str, name: str) -> bool:
    """Return whether the installed torch has a name; an attribute of instances is one that a method uses."""
    try:
        pkgutil.resolve_name(path_of(owner, name))
    except ImportError:
        return False
    except AttributeError:
        classes = getattr(pkgutil.resolve_name(owner), "__mro__", ())
        methods = (method for cls in classes for method in vars(cls).values() if inspect.isfunction(method))
        return any(name in method.__code__.co_names for method in methods)
    return True


def expected() -> Iterator[tuple[str, str, Internal]]:
    """Yield owner, name and row of each private API that this build of torch should have."""
    for row in INTERNALS:
        if not row.cuda or torch.version.cuda or torch.version.hip:
            yield from ((owner, name, row) for owner, names in row.names.items() for name in names.split())


def missing() -> dict[str, str]:
    """Return the private APIs that the installed torch does not have, each with what happens without it."""
    rows = ((owner, name, row) for owner, name, row in expected() if not is_there(owner, name))
    return {path_of(owner, name).replace(":", "."): row.without for owner, name, row in rows}


def __getattr__(name: str) -> Any:
    for row in INTERNALS:
        for owner, names in row.names.items():
            if name in names.split() and ":" not in owner:
                try:
                    return pkgutil.resolve_name(path_of(owner, name))
                except (AttributeError, ImportError) as error:
                    if row.fallback is None:
                        raise ImportError(f"{error}; {row.without}") from error
                    return row.fallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NO_ESTIMATE: Final = "lightning-memprof estimate is not available"

INTERNALS: Final = (
    Internal(
        names={"torch._C": "DisableTorchFunction"},
        used_for="read tensors without calling the __torch_function__ of the program's subclasses and modes",
        without="__torch_function__ of the program's tensor subclasses and modes sees the profiler's reads",
        fallback=nullcontext,
    ),
    Internal(
        names={"torch._C": "_current_graph_task_id"},
        used_for="tell a checkpoint's recomputation in backward from a forward",
        without="saved activations and RSS by module include what reentrant checkpointing recomputes",
        fallback=lambda: -1,
    ),
    Internal(
        names={
            "torch._C._autograd": "SavedTensor _get_sequence_nr",
            "torch._C._autograd:SavedTensor": "data unpack_hook",
            "torch.autograd.function:BackwardCFunction": "_raw_saved_tensors _sequence_nr",
        },
        used_for="read what the nodes of autograd's graph save (those of C++ in _raw_saved_NAME) without unpacking it, "
        "and by their order the module whose forward saved it",
        without="SavedTensors is disabled and reported",
    ),
    Internal(
        names={
            "torch._C._autograd": "_pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks "
            "_top_saved_tensors_default_hooks",
        },
        used_for="count saved bytes with hooks that come out from below the program's own",
        without="FunctionMemory(saved_tensors_hooks=True) is disabled and reported",
    ),
    Internal(
        names={
            "torch:Tensor": "_base _indices _post_accumulate_grad_hooks _use_count _values _version",
            # Empty storages have no address.
            "torch:UntypedStorage": "_cdata _free_weak_ref _weak_ref",
            "torch.distributed.tensor:DTensor": "_local_tensor _spec",
        },
        used_for="views, sparse tensors, references, checks of in-place operations, ranges of gradient hooks, identity "
        "of storages, this rank's part of a sharded tensor, and how it is sharded",
        without="collectors that read tensors, or sharded tensors, are disabled and reported",
    ),
    Internal(
        names={"torch._C._profiler": "_RecordFunctionFast"},
        used_for="ranges of modules, actions and hooks at 0.2 µs each",
        without="torch.profiler.record_function is used, which takes longer",
        fallback=torch.profiler.record_function,
    ),
    Internal(
        names={"torch._C._distributed_c10d": "_dump_fr_trace_json _dump_nccl_trace_json"},
        used_for="the last collectives of a rank in a step that does not end",
        without="the page does not compare the collectives of ranks that hang",
        fallback=bytes,
        cuda=True,
    ),
    Internal(
        names={
            "torch._C._autograd": "_ProfilerDisableOptions _disable_profiler_legacy _profiler_enabled _profiler_type",
        },
        used_for="leave Kineto to another profiler that is recording; stop recording in forked workers",
        without="of two profilers at once, the first one loses its data; workers that start in a window grow",
        fallback=lambda *_: False,
    ),
    Internal(
        names={"torch.autograd.profiler:profile": "_prepare_trace _start_trace"},
        used_for="give Kineto to a profiler that the program starts during a window",
        without="OperatorTrace is disabled and reported",
    ),
    Internal(
        names={
            "torch._C._dynamo.eval_frame": "_FrameAction _FrameExecStrategy set_code_exec_strategy",
            "torch._dynamo.callback": "callback_handler",
        },
        used_for="keep Dynamo from compiling wrappers of forwards, and remove them while torch compiles; time "
        "compilations",
        without="collectors by module are disabled and reported once torch has compiled something",
        fallback=None,
    ),
    Internal(
        names={"torch._dynamo.eval_frame": "OptimizedModule"},
        used_for="recognize compiled modules",
        without="compiled modules get hooks, and torch compiles them again",
    ),
    Internal(
        names={
            "torch.nn:Module": "_backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl "
            "_forward_hooks _forward_pre_hooks _parameters",
        },
        used_for="watch forwards, name the program's hooks, read parameters that are made only when used",
        without="collectors by module are disabled and reported",
    ),
    Internal(
        names={
            "torch.nn.modules.module": "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks "
            "_global_forward_pre_hooks",
        },
        used_for="name the program's global hooks in the trace",
        without="the trace does not name global hooks",
    ),
    Internal(
        names={"torch._C": "_get_tracing_state"},
        used_for="leave torch.jit.trace its own call of a module",
        without="a program that traces a module in a window gets scopes without names",
        fallback=lambda: None,
    ),
    Internal(
        names={"torch._guards": "active_fake_mode"},
        used_for="leave out operators on fake tensors, which allocate nothing",
        without="operators of shape inference are counted",
        fallback=lambda: None,
    ),
    Internal(
        names={"torch.utils._python_dispatch": "is_traceable_wrapper_subclass"},
        used_for="read the parts of tensor subclasses such as DTensor",
        without="tensor subclasses without storage have no bytes",
        fallback=lambda _tensor: False,
    ),
    Internal(
        names={
            "torch.utils._python_dispatch": "TorchDispatchMode _get_current_dispatch_mode_stack _pop_mode _push_mode"
        },
        used_for="see every operator, and leave the program's own dispatch modes in place",
        without="Throughput(flops=True), ModuleMemory and FSDPMemory are disabled and reported",
    ),
    Internal(
        names={
            "torch._C._distributed_c10d": "Reducer",
            "torch._C._distributed_c10d:Reducer": "_rebuild_buckets",
            "torch.distributed._tools.mem_tracker": "MemTracker _ModState _RefType _State _UpdateType",
            "torch.distributed._tools.mem_tracker:MemTracker": "_WINFO _in_opt _mod_tracker _peak_mem _peak_mem_snap "
            "_ref_class _track _track_optimizer_states _update_and_maybe_create_winfos _update_peak_stats _update_snap",
            "torch.distributed._tools.fsdp2_mem_tracker": "FSDPMemTracker _FSDPModState _FSDPRefType _FSDPState",
        },
        used_for="bytes by category at every operator, in Lightning's loop, with modules that are called several "
        "times, DDP's gradient buckets and fully_shard",
        without="ModuleMemory and FSDPMemory are not available",
        fallback=None,
    ),
    Internal(
        names={
            "torch.distributed._tools.fsdp2_mem_tracker:FSDPMemTracker": "_fsdp_param_group_post_backward "
            "_fsdp_param_group_pre_backward _fsdp_state _fsdp_state_post_forward _fsdp_state_pre_forward",
            "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
            "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_fsdp_param_group _post_forward_hook_handle "
            "_pre_forward_hook_handle",
            "torch:ops.c10d": "_allgather_base_ _reduce_scatter_base_",
        },
        used_for="put the tracker between fully_shard's hooks, and recognize the buffers of its collectives",
        without="FSDPMemory is disabled and reported",
    ),
    Internal(
        names={"torch.distributed.fsdp:FullyShardedDataParallel": "_fsdp_wrapped_module _handle"},
        used_for="name modules under FSDP1, and count the tensors into which it gathers parameters",
        without="ModuleMemory is disabled and reported under FSDP1",
    ),
    Internal(
        names={"torch.utils._pytree": "tree_leaves tree_map"},
        used_for="find and replace the tensors in an operator's arguments and results",
        without=f"ModuleMemory and FSDPMemory are not available; {_NO_ESTIMATE}",
        fallback=None,
    ),
    Internal(
        names={
            "torch.utils.data.dataloader": "_BaseDataLoaderIter _MultiProcessingDataLoaderIter _utils",
            "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_dataset _get_data _next_data _next_index",
        },
        used_for="time samplers, the wait for workers, and their work; count the batches that are ready",
        without="HookTimings has no rows of samplers and workers, HostMemory no times of workers, no queue of batches",
    ),
    Internal(
        names={"torch.utils.data._utils.fetch": "_IterableDatasetFetcher _MapDatasetFetcher"},
        used_for="time data sets and their collation",
        without="HookTimings has no rows of data sets and collation",
    ),
    Internal(
        names={"torch.cuda.memory": "_record_memory_history _snapshot"},
        used_for="the allocator's history and snapshots; torch documents these names",
        without="AllocatorHistory is disabled and reported; OOM events have no snapshot",
    ),
    Internal(
        names={"torch._C": "_cuda_isHistoryEnabled"},
        used_for="leave a history that the program records as it is",
        without="a history that the program records ends with the first window",
        fallback=lambda: False,
        cuda=True,
    ),
    Internal(
        names={"torch._C": "_cuda_attach_out_of_memory_observer"},
        used_for="read the allocator before torch raises",
        without="OOMAutopsy is disabled and reported on CUDA",
        cuda=True,
    ),
    Internal(
        names={
            "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException FakeTensor "
            "FakeTensorMode",
        },
        used_for="estimates: run a step without memory; leave out operators on fake tensors, which allocate nothing",
        without=f"operators of shape inference are counted; {_NO_ESTIMATE}",
    ),
    Internal(
        names={
            "torch._ops:OpOverload": "_schema",
            "torch.optim.optimizer": "_foreach_supported_types",
            "torch.utils.backend_registration": "_setup_privateuseone_for_python_backend",
            "torch._C": "DispatchKey DispatchKeySet _ExcludeDispatchKeyGuard _current_autograd_node "
            "_get_privateuse1_backend_name _storage_Use_Count",
            "torch.library:Library": "_destroy",
        },
        used_for="estimates: a device that exists in name only, with its autocast and its implementation of "
        "optimizers; operators whose result has a shape that depends on values; what backward does in place",
        without=_NO_ESTIMATE,
        fallback=None,
    ),
    Internal(
        names={
            "torch:ops.aten": "_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention "
            "_scaled_dot_product_flash_attention",
        },
        used_for="estimates: attention as CUDA computes it",
        without="lightning-memprof estimate fails for models with attention",
    ),
    Internal(
        names={
            "torch.testing._internal.distributed.fake_pg": "FakeStore",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group": "FSDPParamGroup",
            "torch.distributed.tensor._sharding_prop": "ShardingPropagator",
            "torch.distributed.tensor._sharding_prop:ShardingPropagator": "_propagate_tensor_meta_non_cached",
        },
        used_for="estimate one of several ranks in one process, with its buffers of communication and without the "
        "tensors on which a DTensor computes shapes",
        without="lightning-memprof estimate knows one device only",
        fallback=None,
    ),
)
