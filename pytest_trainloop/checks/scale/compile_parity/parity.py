"""The eager run, the compiled one, and why they differ: one change at a time."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.scale.compile_parity import causes
from pytest_trainloop.checks.scale.compile_parity.causes import found
from pytest_trainloop.checks.scale.compile_parity.compared import PREFIX, Operations, StepTrace, restored
from pytest_trainloop.checks.scale.compile_parity.runs import Way, asking, compiles_in_building, make
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply, Unreliable, UsageError, UserCodeError
from pytest_trainloop.core.wording import direction, filled, share, some, verb
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.recording.compiler_internals import recompile_limit, why_no_capture, why_no_generated_code
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.runs.float64 import promoting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.scale.compile_parity.compared import Difference
    from pytest_trainloop.checks.scale.compile_parity.runs import Made
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.compiler_internals import Compilation
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

MARGIN = 10.0
"""Times the rounding of the eager run by which a compiled one must differ where neither is in float64: right ones reach
2 (docs/checks/precision_parity.md)."""

NO_COMPILER = ("CppCompileError", "C++ compile error", "InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")
"""Torch's words where the compiler of the machine fails (no headers, an old device), and not the graph."""

NOT_HERE = ("cuda", "nvidia", "triton", "driver", "xpu", "hip", "mps")
"""Words of exceptions that say what this machine does not have, and nothing about the loop."""

FLOAT32 = 1e-6
"""Relative: what a number may change by where it is kept in a tensor of single precision."""

MOST_MODULES = 12
"""Runs that look for the module, at most."""

SETTLED = 2
"""Steps after which a function is compiled no more: for the first shape, and for shapes that vary."""

MOST_LINES = 3
"""Lines that are named, at most."""

NECESSARY = ("backward", "optimizer", "zero_grad")
"""Words in torch's reasons for breaks that a compiled training step cannot avoid."""

_TRACED_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


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


class Parity:
    """The runs behind ``compile_parity``; ``backend`` takes the place of the loop's own."""

    def __init__(self, evidence: Evidence, backend: str | None = None) -> None:
        self.knob, self._evidence = compile_knob(evidence), evidence
        if why := why_no_capture():
            raise CannotDecide(f"torch.compile cannot run here: {why}")
        seen = evidence.run()
        if seen.raised is not None:
            raise CannotDecide(f"fit raises {seen.raised.summary} before anything is compared")
        self._double = self._random = True
        self._bare = False
        self._operations = Operations()
        self.eager = self._made_eager()
        if not self.eager.trace.moments:
            raise CannotDecide("no step of a torch optimizer was seen: there are no gradients to compare")
        self._instead = "" if backend else why_no_generated_code(self.eager.device)
        backend = "aot_eager" if self._instead else backend
        self._own = Way(backend=backend, everywhere=bool(backend))
        try:
            self.compiled = self._made(self._own)
        except CannotDecide:
            if not self._made_bare():
                raise
        self.fault = self._fault()
        if self.fault is None and self.compiled.calls and self._made_bare():
            self.fault = self._fault()

    def _fault(self) -> Finding | None:
        """None where the compiled loop trains as the eager one does. Experiments come in the order of their cost."""
        made, eager, names = self.compiled, self.eager, tuple[str, ...]()
        differs, facts = made.trace.difference, dict[str, Any]()
        if made.raised is not None:
            return self._raises(made.raised)
        if made.calls and not self._ran_compiled:
            calls = self._made(replace(self._own, collected=True)).calls
            if any(call.trains for call in calls) and all(call.dropped for call in calls):
                facts = {"variant": "dropped", "calls": len(made.calls), "change": self._place}
                return self._found("never_runs", (f"{made.calls[0].how}()",), **facts)
        if made.own_parameters and differs is not None and differs.without:
            return self._found("copy_compiled", differs.without, differs)
        if options := self._other_options():
            names = tuple(dict.fromkeys(name for name, *_ in options))
            said = [f"{name}: {o} {mine!r} without compiling, {its!r} with it" for name, o, mine, its in options[:2]]
            said += [f"and {len(options) - 2} more"] if len(options) > 2 else []
            prefixed = any(PREFIX in name for name in made.trace.names)
            measured, cause = "; ".join(said), "prefix_hides_parameters" if prefixed else "other_computation"
            return self._found(cause, names, variant="options", measured=measured, several=len(names) > 1)
        line, names = made.not_loaded
        if names and not self._made(Way(disabled=True)).not_loaded[1]:
            measured = f"{len(names)} of the loaded tensors have other values than the state when training begins"
            facts = {"variant": "loading", "where": line, "measured": measured, "several": len(names) > 1}
            return self._found("prefix_hides_parameters", names, **facts)
        if made.trace.not_comparable:
            raise CannotDecide(
                f"with {self.knob}=True the loop has other parameters than without, so that they cannot be compared: "
                f"{made.trace.not_comparable}"
            )
        if differs is None:
            return None

        if self._operations.draws:  # a compiler may draw in another order
            self._random = False
            self.eager = eager = self._made_eager()
            without = self._made(self._own)
            if without.raised is not None:
                raise CannotDecide("without dropout fit raises, and with it the compiled loop draws other numbers")
            differs = without.trace.difference
            if differs is None:
                return None
        if self._made(Way(compiled=False)).trace.difference is not None:
            raise Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")
        if self._operations.draws:
            drew, again = eager.trace.drew[1:], self._made(self._own, bound=math.inf).trace.drew[1:]
            if len(drew) > 1 and len(again) > 1 and all(again) and not any(drew):
                names = tuple(self._drawn.split(", "))
                return self._found("compiled_code_differs", names, differs, variant="draws", drawn=self._drawn)
            raise CannotDecide(
                f"the loop draws random numbers ({self._drawn}), which a compiled loop may draw in another order: draw "
                "them before what is compiled, and pass them in, to have the two compared"
            )
        self._require_more_than_rounding(differs)
        as_written = self._made(Way(disabled=True)).trace.difference
        if as_written is not None:
            return self._found("other_computation", as_written.names, as_written)
        if by_wrapper := self._by_the_wrapper(differs, None):
            return by_wrapper
        late = differs.step > 0
        if (late or made.built_compiling) and self._made(replace(self._own, recompile=True)).trace.difference is None:
            filters = next((call for call in self.compiled.calls if call.filters_guards), None)
            names, line = (("guard_filter_fn",), filters.place) if filters else (differs.names, self._place)
            return self._found("stale_value", names, differs, where=line, early=not late, filtered=bool(filters))
        return self._by_stage(differs)

    def _by_stage(self, differs: Difference) -> Finding:
        """The first backend whose result differs: of the captured graph, of the traced backward pass, or the loop's."""
        variant, way = "generated", self._own
        for stage, backend in (("", "eager"), ("backward", "aot_eager")):
            tried = replace(self._own, backend=backend, everywhere=not self.compiled.calls)
            if self._made(tried).difference is not None:
                variant, way = stage, tried
                break
        if not variant:
            places: dict[str, None] = {}
            self._made(Way(compiled=False), lambda: asking(places))
            if places and self._made(self._own, asking).agrees:
                names, line = ("torch.compiler.is_compiling()",), next(iter(places))
                return self._found("compiled_code_differs", names, differs, variant="asks", where=line)
        elif by_operator := self._by_operator(differs):
            return by_operator
        module = self._module(way)
        culprits = (module,) if module else differs.names
        return self._found("compiled_code_differs", culprits, differs, variant=variant, module=module)

    def _raises(self, raised: Raised) -> Finding | None:
        """Of a compiled loop that raises: it must do so in its own precision too, and not where nothing is compiled."""
        disabled = self._made(Way(disabled=True)).raised
        if disabled is not None:
            said = f"{disabled.summary} {disabled.message}".lower()
            # what torch refuses with the knob on, in the loop's own precision too: not the machine, and not a statement
            # of the project that raises
            if self.compiled.refused_by_torch and not any(word in said for word in NOT_HERE):
                ways = [Way(compiled=knob, disabled=knob, double=False) for knob in (True, False)]
                on, off = (self._made(way, bound=1.0).raised for way in ways)
                if on is not None and on.summary == disabled.summary and off is None:
                    facts = {"variant": "refused", "raised": disabled.summary, "where": self._where(disabled)}
                    return self._found("other_computation", (f"{self.knob}=True",), **facts)
            raise CannotDecide(
                f"with {self.knob}=True fit raises {disabled.summary}, also where torch.compile is disabled"
            )
        if by_wrapper := self._by_the_wrapper(None, raised):
            return by_wrapper
        if not self._instead and any(word in f"{raised.summary} {raised.message}" for word in NO_COMPILER):
            self._instead = raised.summary[:200]
            self._own = replace(self._own, backend="aot_eager", everywhere=True)
            self.compiled = self._made(self._own)
            return self._fault()
        if self._double:  # in the loop's own precision, then
            self._double = False
            self.eager, self.compiled = self._made_eager(), self._made(self._own)
            return self._fault()
        if by_operator := self._by_operator(None, measured=f"compiled, fit raises {raised.summary[:160]}"):
            return by_operator
        traced = [(m["file"], int(m["line"])) for m in _TRACED_LINE.finditer(raised.message)]
        own = [at for at in traced if layer(at[0]) == 2]  # the line that the compiler was at, which it gives as text
        facts = {"raised": raised.summary, "where": str(place_of(*own[-1])) if own else self._where(raised)}
        facts["measured"] = filled(causes.STEPS_MADE, {"made": len(self.compiled.trace.moments)})
        return self._found("compiling_raises", ("torch.compile()",), **facts)

    def _by_the_wrapper(self, differs: Difference | None, raised: Raised | None) -> Finding | None:
        """Where the loop differs, or raises the same, with torch's wrapper around the model and nothing compiled."""
        if not self.compiled.calls:
            return None
        wrapped = self._made(Way(wrapped=True))
        same = raised is not None and wrapped.raised is not None and wrapped.raised.summary == raised.summary
        if not (same if wrapped.raised is not None else wrapped.difference is not None):
            return None
        names = differs.names if differs is not None else ()
        facts: dict[str, Any] = {"does": f"{some(names)} {verb(names, 'train')} differently"}
        if raised is not None:
            facts = {"does": f"fit raises {raised.summary}", "where": self._where(raised)}
        if self._made(Way(wrapped=True, plain_names=True)).agrees:
            return self._found("prefix_hides_parameters", names or tuple(self.eager.trace.start), differs, **facts)
        return self._found("wrapper_changes", (self.compiled.calls[0].what,), differs, **facts)

    def _found(self, cause: str, names: tuple[str, ...], differs: Difference | None = None, /, **facts: Any) -> Finding:
        call = self.compiled.calls[0] if self.compiled.calls else None
        facts = {
            "knob": self.knob,
            "how": call.how if call else "",
            "what": call.what if call else "model",
            "module": "",
            "made": len(self.compiled.trace.moments),
            "compared": self.compiled.trace.compared,
            "precision": self._precision,
            **facts,
        }
        if differs is not None:
            facts |= {"step": differs.step + 1, "part": differs.part, "tensors": len(differs.names)}
            facts |= {"difference": differs.found.difference, "direction": direction(differs.found.cosine)}
            facts["limit"] = self._bound
        measured = causes.COMPARED if differs is None else causes.DIFFER
        facts = {"measured": filled(measured, facts), **facts}
        return found(cause, facts.pop("where", self._place), names, **facts)

    def _other_options(self) -> list[tuple[str, str, Any, Any]]:
        """Parameter, option, its value in the eager run and in the compiled one."""
        one, two = self.eager.trace, self.compiled.trace
        options: list[tuple[str, str, Any, Any]] = []
        for name in dict.fromkeys((*one.options, *two.options)):
            if name in one.options and name in two.options:
                options += [(name, o, value, two.options[name].get(o)) for o, value in one.options[name].items()]
            elif one.held_from_start and two.held_from_start:
                options.append((name, "in an optimizer", name in one.options, name in two.options))
        return [(name, option, value, its) for name, option, value, its in options if not _same(value, its)]

    def _by_operator(self, differs: Difference | None, **facts: Any) -> Finding | None:
        """Where an operator of the project does something that it does not declare: the first one."""
        operators = Operations(own=True)
        self._made(Way(compiled=False), lambda: operators)
        if operators.broken is None:
            return None
        name, writes, said, where = operators.broken
        return self._found(
            "operator_misdeclared", (name,), differs, name=name, writes=writes, said=said, where=where, **facts
        )

    def _require_more_than_rounding(self, differs: Difference) -> None:
        """Of a loop that computes below float64: the same loop in float64 shows what rounding alone changes."""
        if self._operations.lowest is torch.float64:
            return
        trace = StepTrace(0.0, self.eager.trace)
        try:
            make(self._evidence, self.knob, Way(compiled=False, random=self._random), trace, promoting)
        except (UserCodeError, UsageError):
            return
        difference = differs.found.difference
        rounding = trace.difference.found.difference if trace.difference is not None else 0.0
        if not difference > MARGIN * rounding:
            raise CannotDecide(
                f"the compiled loop differs by {share(difference)} from the eager one, and rounding to "
                f"{self._precision} alone changes {share(rounding)} of the gradient"
            )

    def _module(self, way: Way) -> str:
        """The innermost module that, compiled alone, differs from the eager run too: the first in the order of their
        registration. Empty where none does."""
        backend = way.backend or next((call.backend for call in self.compiled.calls), None)
        names = [name for name in dict.fromkeys(n.rpartition(".")[0] for n in self.eager.trace.start) if name]
        path, left = "", MOST_MODULES
        while True:
            depth = path.count(".") + 2 if path else 1
            below = dict.fromkeys(".".join(name.split(".")[:depth]) for name in names)
            inside = [n for n in below if (not path or n.startswith(f"{path}.")) and n != path][:left]
            left -= len(inside)
            alone = (replace(way, backend=backend, alone=name) for name in inside)
            inner = next((one.alone for one in alone if self._made(one).difference is not None), None)
            if inner is None:
                return path
            path = inner

    def _made_eager(self) -> Made:
        """In float64, or in the loop's own precision where it raises in float64 without a mode; without a look at its
        operations where it raises under one: single precision and random numbers are expected then."""
        refusal = ""
        for double, seen in ((True, True), (True, False), (False, True), (False, False)):
            if double > self._double:
                continue
            operations = Operations()
            if not seen:
                operations.lowest, operations.draws = torch.float32, {"unknown": None}
            way = Way(compiled=False, double=double, random=self._random, bare=self._bare)
            around: Any = (lambda: operations) if seen else contextlib.nullcontext  # noqa: B023
            try:
                made = make(self._evidence, self.knob, way, StepTrace(), around)
            except (UserCodeError, UsageError) as error:
                refusal = refusal or str(error)
                continue
            if made.raised is None:
                self._double, self._operations = double, operations
                return made
            refusal = refusal or f"fit raised {made.raised.summary}"
        raise CannotDecide(f"without compiling, in a run of this check, {refusal}")

    def _made(self, way: Way, around: Any = contextlib.nullcontext, bound: float | None = None) -> Made:
        way = replace(way, double=way.double and self._double, random=self._random, bare=self._bare)
        trace = StepTrace(self._bound if bound is None else bound, self.eager.trace)
        try:
            return make(self._evidence, self.knob, way, trace, around)
        except (UserCodeError, UsageError) as refusal:
            raise CannotDecide(f"with {self.knob}={way.compiled} the loop could not be run: {refusal}") from refusal

    def _made_bare(self) -> bool:
        """Both runs once more, built under no mode, where the loop calls what it compiles while it is built: a
        compiler ignores what runs under one."""
        if not self._double or self._bare:
            return False
        try:
            if not compiles_in_building(self._evidence, self.knob, self._own):
                return False
            self._bare = True
            self.eager = self._made_eager()
            self.compiled = self._made(self._own)
        except (CannotDecide, UserCodeError, UsageError):
            self._bare = False
            return False
        return True

    @property
    def _precision(self) -> str:
        return str(self._operations.lowest).removeprefix("torch.")

    @property
    def _bound(self) -> float:
        """Relative: rounding of the lowest precision seen."""
        return ROUNDING * float(torch.finfo(self._operations.lowest).eps)

    @property
    def _place(self) -> str:
        """The line that compiles."""
        return self.compiled.calls[0].place if self.compiled.calls else ""

    def _where(self, raised: Raised) -> str:
        return str(raised.place) if raised.place.file else self._place

    @property
    def _drawn(self) -> str:
        return ", ".join([*self._operations.draws][:3])

    @property
    def _ran_compiled(self) -> bool:
        """Whether anything that was compiled was run."""
        traced = any(call.how != "torch.compile" and not call.dropped for call in self.compiled.calls)
        return traced or bool(self.compiled.compilations or self.compiled.breaks or self.compiled.built_compiling)

    def require_compared(self) -> None:
        """Raise ``CannotDecide`` where nothing was compiled, or nothing could be compared."""
        if not self._ran_compiled and all(call.dropped for call in self.compiled.calls):
            called = "was called, and its result was freed" if self.compiled.calls else "was not called"
            accelerator = "; an Accelerator made before keeps its dynamo_backend: use adapters.fresh_accelerator"
            raise CannotDecide(
                f"with {self.knob}=True nothing was compiled: torch.compile {called} (perhaps on another device only"
                f"{accelerator if 'accelerate' in sys.modules else ''})",
                needs="compile=",
            )
        if self._bound >= 1.0:
            raise CannotDecide(
                f"the loop computes in {self._precision} also where float64 is asked for: its rounding hides what a "
                "compiler may change"
            )
        if self.compiled.trace.compared == 0:
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

    def advice(self) -> Iterator[Finding]:
        """Of a loop that trains the same compiled: graph breaks, and functions that are compiled again and again."""
        made, advice = self.compiled, {"level": "advice"}
        if made.calls and not self._ran_compiled:
            yield self._found("never_runs", (f"{made.calls[0].how}()",), calls=len(made.calls), **advice)
        breaks = [(one, _line(one.stack)) for one in made.breaks]
        breaks = [
            (one, line)
            for one, line in breaks
            if not any(word in one.reason.lower() or f"{word}(" in line for word in NECESSARY)
        ]
        # those in the project's own code; where there are none, those in libraries other than torch
        own = [(one, line) for one, line in breaks if any(layer(file) == 2 for file, _ in one.stack)]
        reasons: dict[str, str] = {}
        for one, line in own or [pair for pair in breaks if pair[1]]:
            reasons.setdefault(line, f"{one.reason[0].lower()}{one.reason[1:]}")
        facts = {"breaks": len(made.breaks), "lines": len(reasons), "several": len(reasons) > 1, **advice}
        for line, reason in list(reasons.items())[:MOST_LINES]:
            yield self._found("graph_breaks", ("torch.compile()",), where=line, reason=reason, **facts)
        again: dict[tuple[str, str], list[tuple[int, Compilation]]] = {}
        for step, new in made.compilations:
            if new.again and step >= SETTLED:
                name = new.function.removeprefix("torch_dynamo_resume_in_").partition("_at_")[0]
                again.setdefault((new.file, name), []).append((step, new))
        for (_, name), compiled in list(again.items())[:MOST_LINES]:
            steps, new = sorted({step for step, _ in compiled}), compiled[0][1]
            if len(steps) < 2:
                continue  # the last batch is smaller, or a phase begins
            at = new.at if new.at[0] else (new.file, new.line)
            facts = {"times": str(len(steps)), "steps": ", ".join(str(step + 1) for step in steps), "guard": new.again}
            facts |= {"most": str(recompile_limit()), "where": str(place_of(*at)) if at[0] else self._place, **advice}
            yield self._found("recompilations", (name,), **facts)

    def saved(self) -> Iterator[Finding]:
        """A fault where the compiled loop does not restore what it has saved and the other does; else advice where the
        loop that is not compiled does not restore it: a project may load with compiling only."""
        if not {"save", "load"} <= self._evidence.offers or not self.compiled.calls:
            return
        own = restored(self._evidence, self.knob, saves=True, loads=True)
        other = restored(self._evidence, self.knob, saves=False, loads=False) if own and own.left else None
        if own and other and (left := tuple(name for name in own.left if name not in other.left)):
            facts: dict[str, Any] = {"where": own.place, "change": own.place, "parameters": len(left)}
            yield self._found("checkpoint_not_restored", left, **facts)
            return
        if not any(PREFIX in name for name in self.compiled.trace.names):
            return
        plain = restored(self._evidence, self.knob, saves=True, loads=False, returned=True)
        if plain and plain.prefixed and (plain.left or plain.refused):
            names = plain.left or tuple(plain.prefixed)
            facts = {"keys": str(len(plain.prefixed)), "refused": plain.refused, "several": len(names) > 1}
            facts |= {"variant": "without compiling", "level": "advice"}
            yield self._found("checkpoint_not_restored", names, **facts)


def _line(stack: tuple[tuple[str, int], ...]) -> str:
    """The nearest line of the project's, or of a library; empty where torch's own code alone is in the graph."""
    own = [at for at in stack if layer(at[0]) == 2] or [at for at in stack if layer(at[0]) == 1]
    return str(place_of(*own[-1])) if own else ""


def _same(value: Any, its: Any) -> bool:
    """Whether two options are equal; a learning rate in a tensor is rounded."""
    if isinstance(value, tuple) and isinstance(its, tuple):
        return len(value) == len(its) and all(map(_same, value, its))
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (value, its))
    return math.isclose(value, its, rel_tol=FLOAT32) if numbers else bool(value == its)
