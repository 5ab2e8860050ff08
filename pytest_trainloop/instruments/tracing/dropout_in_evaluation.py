"""Dropout that acts inside a module in evaluation mode, and whether its author wrote that it should.

``F.dropout(x, p)`` acts in every mode, since ``training`` is True by default; attention's ``dropout_p`` has no such
switch; a dropout module that is no part of the model, because ``forward`` makes it or a plain list holds it, is never
switched. Where ``training=`` was written out, as Tacotron's prenets and dropout as a sample have it, dropout is
intended."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.arguments import bound_arguments
from pytest_trainloop.instruments.tracing.call_expressions import called_name, given_in, names_in, unpacks, written_call
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.as_caller import as_caller, is_stand_in
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import raw_bytes, readable
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.recording.torch_internals import DROPOUT_MODULES
from pytest_trainloop.recording.torch_names import DROPOUTS
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from pytest_trainloop.core.finding import Level
    from pytest_trainloop.recording.events import Forward, Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Why = Literal["left_out", "no_switch", "unregistered", "written", "unknown"]
"""Why dropout acts: ``training`` is left to its default; the function has no such switch; the dropout module is no part
of the model; ``training`` is written out; the call's source is not there, or does not tell."""

_ATTENTION = "scaled_dot_product_attention"
_WITH_OWN_DROPOUT = {_ATTENTION: "dropout_p", "multi_head_attention_forward": "dropout_p"}
_MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """One call of dropout that acted inside a module in evaluation mode."""

    at: int
    """The position in the record."""
    function: str
    module: str
    """The path of the module in evaluation mode whose code makes the call."""
    p: float
    place: Place
    why: Why
    on_input: bool
    """Whether it drops entries of what the model itself is given: data that is corrupted, perhaps on purpose."""
    given: str
    """A digest of what it was given, for the first such call of a forward pass."""
    repeated_rows: bool
    """Whether at least half the rows that it was given repeat others."""
    forward_pass: int
    steps: int
    """Optimizer steps before it."""
    switches: int
    """Calls of ``train()`` and ``eval()`` before it."""
    trained_on: Forward | None
    """The forward pass, where gradients were on: it evaluates unless a backward pass answers it."""


@dataclass(frozen=True, slots=True)
class ActiveDropout:
    """The calls from one line that acted inside a module in evaluation mode."""

    function: str
    module: str
    p: float
    place: Place
    why: Why
    calls: int
    samples: bool
    """Whether the same inputs come several times in a row: dropout is wanted there."""
    on_input: bool

    @property
    def level(self) -> Level:
        intended = self.samples or self.on_input or self.why in ("written", "unknown")
        return "advice" if intended else "fault"

    @property
    def summary(self) -> str:
        what = "attention's dropout" if self.function == _ATTENTION else "dropout"
        return f"{what} acts in evaluation mode in {self.module}"

    @property
    def measured(self) -> str:
        times = "call" if self.calls == 1 else "calls"
        return f"{self.calls} {times} of {self.function} with p = {self.p:g} while {self.module}.training was False"

    @property
    def shown_by(self) -> str:
        """The observation that says why it acts, and what makes it advice."""
        reason = {
            "left_out": "the call leaves training= to its default, True",
            "no_switch": f"{self.function} has no training=: its dropout_p acts in every mode",
            "unregistered": "the dropout module is no part of the model, so eval() does not reach it",
            "written": "the call itself says that it acts",
            "unknown": "how the call is written could not be read",
        }[self.why]
        if self.samples:
            return f"{reason}; the same inputs come several times in a row, as for samples"
        return f"{reason}; it drops entries of the model's own inputs" if self.on_input else reason

    @property
    def repair(self) -> str:
        """What to write."""
        if self.why == "no_switch":
            return "dropout_p=self.dropout_p if self.training else 0.0"
        if self.why == "unregistered":
            return "make it once, in __init__, as self.dropout = nn.Dropout(p) (or in an nn.ModuleList), and call that"
        return f"F.{self.function}(x, p, training=self.training)"


class DropoutInEvaluation(WatchingMode):
    """Notes each dropout that acts inside a module in evaluation mode, in a run that is made in its ``contexts``.

    Of a pass with gradients it is known after the run only whether it evaluates: ask ``found`` or ``between`` then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._passes = 0
        self._switches = 0
        self._light = False
        self._steps = 0
        self._thread = 0
        self._evaluating: dict[int, weakref.ref[nn.Module]] = {}
        """The modules that were switched to evaluation mode and not back, by identity."""
        self.calls: list[DropoutCall] = []

    @classmethod
    def of(cls, evidence: Evidence) -> DropoutInEvaluation:
        """The watched run made again under this mode; of a run that cannot be repeated, what its instrument saw."""
        found = cls()
        evidence.rerun(contexts=found.contexts)
        return found

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self._on_as_needed(watch))

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        self._thread = threading.get_ident()

        def enter(_module: nn.Module, _args: Any) -> None:
            if threading.get_ident() == self._thread:
                self._passes += self._depth == 0
                self._depth += 1

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if threading.get_ident() == self._thread:
                self._depth = max(0, self._depth - 1)

        hooks = hooked(before_modules(enter), after_modules(leave, always_call=True))
        with super().watching(watch), hooks, patched(nn.Module, "train", self._counted):
            try:
                yield
            finally:
                self._steps = watch.record.steps

    @contextlib.contextmanager
    def _on_as_needed(self, watch: Watch) -> Iterator[None]:
        """The mode, in full density for all calls, and then only while some module is in evaluation mode: it costs as
        much as a small step."""

        def lighten() -> None:
            if not self._light:
                self._light = True
                for _, module in watch.table.named_modules():
                    self._note_mode(module)
            self._put_on_or_off()

        self.put_on()
        watch.at_light_density.append(lighten)
        try:
            yield
        finally:
            self.take_off()

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(module: nn.Module, mode: bool = True) -> Any:
            self._switches += 1
            out = as_caller(original, (module, mode), {})
            self._note_mode(module)
            if self._light and threading.get_ident() == self._thread:
                self._put_on_or_off()
            return out

        return train

    def _note_mode(self, module: nn.Module) -> None:
        key = id(module)
        if module.training:
            self._evaluating.pop(key, None)
        else:
            self._evaluating[key] = weakref.ref(module, lambda _: self._evaluating.pop(key, None))

    def _put_on_or_off(self) -> None:
        if self._evaluating:
            self.put_on_within_fit()
        else:
            self.take_off()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (name in DROPOUTS or name in _WITH_OWN_DROPOUT) and len(self.calls) < _MOST_CALLS:
            p = _acts_with(name, func, args, kwargs)
            if p:
                with self.watch.suspended():
                    self._look(name, p, args[0] if args else next(nested.tensors(kwargs), None))
        return super().call(name, func, args, kwargs)

    def _look(self, name: str, p: float, given: Any) -> None:
        caller = _caller()
        inside = _modules_around()
        dropout = isinstance(inside[0], DROPOUT_MODULES) if inside else False
        modules = inside[1:] if dropout else inside
        if not modules or trains(modules[-1]) or trains(modules[0]):
            return
        if dropout and any(inside[0] is part for part in members.modules(modules[-1])):
            return  # a part of the model that was switched on by itself
        user = _caller(of_users=True) if dropout else caller
        watch, grad = self.watch, torch.is_grad_enabled()
        forward = watch.thread.forward if grad and watch.full and self._depth else None
        if user is None or (grad and forward is None):
            return
        first = not self.calls or self.calls[-1].forward_pass != self._passes or not self._depth
        self.calls.append(
            DropoutCall(
                at=watch.tick(),
                function=name,
                module=watch.table.path_of(modules[0]),
                p=p,
                place=place_of(user.f_code.co_filename, user.f_lineno),
                why="unregistered" if dropout else _why(name, user),
                on_input=_is_given_to_the_model(given, modules[-1]),
                given=digest_of(given) if first else "",
                repeated_rows=first and rows_repeat(given),
                forward_pass=self._passes,
                steps=watch.record.steps,
                switches=self._switches,
                trained_on=forward,
            )
        )

    @property
    def found(self) -> list[ActiveDropout]:
        """What acted in passes that evaluate, by line, in a whole run.

        Once the batches have ended a loop over epochs validates again and again without a step: inputs that come again
        after the last step are samples only where nothing switched the mode in between.
        """
        return self._by_line([call for call in self.calls if _evaluates(call)], self._steps)

    def between(self, start: int, end: int) -> list[ActiveDropout]:
        """The same between two positions in the record (``watch.tick()``), those around one evaluation."""
        return self._by_line([call for call in self.calls if start < call.at < end and _evaluates(call)], -1)

    @staticmethod
    def _by_line(calls: Sequence[DropoutCall], last_step: int) -> list[ActiveDropout]:
        lines: dict[tuple[Place, str], list[DropoutCall]] = {}
        for call in calls:
            lines.setdefault((call.place, call.function), []).append(call)
        samples = _are_samples(calls, last_step)
        return [
            ActiveDropout(
                function=function,
                module=mine[0].module,
                p=max(c.p for c in mine),
                place=place,
                why=mine[0].why,
                calls=len(mine),
                samples=samples,
                on_input=all(c.on_input for c in mine),
            )
            for (place, function), mine in lines.items()
        ]


def _acts_with(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The share that the call drops; 0 where it does not act."""
    if name == _ATTENTION:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return float(p or 0.0)
    given = bound_arguments(func, args, kwargs) | kwargs
    by_position = dict(zip(("input", "p", "train"), args, strict=False))  # torch.dropout has no signature
    p = given.get(_WITH_OWN_DROPOUT.get(name, "p"), by_position.get("p", 0.5))
    acts = given.get("training", given.get("train", by_position.get("train", True)))
    return float(p or 0.0) if acts else 0.0


def _why(name: str, frame: FrameType) -> Why:
    """Whether the call leaves open that it acts in evaluation mode."""
    written = written_call(frame, (name,))
    if written is None or called_name(written) != name or unpacks(written):
        return "unknown"
    if name == _ATTENTION:
        dropped = given_in(written, "dropout_p", 4)
        return "written" if dropped is not None and "training" in names_in(dropped) else "no_switch"
    position = 9 if name == "multi_head_attention_forward" else 2
    keyword = given_in(written, "training", position) or given_in(written, "train", position)
    return "left_out" if keyword is None else "written"


def _caller(*, of_users: bool = False) -> FrameType | None:
    """The nearest frame outside torch and this package; ``of_users``: outside installed code too, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    nearest = None
    while frame is not None:
        rank = layer(frame.f_code.co_filename)
        if rank and not is_stand_in(frame.f_code):
            nearest = nearest or frame
            if rank == 2 or not of_users:
                return frame
        frame = frame.f_back
    return nearest


def _modules_around() -> list[nn.Module]:
    """The modules whose methods are running, the innermost first; a dropout module of torch's that was called too."""
    frame: FrameType | None = sys._getframe(2)
    found: dict[int, nn.Module] = {}
    while frame is not None:
        if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                found.setdefault(id(owner), owner)
        frame = frame.f_back
    return list(found.values())


def _is_given_to_the_model(given: Any, model: nn.Module) -> bool:
    """Whether a tensor is what the model itself was called with.

    Look in the frame of ``Module.__call__``: ``forward`` may have given its arguments' names to other values.
    """
    frame: FrameType | None = sys._getframe(2)
    called_with: list[Any] = []
    while frame is not None:
        code = frame.f_code
        if code.co_flags & inspect.CO_VARARGS and frame.f_locals.get("self") is model:
            first = code.co_argcount + code.co_kwonlyargcount
            called_with = [frame.f_locals.get(name) for name in code.co_varnames[first : first + 2]]
        frame = frame.f_back
    return isinstance(given, torch.Tensor) and any(given is tensor for tensor in nested.tensors(called_with))


def digest_of(given: Any) -> str:
    """Equal for tensors of one shape with equal entries; empty where they cannot be read."""
    if not isinstance(given, torch.Tensor) or not readable(given) or given.layout is not torch.strided:
        return ""
    entries = raw_bytes(given.to(torch.float64))
    return hashlib.sha256(repr(tuple(given.shape)).encode() + entries).hexdigest()


def rows_repeat(given: Any) -> bool:
    """Whether at least half the rows of a tensor repeat others."""
    if not isinstance(given, torch.Tensor) or not readable(given) or given.dim() < 2 or len(given) < 2:
        return False
    rows = given.detach().flatten(1)
    return 2 * len(torch.unique(rows, dim=0)) <= len(rows)


def _evaluates(call: DropoutCall) -> bool:
    return call.trained_on is None or not call.trained_on.answered


def _are_samples(calls: Sequence[DropoutCall], last_step: int) -> bool:
    """Whether a pass is given what the pass before it was given, without a step between, or has its rows repeated."""
    last: dict[Place, tuple[str, int, int]] = {}
    for call in calls:
        if call.given:
            now = (call.given, call.steps, call.switches if call.steps == last_step else -1)
            if last.get(call.place) == now:
                return True
            last[call.place] = now
    return any(call.repeated_rows for call in calls)
