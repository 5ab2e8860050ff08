"""Build a fresh loop under a seed with chosen knobs, and refuse a loop that cannot be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.core import members, places
from pytest_trainloop.core.errors import UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.fields import require_dimensions
from pytest_trainloop.declare.loop import TrainLoop
from pytest_trainloop.declare.losscontract import LossContract
from pytest_trainloop.declare.refusals import slip_in_the_call
from pytest_trainloop.declare.script import OnlyAScript, Script
from pytest_trainloop.recording.record import within
from pytest_trainloop.runs.process_state import seed_all
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from pytest_trainloop.runs.kept_batches import KeptBatches

Make = Callable[..., Any]

BUILDING = "building the loop"
"""The stage of what the user's function raises."""

_REQUIRED = {"model": "a torch.nn.Module is needed, or a list or dict of modules"}


def build(make: Make, knobs: Mapping[str, Any], seed: int, kept: KeptBatches | None = None) -> TrainLoop:
    """A fresh loop. Raises ``UsageError`` for what is no loop (``OnlyAScript`` for a script), and ``UserCodeError``
    where the user's function raised."""
    seed_all(seed)
    try:
        loop = make(**knobs)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # of the project's function
        if slip := slip_in_the_call(error, TrainLoop, _REQUIRED):
            raise slip from None
        reraise_ours(error)
        raise UserCodeError(user_error(error, BUILDING)) from error
    if isinstance(loop, Script):
        raise OnlyAScript(loop)
    if not isinstance(loop, TrainLoop):
        other = " (for a loss the marker is trainloop_loss)" if isinstance(loop, LossContract) else ""
        raise UsageError(
            f"{_name(make)} returned {_what(loop)}; it must return a TrainLoop{other}", place=places.of_function(make)
        )
    try:
        _require_loop(loop)
    except UsageError as error:
        raise loop.located(error) from None
    loop.built_under(seed, kept)
    return loop


def require_fresh(make: Make, first: TrainLoop, second: TrainLoop) -> None:
    """Raise ``UsageError`` if two calls of the user's function share a parameter, buffer or optimizer."""
    known = {id(thing): name for name, thing in _parts(first)}
    for name, thing in _parts(second):
        if id(thing) in known:
            raise UsageError(
                f"two calls of the function share {name}; build the model and the optimizer inside the function, so "
                "that every call gives a fresh loop (a model from a fixture or a module-level variable would be "
                "trained by every check)",
                place=places.of_function(make),
            )


def require_on_cuda(loop: TrainLoop, knobs: Mapping[str, str], wanted: str) -> None:
    """Raise ``UsageError`` if no parameter of a loop is on the wanted CUDA device, "cuda" for any."""
    devices = sorted({str(p.device) for module in loop.modules.values() for p in members.parameters(module)})
    if devices and not any(device == wanted or device.startswith(f"{wanted}:") for device in devices):
        how = (
            f"its parameter {knobs['device']!r} was given {wanted!r}: move the model there"
            if "device" in knobs
            else "it has no knob 'device': give it the keyword default device=\"cpu\" and move model and batch there"
        )
        raise UsageError(f"the device of the loops is {wanted}, but this model is on {', '.join(devices)}; {how}")


def _parts(loop: TrainLoop) -> Iterator[tuple[str, Any]]:
    for prefix, module in loop.modules.items():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in members.named_parameters(module):
            yield f"the parameter {dot}{name}", parameter
        for name, buffer in members.named_buffers(module):
            yield f"the buffer {dot}{name}", buffer
    for optimizer in loop.optimizers:
        yield f"the optimizer {type(optimizer).__name__}", optimizer


def _require_loop(loop: TrainLoop) -> None:
    if not any(True for module in loop.modules.values() for _ in members.parameters(module)) and not _hidden_parameters(
        loop
    ):
        kinds = ", ".join(type(m).__name__ for m in loop.modules.values())
        raise UsageError(f"TrainLoop.model ({kinds}) has no parameters; a model that can be trained is needed")
    if loop.fit is None and loop.step is None and loop.loss is None:
        raise UsageError(
            "TrainLoop got neither fit nor step nor loss; give the project's own loop as a function: "
            "fit=lambda batches: train(model, batches) (fit=train(...) would call it, and give what it returns: None)"
        )
    if loop.batch is None and loop.batches is None:
        raise UsageError("TrainLoop got neither batch nor batches; an example batch is needed")
    if loop.batch is not None:
        nested.require_batch(loop.batch, "batch")
        require_dimensions(loop, loop.batch)
        for declared in [] if loop.padding is None else loop.padding.names:
            nested.require_names([loop.batch], declared, "TrainLoop.padding")
    for prefix in loop.frozen or ():
        names = [n for n, t in _parts(loop) if n.startswith("the parameter ")]
        if not any(within(n.removeprefix("the parameter "), [prefix]) for n in names):
            raise UsageError(
                f"TrainLoop.frozen: no parameter is {prefix!r} or lies below it; the first names are "
                f"{_first_names(names)}"
            )


def _hidden_parameters(loop: TrainLoop) -> bool:
    from pytest_trainloop.recording.parameters import ParameterTable
    from pytest_trainloop.recording.samples import Reader

    table = ParameterTable(Reader())
    for prefix, module in loop.modules.items():
        table.add_module(module, prefix)
    return bool(table.entries)


def _first_names(names: list[str]) -> str:
    return some([n.removeprefix("the parameter ") for n in names], most=4)


def _what(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"a model ({type(value).__name__})"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return nested.describe(value)


def _name(make: Make) -> str:
    function = getattr(make, "func", make)
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", "the function"))
