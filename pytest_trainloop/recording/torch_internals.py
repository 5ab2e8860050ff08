"""The one place that reaches into torch's private names, each with its test per supported version.

A name that a docstring gives without versions is the same from torch 2.6 to 2.14.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

__all__ = [
    "DROPOUT_MODULES",
    "FETCHERS",
    "FILES_OF_MODES",
    "FIRST_KERNEL",
    "MODULE_CALLS",
    "NORM_MODULES",
    "REBUILDS",
    "DispatchMode",
    "aliased_arguments",
    "apply_of",
    "argument_names",
    "around_zip_files",
    "checkpoint_generators",
    "clip_cells",
    "default_device",
    "forget_process_groups",
    "function_class",
    "functorch_level",
    "has_gradient_hooks",
    "has_step_hooks",
    "has_step_pre_hooks",
    "has_values",
    "hooks_of",
    "in_backward",
    "is_functorch",
    "is_higher_order",
    "is_initialised",
    "is_patched_by_scheduler",
    "is_traced",
    "is_transformed",
    "is_waited_for",
    "load_for_wrappers",
    "loader_calls",
    "loader_workers",
    "no_dispatch_modes",
    "no_torch_function",
    "pass_on",
    "past_dispatch_modes",
    "saved_values_overwritten",
    "tree_leaves",
    "tree_map",
    "wrapped_cell",
    "writes_in_place",
]


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's entries can be read here and now: not those of a fake one, one on the meta device, one inside
    a transform of functorch, or zeros without memory that a derivative is made of (reading these ends the process).

    Hides ``_is_zerotensor``.
    """
    if tensor.is_meta or _is_wrapped(tensor) or _is_batched(tensor) or tensor._is_zerotensor():
        return False
    kind = type(tensor)
    return kind is torch.Tensor or kind is nn.Parameter or not isinstance(tensor, FakeTensor)


def clip_cells() -> dict[str, types.CellType]:
    """The cells in which torch's public clips of gradients keep the function that does the work: one put there is
    called by whoever imported the public one, and whenever."""
    names = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
    public = {name: getattr(nn.utils, name, None) for name in names}
    cells: dict[str, types.CellType] = {}
    for name, function in public.items():
        code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        if code is not None and "func" in code.co_freevars:
            cells[name] = closure[code.co_freevars.index("func")]
    return cells


def wrapped_cell(function: Callable[..., Any]) -> types.CellType:
    """The cell in which a decorated function of ``torch.distributed`` keeps what it calls: what is put there is called
    by whoever imported the function, and whenever."""
    cells: tuple[types.CellType, ...] = getattr(function, "__closure__", None) or ()
    return cells[function.__code__.co_freevars.index("func")]


def argument_names(func: Any) -> tuple[str, ...]:
    """The names of the arguments of an operator, in their order. Hides ``OpOverload._schema``."""
    return tuple(argument.name for argument in func._schema.arguments)


def is_waited_for(given: dict[str, Any]) -> bool:
    """Whether who calls a collective waits for it: ``async_op=False`` of the operator's arguments. The operators of
    torch 2.6 have no such argument; there it is one of torch.distributed's function that calls the operator."""
    if "async_op" in given:
        return given["async_op"] is False
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == dist.distributed_c10d.__file__ and "async_op" in code.co_varnames:
            return frame.f_locals["async_op"] is False
        frame = frame.f_back
    return False


FIRST_KERNEL = "BackendSelect"
"""The dispatch key whose kernel of an operator is asked before those of any device, in every mode of autograd."""


def pass_on(op: Any, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the kernel for the device gives, called by that of ``FIRST_KERNEL``, with Python's lock released."""
    return op.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)


def load_for_wrappers() -> None:
    """Import what DistributedDataParallel imports as it is built, ``torch._dynamo``: forks have it then.

    Environment variables that the import sets are taken back.
    """
    before = set(os.environ)
    importlib.import_module("torch._dynamo")
    for name in os.environ.keys() - before:
        del os.environ[name]


def forget_process_groups() -> None:
    """Leave the process groups that a fork has inherited, without ending them: their threads and sockets are those of
    the process that it was. Hides the state of ``torch.distributed.distributed_c10d``."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    if c10d.GroupMember.WORLD is None:
        return
    _KEPT.append([c10d._world.default_pg, dict(c10d._world.pg_map)])
    c10d._update_default_pg(None)
    for name in ("map", "names", "group_ranks", "backend_config", "to_tag", "coalesce_state"):
        getattr(c10d._world, f"pg_{name}").clear()
    c10d._world.tags_to_pg.clear()
    c10d._world.group_count = 0
    c10d._unregister_all_process_groups()


_KEPT: list[Any] = []
"""Objects whose end would wait for threads that this process does not have."""


def around_zip_files(note: Callable[[Any], None]) -> None:
    """Call ``note`` with the path or the stream of each file that ``torch.save`` opens in C++, until the process ends.
    Hides ``torch.serialization._open_zipfile_writer``."""
    serialization: Any = torch.serialization
    original = serialization._open_zipfile_writer

    def opened(target: Any) -> Any:
        note(target)
        return original(target)

    serialization._open_zipfile_writer = opened


def in_backward() -> bool:
    """Whether autograd's engine is at work in this thread. Hides ``torch._C._current_graph_task_id``."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives inside ``vmap``, ``grad``, ``jvp`` or ``is_grads_batched``: unreadable outside of it."""
    return bool(_is_wrapped(tensor) or _is_batched(tensor))


def loader_workers() -> list[tuple[list[Any], Any]]:
    """For each iterator of a DataLoader its worker processes, and what it needs to end them: their queues and events.

    Names of ``_MultiProcessingDataLoaderIter``; torchdata's iterators have the same.
    """
    names = ("_index_queues", "_worker_result_queue", "_workers_done_event", "_pin_memory_thread_done_event")
    iterators = [o for o in gc.get_objects() if type(o).__name__.endswith("MultiProcessingDataLoaderIter")]
    return [(list(o._workers), [getattr(o, name, None) for name in names]) for o in iterators if hasattr(o, "_workers")]


def loader_calls() -> tuple[type, dict[str, str]]:
    """The class of a DataLoader's iterators, and its methods by what they do: "begin" gets the loader, "indices" gives
    those of the next batch as the sampler draws them (before the batch is fetched), "next" gives the batch.
    """
    return _BaseDataLoaderIter, {"begin": "__init__", "again": "_reset", "indices": "_next_index", "next": "__next__"}


def batches_given(iterator: Any) -> int:
    """How many batches an iterator of a DataLoader has given in this pass. Hides ``_num_yielded``."""
    return int(iterator._num_yielded)


FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
"""The classes whose ``fetch`` asks a data set for the items of a batch, in this process or in a worker."""


def writes_in_place(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, was written in place; 0 where torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def is_traced() -> bool:
    """Whether torch follows calls to run or to compile them elsewhere: under ``torch.jit.trace``, ``torch.fx``,
    ``torch.compile``, ``torch.export``, ``make_fx`` or with fake tensors. Tensors have no values of their own then.

    Hides ``torch._C._is_tracing``, the modes below a dispatcher, and of ``torch.fx._symbolic_trace`` the name
    ``_is_fx_tracing_flag``, from torch 2.14 on ``_get_is_fx_tracing``.
    """
    if torch.compiler.is_compiling() or _is_tracing() or _is_fx_tracing():
        return True
    return _dispatch_modes() > 0 and (_dispatch_mode(_FAKE) is not None or _dispatch_mode(_PROXY) is not None)


_is_fx_tracing: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag
)
_is_tracing, _dispatch_modes, _dispatch_mode = (
    torch._C._is_tracing,
    torch._C._len_torch_dispatch_stack,
    torch._C._get_dispatch_mode,
)
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
"""Looked up once: this is asked at every call of torch."""


def is_higher_order(func: Any) -> bool:
    """Whether what a dispatch mode gets is an operator that takes functions, as ``torch.cond``: these go to a mode that
    has ``supports_higher_order_operators``. Hides ``torch._ops.HigherOrderOperator``."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def is_transformed() -> bool:
    """Whether torch traces, or a transform of functorch is under way (``vmap``, ``grad``, ``jacrev``): tensors are read
    by nobody then. Hides ``torch._C._functorch.maybe_current_level``, torch's level of nesting."""
    return is_traced() or functorch_level() is not None


functorch_level = torch._C._functorch.maybe_current_level
"""How deep the transforms of functorch are nested; None outside of them."""


def default_device() -> torch.device:
    """Torch's default device; torch 2.6 raises where it was set to None."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def apply_of(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of a subclass of ``torch.autograd.Function``.

    ``original`` is the attribute of the class that defines it: a Python classmethod, or one in C from torch 2.15 on.
    """
    function = getattr(original, "__func__", None)
    if function is not None:
        return functools.partial(function, cls)
    inherited: Callable[..., Any] = vars(torch._C._FunctionBase)["apply"].__get__(None, cls)
    return inherited


_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""The innermost first: from torch 2.15 on the second calls the first."""

_USING = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")


REBUILDS: tuple[Any, str] = (torch._utils, "_rebuild_tensor")
"""The module and the name of the function that makes a tensor of a storage which was read from a file."""


def checkpoint_generators() -> list[tuple[Any, str]]:
    """Where torch's own code looks up the generator behind every checkpoint that is not re-entrant, as module and name;
    none where this torch has no such name."""
    modules = [sys.modules[name] for name in _USING if name in sys.modules]
    found = ([(module, name) for module in modules if hasattr(module, name)] for name in _GENERATORS)
    return next(filter(None, found), [])


def function_class(node: Any) -> Any:
    """The subclass of ``torch.autograd.Function`` whose backward a graph node runs, None for torch's own nodes.

    Hides ``_forward_cls`` of the node's class.
    """
    return getattr(type(node), "_forward_cls", None)


@functools.cache
def aliased_arguments(func: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Which arguments of an aten overload its result is a view of, and which it writes to.

    Hides ``OpOverload._schema``; no public name gives the aliases.
    """
    known = [(i, a.alias_info) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None]
    written = frozenset(i for i, info in known if info.is_write)
    return frozenset(i for i, _ in known) - written, written


def is_initialised(optimizer: Any) -> bool:
    """Whether ``Optimizer.__init__`` has run: wrappers that inherit from ``Optimizer`` may leave it out.

    Hides ``_optimizer_step_pre_hooks``, which it sets.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks change or read the gradient of a tensor. Hides ``_backward_hooks``."""
    return bool(tensor._backward_hooks)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before each step. Hides ``_optimizer_step_pre_hooks``."""
    return bool(optimizer._optimizer_step_pre_hooks)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks run before or after each step, or the optimizer is none of torch's.

    Hides ``_optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks``.
    """
    return any(getattr(optimizer, f"_optimizer_step_{when}_hooks", True) for when in ("pre", "post"))


def is_patched_by_scheduler(step: Any) -> bool:
    """Whether a function in the place of ``optimizer.step`` is the one that a learning rate scheduler puts there.

    Hides ``_wrapped_by_lr_sched``.
    """
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def hooks_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The hooks of a tensor by their keys, those on its gradient and those that run once it is added up.

    Hides ``_backward_hooks`` and ``_post_accumulate_grad_hooks``.
    """
    found = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hooks for hooks in found if hooks]


MODULE_CALLS = frozenset({nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__})
"""The code that calls a module: ``_wrapped_call_impl`` and ``_call_impl``."""

DROPOUT_MODULES = torch.nn.modules.dropout._DropoutNd
"""The base of torch's dropout modules: ``_DropoutNd``."""

NORM_MODULES = torch.nn.modules.batchnorm._NormBase
"""The base of torch's modules with running statistics, batch and instance norms: ``_NormBase``."""

FILES_OF_MODES = tuple(
    str(Path("torch", *parts)) for parts in (("overrides.py",), ("_dynamo", "utils.py"), ("utils", "weak.py"))
)
"""The ends of torch's files that enter and leave modes or call back from weak references."""

DispatchMode = TorchDispatchMode
"""The base of modes that see each aten operation: ``TorchDispatchMode`` of ``torch.utils._python_dispatch``.

``tree_map`` and ``tree_leaves`` are here because ``torch.utils._pytree`` has no public twin in torch 2.6.
"""

no_torch_function = torch._C.DisableTorchFunction
"""A context in which torch calls no function mode and no ``__torch_function__``: the user's do not see our calls."""


no_dispatch_modes = _disable_current_modes
"""A context in which operations pass no dispatch mode: ours see only the loop's."""


past_dispatch_modes = torch._C._DisableTorchDispatch
"""Held by a name, operations pass no dispatch mode and no tensor of another class, until the name is deleted: in a
twentieth of the time that the context ``no_dispatch_modes`` takes."""


def saved_values_overwritten(node: Any) -> bool:
    """Whether a graph node cannot run, because a tensor that it saved has been written to in place.

    Hides the attributes of nodes that begin with ``_saved_``: reading one raises what the node itself would raise.
    """
    for name in dir(type(node)):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    return True
    return False
