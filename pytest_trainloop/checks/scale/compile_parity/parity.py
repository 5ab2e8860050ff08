"""The eager run, the compiled one, and what tells them apart where they differ: one change at a time."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.scale.compile_parity.asking import answered_no, places_that_ask
from pytest_trainloop.checks.scale.compile_parity.course import Course
from pytest_trainloop.checks.scale.compile_parity.one_run import Made, Runs, Way
from pytest_trainloop.checks.scale.compile_parity.operations import Operations, OwnOperators
from pytest_trainloop.errors import CannotDecide, DoesNotApply, Unreliable, UsageError, UserCodeError
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.compiler_internals import why_no_capture, why_no_generated_code
from pytest_trainloop.runs.float64 import promoting
from pytest_trainloop.wording import share

if TYPE_CHECKING:
    from pytest_trainloop.checks.scale.compile_parity.course import Difference
    from pytest_trainloop.checks.scale.compile_parity.operations import BrokenPromise
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

MARGIN = 10.0
"""Times the rounding of the eager run by which a compiled one must differ where neither is in float64: right ones reach
2 (docs/checks/precision_parity.md)."""

NO_COMPILER = ("CppCompileError", "C++ compile error", "InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")
"""Torch's words where the compiler of the machine fails (no headers, an old device), and not the graph."""

NOT_HERE = ("cuda", "nvidia", "triton", "driver", "xpu", "hip", "mps")
"""Words of exceptions that say what this machine has not, and nothing of the loop."""

FLOAT32 = 1e-6
"""Relative: what a number may change by where it is kept in a tensor of single precision."""

MOST_MODULES = 12
"""Runs that look for the module, at most."""


def compile_knob(evidence: Evidence) -> str:
    """The user's keyword that switches compiling on or off.

    Raises ``DoesNotApply`` where there is none, or where its values name kinds of compiling.
    """
    name = evidence.knobs.get("compile")
    if name is None:
        raise DoesNotApply("the function has no knob compile=; give it the keyword default compile=False")
    parameters = inspect.signature(evidence.make).parameters
    if name in parameters and not isinstance(parameters[name].default, (bool, int)):
        raise CannotDecide(f"the default of {name} is no True or False, so that it is not varied", needs="compile=")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A cause, with what was seen of it."""

    cause: str
    difference: Difference | None = None
    raised: Raised | None = None
    stage: str = ""
    """The first of "capture", "autograd" and "code" that changes the result."""
    module: str = ""
    """The innermost module that, compiled alone, differs as well."""
    broken: BrokenPromise | None = None
    options: tuple[tuple[str, str, Any, Any], ...] = ()
    """Parameter, option, its value in the eager run and in the compiled one."""
    not_loaded: tuple[str, tuple[str, ...]] = ("", ())
    """Line, and the parameters that it left as they were."""
    asked: str = ""
    """The line that asks whether it is compiled."""


class Parity:
    """The runs behind ``compile_parity``; ``backend`` takes the place of the loop's own."""

    def __init__(self, evidence: Evidence, backend: str | None = None) -> None:
        self.knob = compile_knob(evidence)
        if why := why_no_capture():
            raise CannotDecide(f"torch.compile cannot run here: {why}")
        seen = evidence.run()
        if seen.raised is not None:
            raise CannotDecide(f"fit raises {seen.raised.summary} before anything is compared")
        self._runs = Runs(evidence, self.knob)
        self._double = self._random = True
        self._bare = False
        self._operations = Operations()
        self.eager = self._eager()
        if not self.eager.course.moments:
            raise CannotDecide("no step of a torch optimizer was seen: there are no gradients to compare")
        self._instead = "" if backend else why_no_generated_code(self.eager.device)
        backend = "aot_eager" if self._instead else backend
        self._own = Way(compiled=True, backend=backend, everywhere=bool(backend))
        try:
            self.compiled = self._made(self._own)
        except CannotDecide:
            if not self._made_bare():
                raise
        self.verdict = self._verdict()
        if self.verdict is None and self.compiled.calls and self._made_bare():
            self.verdict = self._verdict()

    def _made_bare(self) -> bool:
        """Both runs once more, built under no mode, where the loop calls what it compiles while it is built: a
        compiler leaves out what runs under one."""
        if not self._double or self._bare:
            return False
        try:
            if not self._runs.compiles_in_building(self._own):
                return False
            self._bare = True
            self.eager = self._eager()
            self.compiled = self._made(self._own)
        except (CannotDecide, UserCodeError, UsageError):
            self._bare = False
            return False
        return True

    @property
    def precision(self) -> str:
        return str(self._operations.lowest).removeprefix("torch.")

    @property
    def bound(self) -> float:
        """Relative: rounding of the lowest precision seen."""
        return ROUNDING * float(torch.finfo(self._operations.lowest).eps)

    @property
    def ran_compiled(self) -> bool:
        """Whether anything that was compiled was run."""
        traced = any(call.how != "torch.compile" and not call.dropped for call in self.compiled.calls)
        return traced or bool(self.compiled.compilations or self.compiled.breaks or self.compiled.built_compiling)

    def require_compared(self) -> None:
        """Raise ``CannotDecide`` where nothing was compiled, or not by the loop's own backend."""
        if not self.ran_compiled and all(call.dropped for call in self.compiled.calls):
            called = "was called, and what it returned was dropped" if self.compiled.calls else "was not called"
            accelerator = "; an Accelerator made before keeps its dynamo_backend: use adapters.fresh_accelerator"
            raise CannotDecide(
                f"with {self.knob}=True nothing was compiled: torch.compile {called} (it may be on another device only"
                f"{accelerator if 'accelerate' in sys.modules else ''})",
                needs="compile=",
            )
        if self.bound >= 1.0:
            raise CannotDecide(
                f"the loop computes in {self.precision} also where float64 is asked for: its rounding hides what a "
                "compiler may change"
            )
        if self.compiled.course.compared == 0:
            raise CannotDecide(
                f"with {self.knob}=True no step of an optimizer was seen, and more than one is made for each batch, or "
                "none: torch calls no hooks where a step is compiled"
            )

    def require_generated_code(self) -> None:
        """Raise ``CannotDecide`` where the loop's own backend could not be tried."""
        if self._instead:
            raise CannotDecide(
                f"inductor could not be tried: {self._instead}. With aot_eager, which generates no code, the compiled "
                "loop trains as the eager one does"
            )

    def _eager(self) -> Made:
        """In float64, or in the loop's own precision where it raises in float64 without a mode; without a look at its
        operations where it raises under one. What these draw, and how precise they are, is not known then."""
        refusal = ""
        for double, seen in ((True, True), (True, False), (False, True), (False, False)):
            if double > self._double:
                continue
            operations = Operations() if seen else Operations.unknown()
            around = (lambda loop: operations) if seen else (lambda loop: contextlib.nullcontext())  # noqa: B023
            try:
                way = Way(compiled=False, double=double, random=self._random, bare=self._bare)
                made = self._runs.make(way, Course(), around)
            except (UserCodeError, UsageError) as error:
                refusal = refusal or str(error)
                continue
            if made.raised is None:
                self._double, self._operations = double, operations
                return made
            refusal = refusal or f"fit raised {made.raised.summary}"
        raise CannotDecide(f"without compiling, in a run of this check, {refusal}")

    def _made(self, way: Way, around: Any = lambda loop: contextlib.nullcontext(), bound: float | None = None) -> Made:
        way = replace(way, double=way.double and self._double, random=self._random, bare=self._bare)
        course = Course(self.bound if bound is None else bound, self.eager.course)
        try:
            return self._runs.make(way, course, around)
        except (UserCodeError, UsageError) as refusal:
            raise CannotDecide(f"with {self.knob}={way.compiled} the loop could not be run: {refusal}") from refusal

    def _verdict(self) -> Verdict | None:
        """None where the compiled loop trains as the eager one does."""
        made, course = self.compiled, self.compiled.course
        if made.raised is not None:
            return self._refused(made.raised)
        if self._result_dropped():
            return Verdict(cause="result_dropped")
        apart = course.difference
        if made.parted and apart is not None and apart.without:
            return Verdict(cause="copy_compiled", difference=apart)
        if options := self._options_apart():
            wrapped = any("_orig_mod." in name for name in course.names)
            cause = "prefix_hides_parameters" if wrapped else "other_computation"
            return Verdict(cause=cause, difference=apart, options=options)
        if made.not_loaded[1] and not self._made(Way(compiled=True, eager=True)).not_loaded[1]:
            return Verdict(cause="prefix_hides_parameters", not_loaded=made.not_loaded)
        if course.not_alike:
            raise CannotDecide(
                f"with {self.knob}=True the loop has other parameters than without, so that they cannot be compared: "
                f"{course.not_alike}"
            )
        return None if apart is None else self._narrowed(apart)

    def _refused(self, raised: Raised) -> Verdict | None:
        """Of a compiled loop that raises: it must do so in its own precision as well, and not where nothing is
        compiled."""
        eager = self._made(Way(compiled=True, eager=True))
        if eager.raised is not None:
            if self._raises_by_itself(eager.raised):
                return Verdict(cause="other_computation", raised=eager.raised)
            raise CannotDecide(
                f"with {self.knob}=True fit raises {eager.raised.summary}, also where torch.compile stands aside"
            )
        if by_wrapper := self._because_of_the_wrapper(raised):
            return Verdict(cause=by_wrapper, raised=raised)
        if not self._instead and any(word in f"{raised.summary} {raised.message}" for word in NO_COMPILER):
            self._instead = raised.summary[:200]
            self._own = replace(self._own, backend="aot_eager", everywhere=True)
            self.compiled = self._made(self._own)
            return self._verdict()
        if self._double:  # in the loop's own precision, then
            self._double = False
            self.eager = self._eager()
            self.compiled = self._made(self._own)
            return self._verdict()
        cause = "operator_misdeclared" if (broken := self._misdeclared()) is not None else "compiling_raises"
        return Verdict(cause=cause, raised=raised, broken=broken)

    def _raises_by_itself(self, raised: Raised) -> bool:
        """Whether torch refuses what the loop does with the knob on, in its own precision as well: not the machine,
        and not a statement of the project's that raises."""
        said = f"{raised.summary} {raised.message}".lower()
        if not self.compiled.refused_by_torch or any(word in said for word in NOT_HERE):
            return False
        own = [self._made(Way(compiled=c, eager=c, double=False), bound=1.0).raised for c in (True, False)]
        return own[0] is not None and own[0].summary == raised.summary and own[1] is None

    def _result_dropped(self) -> bool:
        if not self.compiled.calls or self.ran_compiled:
            return False
        calls = self._made(replace(self._own, collected=True)).calls
        return any(call.trains for call in calls) and all(call.dropped for call in calls)

    def _options_apart(self) -> tuple[tuple[str, str, Any, Any], ...]:
        mine, other = self.eager.course.options, self.compiled.course.options
        found: list[tuple[str, str, Any, Any]] = []
        for name in dict.fromkeys((*mine, *other)):
            if name in mine and name in other:
                found += [(name, o, value, other[name].get(o)) for o, value in mine[name].items()]
            elif self.eager.course.held_from_start and self.compiled.course.held_from_start:
                found.append((name, "in an optimizer", name in mine, name in other))
        return tuple((name, option, value, its) for name, option, value, its in found if not _same(value, its))

    def _narrowed(self, apart: Difference) -> Verdict | None:
        """The cause of a difference, by one change at a time."""
        if self._operations.draws:
            without = self._apart_without_dropout()
            if without is None:
                return None
            apart = without
        self._require_repeatable()
        if self._operations.draws:
            if self._draws_again():
                return Verdict(cause="drawn_again", difference=apart)
            raise CannotDecide(
                f"the loop draws random numbers ({self.drawn}), which a compiled loop may draw in another order: draw "
                "them before what is compiled, and pass them in, to have the two compared"
            )
        self._require_more_than_rounding(apart)
        as_written = self._made(Way(compiled=True, eager=True)).course.difference
        if as_written is not None:
            return Verdict(cause="other_computation", difference=as_written)
        if by_wrapper := self._because_of_the_wrapper():
            return Verdict(cause=by_wrapper, difference=apart)
        stale = apart.step > 0 or self.compiled.built_compiling
        if stale and self._made(replace(self._own, anew=True)).course.difference is None:
            return Verdict(cause="stale_value", difference=apart)
        stage, way = self._stage()
        if stage == "capture" and (asked := self._asks_whether_compiled()):
            return Verdict(cause="asks_whether_compiled", difference=apart, asked=asked)
        if stage != "capture" and (broken := self._misdeclared()) is not None:
            return Verdict(cause="operator_misdeclared", difference=apart, stage=stage, broken=broken)
        cause = {"capture": "capture_differs", "autograd": "traced_backward_differs", "code": "generated_code_differs"}
        return Verdict(cause=cause[stage], difference=apart, stage=stage, module=self._module(way))

    def _because_of_the_wrapper(self, raised: Raised | None = None) -> str:
        """The cause, where the loop differs, or raises the same, with torch's wrapper around the model and nothing
        compiled; else empty."""
        if not self.compiled.calls:
            return ""
        wrapped = self._made(Way(compiled=True, wrapped=True))
        alike = None if wrapped.raised is None or raised is None else wrapped.raised.summary == raised.summary
        if not (alike if wrapped.raised is not None else wrapped.course.difference is not None):
            return ""
        named = self._made(Way(compiled=True, wrapped=True, plain_names=True))
        by_names = named.raised is None and named.course.difference is None
        return "prefix_hides_parameters" if by_names else "wrapper_changes"

    def _asks_whether_compiled(self) -> str:
        """The line that asks torch whether it is compiled, where the loop trains as the eager one once it is told that
        it is not."""
        places: dict[str, None] = {}
        self._made(Way(compiled=False), lambda loop: places_that_ask(places))
        if not places:
            return ""
        told = self._made(self._own, lambda loop: answered_no())
        return next(iter(places)) if told.raised is None and told.course.difference is None else ""

    def _misdeclared(self) -> BrokenPromise | None:
        """The first operator of the project's own that does something else than it declares."""
        operators = OwnOperators()
        self._made(Way(compiled=False), lambda loop: operators)
        return operators.broken

    def _apart_without_dropout(self) -> Difference | None:
        """The two runs once more without dropout: a compiler need not draw in the same order."""
        self._random = False
        self.eager = self._eager()
        compiled = self._made(self._own)
        if compiled.raised is not None:
            raise CannotDecide("without dropout fit raises, and with it the compiled loop draws other numbers")
        return compiled.course.difference

    @property
    def drawn(self) -> str:
        """The operations that draw."""
        return ", ".join(list(self._operations.draws)[:3])

    def _draws_again(self) -> bool:
        """Whether each later step draws once it is compiled, and none does without: not in another order, but more."""
        without = self.eager.course.drew[1:]
        compiled = self._made(self._own, bound=math.inf).course.drew[1:]
        return len(without) > 1 and len(compiled) > 1 and all(compiled) and not any(without)

    def _require_repeatable(self) -> None:
        if self._made(Way(compiled=False)).course.difference is not None:
            raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")

    def _require_more_than_rounding(self, apart: Difference) -> None:
        """Of a loop that computes below float64: the same loop in float64 shows what rounding alone changes."""
        if self._operations.lowest is torch.float64:
            return
        wide = Way(compiled=False, random=self._random)
        try:
            course = Course(0.0, self.eager.course)
            self._runs.make(wide, course, lambda loop: promoting())
        except (UserCodeError, UsageError):
            return
        rounding = course.difference.found.difference if course.difference is not None else 0.0
        if not apart.found.difference > MARGIN * rounding:
            raise CannotDecide(
                f"the compiled loop differs by {share(apart.found.difference)} from the eager one, and rounding to "
                f"{self.precision} alone changes {share(rounding)} of the gradient"
            )

    def _stage(self) -> tuple[str, Way]:
        """What changes the result first, with the way that shows it."""
        for stage, backend in (("capture", "eager"), ("autograd", "aot_eager")):
            way = replace(self._own, backend=backend, everywhere=not self.compiled.calls)
            made = self._made(way)
            if made.raised is None and made.course.difference is not None:
                return stage, way
        return "code", self._own

    def _module(self, way: Way) -> str:
        """The innermost module that, compiled alone, differs from the eager run as well: the first in the order of
        their registration. Empty where none does."""
        backend = way.backend or next((call.backend for call in self.compiled.calls), None)
        path, left = "", MOST_MODULES
        while True:
            inside = self._inside(path)[:left]
            left -= len(inside)
            alone = (name for name in inside if self._differs(replace(way, backend=backend, alone=name)))
            found = next(alone, None)
            if found is None:
                return path
            path = found

    def _differs(self, way: Way) -> bool:
        made = self._made(way)
        return made.raised is None and made.course.difference is not None

    def _inside(self, path: str) -> list[str]:
        """The modules below one that hold parameters of their own or of others, by their plain names."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in self.eager.course.start)
        depth = path.count(".") + 2 if path else 1
        below = dict.fromkeys(".".join(name.split(".")[:depth]) for name in names if name)
        return [name for name in below if (not path or name.startswith(f"{path}.")) and name != path]


def _same(value: Any, its: Any) -> bool:
    """Whether two options are equal; a rate in a tensor is rounded."""
    if isinstance(value, tuple) and isinstance(its, tuple):
        return len(value) == len(its) and all(map(_same, value, its))
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (value, its))
    return math.isclose(value, its, rel_tol=FLOAT32) if numbers else bool(value == its)
