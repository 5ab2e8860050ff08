"""The fields of a ``TrainLoop``: what each must be. The first that is not raises ``UsageError``, in one sentence."""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare import nested

CALLS = {
    "fit": ("fit(batches)", 1),
    "step": ("step(batch)", 1),
    "loss": ("loss(model, batch)", 2),
    "evaluate": ("evaluate()", 0),
    "save": ("save()", 0),
    "load": ("load(state)", 1),
    "split_batch": ("split_batch(batch, k)", 2),
    "parts": ("parts(model, batch)", 2),
}
"""How each function is called, and with how many arguments; ``save`` may also take the path that it writes to."""

_COUNTS = {
    "steps": ("the number of optimizer steps of the whole training", "len(loader) * epochs // accumulate"),
    "epochs": ("the number of passes over the data of the whole training", "90"),
}

_FUNCTIONS = {
    "parts": 'a function is needed that gives each term by name, as in lambda model, batch: {"ce": ce(model, batch)}'
}
"""What is needed in place of a value that is no function, where more is to be said than that."""

_PATHS = re.compile(r"path|file|fname|folder|dir(ectory|name)?$|(^|_)dir(_|$)", re.IGNORECASE)
"""Names of parameters that are given a path."""

_FOLDERS = re.compile(r"folder|(^|_)dir(ectory|name)?(_|$)|dir$", re.IGNORECASE)

_PASSING_ON = ("torch.utils._contextlib", "torch.amp.autocast_mode", "contextlib")
"""Modules whose decorators call what they wrap with the arguments that they are given."""

_DEPTH = 3
"""How far optimizers are looked for inside wrappers."""


def require_fields(loop: Any) -> None:
    """Raise ``UsageError`` for the first field of a ``TrainLoop`` that is of a kind that cannot be judged."""
    for name in CALLS:
        _require_function(name, getattr(loop, name))
    if loop.fit is not None and loop.step is not None:
        raise UsageError("TrainLoop got both fit and step; give the whole loop as fit, or one batch's work as step")
    _require_paths("frozen", loop.frozen)
    if loop.pretrained is not None and not isinstance(loop.pretrained, bool):
        _require_paths("pretrained", loop.pretrained)
    _require_paths("renews", loop.renews, "'optimizer', 'scheduler', 'scaler', 'rng' or paths", "('optimizer',)")
    if loop.renews is not None and loop.load is None:
        raise UsageError(
            f"TrainLoop.renews is given without load, which renews it; both are needed: {_call('load', loop.save)}"
        )
    require_optimizers(loop.optimizers)
    _require_schedulers(loop.scheduler, loop.optimizers)
    for scaler in listed(loop.scaler):
        _require_scaler(scaler)
    _require_batches(loop.batches)
    for name, (what, example) in _COUNTS.items():
        given = getattr(loop, name)
        if given is not None and not (is_whole(given) and operator.index(given) >= 1):
            raise _refused(name, given, f"{what} is needed, a whole number from 1 on, as in {name}={example}")
    for name in ("rows_interact", "ordered", "nondeterministic"):
        given = getattr(loop, name)
        if given is not None and not isinstance(given, bool):
            raise _refused(name, given, "True or False is needed, or leave it out")
    if loop.expected_init_loss is not None and not _is_number(loop.expected_init_loss):
        raise _refused("expected_init_loss", loop.expected_init_loss, "a finite number is needed, as in math.log(10)")
    if loop.batch_dim is not None and not is_whole(loop.batch_dim):
        raise _refused("batch_dim", loop.batch_dim, "the number of a dimension is needed, as in batch_dim=1")
    if (loop.save is None) != (loop.load is None):
        given, absent = ("save", "load") if loop.load is None else ("load", "save")
        call = _call(absent, getattr(loop, given))
        raise UsageError(f"TrainLoop.{given} is given without {absent}; both are needed: {call}")


def _call(absent: str, other: Any) -> str:
    """How ``save`` or ``load`` is called compared with the other one, which shows whether a path is passed."""
    signature = _own_signature(other) if other is not None else None
    first = _first_parameter(signature)
    if signature is None or first is None:
        return CALLS[absent][0]
    by_path = _PATHS.search(first) or (absent == "load" and not _binds(signature, 0))
    return f"{absent}(path)" if by_path else CALLS[absent][0]


def named_modules(model: Any, field: str = "TrainLoop.model") -> dict[str, nn.Module]:
    """The declared modules by prefix; raises ``UsageError`` for what is none."""
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        named = {str(k): v for k, v in model.items()}
    elif isinstance(model, Iterable) and not isinstance(model, (str, bytes, torch.Tensor)):
        named = {str(i): v for i, v in enumerate(model)}
    else:
        raise UsageError(
            f"{field} is {a(model)}; a torch.nn.Module is needed, or a list or dict of modules{_adapter(model)}"
        )
    for key, value in named.items():
        if not isinstance(value, nn.Module):
            raise UsageError(f"{field}[{key}] is {a(value)}; a torch.nn.Module is needed")
    if not named:
        raise UsageError(f"{field} is empty; at least one torch.nn.Module is needed")
    return named


def require_dimensions(loop: Any, batch: Any) -> None:
    """Raise ``UsageError`` where no tensor of the batch has a dimension along which its rows, or its padded positions,
    are declared to lie."""
    dims = [t.dim() for t in nested.tensors(batch)]
    given = [("TrainLoop.batch_dim", loop.batch_dim, "the one that its rows lie along")]
    dim = getattr(loop.padding, "dim", 1)
    if dim != 1:  # the default may go with rows that fit pads itself
        given.append(("TrainLoop.padding: dim", dim, "the one that is padded"))
    for name, number, needed in given:
        if number is not None and dims and not any(-dim <= number < dim for dim in dims):
            raise UsageError(
                f"{name} is {number}, and no tensor of the batch has such a dimension ({nested.describe(batch)}); "
                f"{needed} is needed"
            )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (and no bool); numbers of numpy count."""
    if isinstance(value, (bool, torch.Tensor)):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def a(value: Any) -> str:
    """A value's type, in words for a message."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _refused(name: str, given: Any, needed: str) -> UsageError:
    plain = isinstance(given, (str, bytes, int, float))
    return UsageError(f"TrainLoop.{name} is {repr(given)[:60] if plain else a(given)}; {needed}")


def _adapter(model: Any) -> str:
    """What to call for the trainer of a library, passed in place of a model."""
    kinds = {f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(model).__mro__}
    if "transformers.Trainer" in kinds:
        return "; for a Trainer: from_trainer(trainer)"
    if kinds & {"lightning.Trainer", "pytorch_lightning.Trainer"}:
        return "; for Lightning: from_lightning(module, batch=...)"
    return ""


def _require_function(name: str, given: Any) -> None:
    if given is None:
        return
    if not callable(given):
        raise UsageError(f"TrainLoop.{name} is {a(given)}; {_FUNCTIONS.get(name, 'a function is needed')}")
    how, count = CALLS[name]
    if name == "loss" and type(given).__module__ == "torch.nn.modules.loss":
        raise UsageError(
            f"TrainLoop.loss is {a(given)}, which takes outputs and targets; loss(model, batch) is needed, as in "
            "lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if inspect.iscoroutinefunction(given) or inspect.isasyncgenfunction(given):
        raise UsageError(
            f"TrainLoop.{name} is a coroutine function, which only begins to run when it is awaited; a plain function "
            "is needed, as in lambda batches: asyncio.run(train(batches))"
        )
    if inspect.isgeneratorfunction(given) and name != "split_batch":
        raise UsageError(
            f"TrainLoop.{name} is a generator function, which runs only as far as it is iterated over; a function that "
            "does its work when it is called is needed"
        )
    signature = _own_signature(given) if _passes_on(given) else _signature(given)
    if signature is None:
        return
    counts = (0, 1) if name == "save" else (count,)
    if not any(_binds(signature, n) for n in counts):
        also = " or save(path)" if name == "save" else _bound(given, signature) if name == "evaluate" else ""
        raise UsageError(f"TrainLoop.{name} takes {signature}, and is called as {how}{also}")


def _passes_on(function: Callable[..., Any]) -> bool:
    """Whether what wraps it passes on what it is given: torch's ``no_grad()`` and ``autocast()``, contextlib's managers
    as decorators."""
    plain = function.__func__ if inspect.ismethod(function) else function
    return inspect.isfunction(plain) and plain.__globals__.get("__name__") in _PASSING_ON


def _bound(function: Callable[..., Any], signature: inspect.Signature) -> str:
    """How a function is written that calls this one with what it requires; empty for one without a name."""
    if not (inspect.ismethod(function) or inspect.isfunction(function)) or not function.__name__.isidentifier():
        return ""
    name, owner = function.__name__, function.__self__ if inspect.ismethod(function) else None
    kind = owner.__name__ if isinstance(owner, type) else type(owner).__name__.lower()
    required = [
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return f": lambda: {name if owner is None else f'{kind}.{name}'}({', '.join(required)})"


def path_parameter(save: Callable[..., Any], load: Callable[..., Any]) -> str:
    """The name of the parameter by which ``save`` takes the path that it writes to and ``load`` reads; empty where
    ``save`` returns a state.

    A parameter without a default decides; one with a default counts where its name says that it is a path, and that of
    ``load`` says so too.
    """
    signature, loading = _own_signature(save), _own_signature(load)
    first = _first_parameter(signature)
    if signature is None or first is None:
        return ""
    if not _binds(signature, 0):
        return first
    other = _first_parameter(loading)
    return first if _PATHS.search(first) and other is not None and _PATHS.search(other) else ""


def _own_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """That of the function inside where what wraps it takes whatever is given, as ``torch.no_grad()`` does."""
    outer = _signature(function)
    if outer is None or not all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in outer.parameters.values()):
        return outer
    inner = inspect.unwrap(function)
    if inner is function:
        return outer
    if inspect.ismethod(function) and inspect.isfunction(inner):
        inner = inner.__get__(function.__self__)  # what a method's decorator wraps takes self as well
    return _signature(inner)


def is_folder(parameter: str) -> bool:
    """Whether a parameter of this name is given the path of a folder."""
    return _FOLDERS.search(parameter) is not None


def _first_parameter(signature: inspect.Signature | None) -> str | None:
    """The parameter that a single argument is given to."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values() if signature is not None else ()
    return next((p.name for p in parameters if p.kind in kinds), None)


def _binds(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with so many arguments by position."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function; of one that another wraps, what the outer one takes."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return None
    return signature.replace(return_annotation=inspect.Signature.empty)


def _require_paths(
    name: str, given: Any, needed: str = "paths of modules or parameters", example: str = "('backbone.',)"
) -> None:
    if isinstance(given, str):
        raise UsageError(f"TrainLoop.{name} is the string {given!r}; a tuple of paths is needed: ({given!r},)")
    for prefix in given if isinstance(given, Iterable) else () if given is None else (given,):
        if not isinstance(prefix, str):
            raise UsageError(f"TrainLoop.{name} names {a(prefix)}; {needed} are needed, as in {example}")


def require_optimizers(optimizers: list[Any], field: str = "TrainLoop.optimizer") -> None:
    """Raise ``UsageError`` for what is no optimizer, and for one that is given twice."""
    known: list[Any] = []
    for optimizer in optimizers:
        scheduler = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
        scaler = callable(getattr(optimizer, "scale", None)) and callable(getattr(optimizer, "unscale_", None))
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)) or scheduler or scaler:
            raise UsageError(f"{field} is {a(optimizer)}; an optimizer with step() is needed, or a list of them")
        if any(optimizer is other for other in known):
            raise UsageError(f"{field} names the same {type(optimizer).__name__} twice; each optimizer is needed once")
        known.append(optimizer)


def _require_schedulers(given: Any, optimizers: list[Any]) -> None:
    schedulers = []
    for scheduler in listed(given):
        if isinstance(given, Mapping) and not hasattr(scheduler, "step"):
            continue  # Lightning's {"scheduler": ..., "interval": "step"}
        able = callable(scheduler) or any(True for _ in _inner_optimizers(scheduler)) or _has_calls(scheduler)
        other = isinstance(scheduler, (type, torch.optim.Optimizer, nn.Module))
        if not able or other:
            raise UsageError(
                f"TrainLoop.scheduler is {a(scheduler)}; a scheduler with step() is needed, or another object that "
                "writes the optimizer's learning rates, or a list of them"
            )
        schedulers.append(scheduler)
    scheduled = [o for scheduler in schedulers for o in _inner_optimizers(scheduler)]
    groups = {id(group) for known in optimizers for o in (known, *_inner_optimizers(known)) for group in _groups(o)}
    if scheduled and groups and not any(id(group) in groups for o in scheduled for group in _groups(o)):
        raise UsageError(
            f"TrainLoop.scheduler is {a(schedulers[0])} of another {type(scheduled[0]).__name__} than those of "
            "TrainLoop.optimizer, whose rates it never changes; build it on the optimizer that trains"
        )


def _has_calls(scheduler: Any) -> bool:
    """Whether an object has a method that moves a schedule on: ``step()``, ``step_update()``, ``update_lr()``."""
    words = ("step", "update", "adjust", "set_lr")
    names = [n for n in dir(type(scheduler)) if not n.startswith("_") and n.lower().startswith(words)]
    return any(callable(getattr(type(scheduler), name)) for name in names)


def _inner_optimizers(holder: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The optimizers that a scheduler or a wrapper holds, at any of its attributes."""
    if depth == 0:
        return
    for value in list(getattr(holder, "__dict__", {}).values()):
        for held in value if isinstance(value, (list, tuple)) else (value,):
            if _groups(held):
                yield held
            if _groups(held) or isinstance(held, torch.optim.lr_scheduler.LRScheduler) or _wraps_scheduler(held):
                yield from _inner_optimizers(held, depth - 1)


def _wraps_scheduler(value: Any) -> bool:
    return callable(getattr(value, "step", None)) and hasattr(value, "get_last_lr")


def _groups(value: Any) -> list[Any]:
    groups = getattr(value, "param_groups", None)
    return groups if isinstance(groups, list) else []


def _require_scaler(scaler: Any) -> None:
    able = callable(getattr(scaler, "scale", None)) or callable(scaler)
    if not able or isinstance(scaler, (type, nn.Module, torch.optim.Optimizer)) or inspect.isroutine(scaler):
        shown = repr(scaler) if isinstance(scaler, (bool, int, float, str)) else a(scaler)
        raise UsageError(f"TrainLoop.scaler is {shown}; a gradient scaler is needed, as in torch.amp.GradScaler()")


def _require_batches(given: Any) -> None:
    if given is None or not callable(given) or hasattr(given, "__iter__"):
        return
    signature = _signature(given)
    try:
        if signature is not None and not isinstance(given, type):
            signature.bind(1)
    except TypeError:
        raise UsageError(f"TrainLoop.batches takes {signature}, and is called as batches(n) for n batches") from None


def listed(value: Any) -> list[Any]:
    """The objects that a field gives: one, or the entries of a list, a set or a dict; none for None."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
