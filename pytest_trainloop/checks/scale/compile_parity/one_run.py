"""One run of the loop that no mode of this package watches, since a compiler refuses what runs under one.

The loop is built in float64, under the mode that makes it so; then the mode is taken off, and ``fit`` runs. What is
seen of it comes from hooks before and after each optimizer step, and from torch's compiler itself.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.checks.scale.compile_parity.compile_calls import CompileCalls
from pytest_trainloop.checks.scale.compile_parity.names import plain_names
from pytest_trainloop.checks.scale.compile_parity.no_dropout import dropout_off
from pytest_trainloop.recording.compiler_internals import (
    Compilation,
    CompilationLog,
    GraphBreak,
    compiled_alone,
    compiling_as_eager,
    graph_breaks,
)
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.mode_stack import modes_kept
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.source import layer
from pytest_trainloop.runs.batch_stream import Batches, generators_kept
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.float64 import double_by_default, promoting, widen
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.user_traceback import raised
from pytest_trainloop.whose import reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.scale.compile_parity.compile_calls import CompileCall
    from pytest_trainloop.checks.scale.compile_parity.course import Course
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

BEYOND = 25
"""Steps after the last one that counts in which a loop may come back by itself; then it is made to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one run is made."""

    compiled: bool
    """The value of the knob."""
    eager: bool = False
    """Whether ``torch.compile`` stands aside."""
    wrapped: bool = False
    """Whether it only puts its wrapper around the model, and compiles nothing."""
    plain_names: bool = False
    """Whether parameters in the wrapper have the names that they have without it."""
    bare: bool = False
    """Whether the loop is built under no mode, since what it compiles is called then already."""
    backend: Any = None
    """In place of the loop's own, where ``torch.compile`` is called."""
    everywhere: bool = False
    """Whether ``backend`` is also that of what was compiled before the loop was built: torch then drops what the calls
    say of guards."""
    double: bool = True
    random: bool = True
    """Whether dropout draws."""
    anew: bool = False
    """Whether everything is compiled again for each step, the first included."""
    alone: str = ""
    """The one module whose calls are compiled, by its plain name, with ``backend``."""
    collected: bool = False
    """Whether garbage is collected before training, which takes half a second."""


@dataclass(slots=True)
class Made:
    """What one run showed."""

    course: Course
    raised: Raised | None
    """What ended ``fit`` before enough was seen."""
    calls: list[CompileCall]
    breaks: list[GraphBreak]
    compilations: list[tuple[int, Compilation]]
    """With the number of the optimizer step in which it was compiled, from 0; of the batch where no hook is called."""
    device: str
    parted: bool = False
    """Whether what was compiled shares no parameter with what the optimizers hold."""
    not_loaded: tuple[str, tuple[str, ...]] = ("", ())
    """The line that loads weights, and the parameters that it left as they were for the prefix of their names alone."""
    refused_by_torch: bool = False
    """Whether torch's own code raised it, and no statement of the project or of a library."""
    built_compiling: bool = False
    """Whether something was compiled while the loop was built."""


class Runs:
    """Makes runs of one loop; ``knob`` is the user's keyword that switches compiling on."""

    def __init__(self, evidence: Evidence, knob: str) -> None:
        self._evidence = evidence
        self._knob = knob

    def make(
        self,
        way: Way,
        course: Course,
        around: Callable[[TrainLoop], contextlib.AbstractContextManager[Any]] = lambda loop: contextlib.nullcontext(),
    ) -> Made:
        """One run of a fresh loop; ``around`` is entered for the time of ``fit``.

        Raises ``UserCodeError`` and ``UsageError`` as ``build`` does, and ``TimeRanOut``.
        """
        with workers_ended():
            try:
                return self._make(way, course, around)
            except Exception as error:
                let_go(error)
                raise
            finally:
                course.end()

    def compiles_in_building(self, way: Way) -> bool:
        """Whether something is compiled while the loop is built, under no mode of this package."""
        plan = self._evidence.plan()
        with workers_ended(), preserved(), modes_kept(), compiling_as_eager(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            torch.set_grad_enabled(True)
            stack.enter_context(CompileCalls(way.backend).noted())
            stack.enter_context(double_by_default() if way.double else contextlib.nullcontext())
            log = CompilationLog()
            build(self._evidence.make, {**plan.knobs, self._knob: True}, plan.seed)
            return bool(log.new())

    def _make(self, way: Way, course: Course, around: Callable[[TrainLoop], Any]) -> Made:
        plan = replace(self._evidence.plan(), knobs={**self._evidence.plan().knobs, self._knob: way.compiled})
        calls = CompileCalls(way.backend, aside=way.eager or bool(way.alone), only_wraps=way.wrapped)
        log = CompilationLog()
        compiled: list[tuple[int, Compilation]] = []
        guard, beyond = Guard(plan.timeout), 0
        with contextlib.ExitStack() as stack:
            for context in (preserved(), modes_kept(), compiling_as_eager(), calls.noted()):
                stack.enter_context(context)
            warnings.simplefilter("ignore")  # they were shown in the watched run
            torch.set_grad_enabled(True)
            if way.double:
                stack.enter_context(double_by_default())
            if way.plain_names:
                stack.enter_context(plain_names())
            with promoting() if way.double and not way.bare else contextlib.nullcontext():
                kept = None if plan.kept is None else plan.kept.of(plan.seed, plan.knobs, double=way.double)
                loop = build(self._evidence.make, plan.knobs, plan.seed, kept)
                if way.double:
                    widen(loop)

                def before_batch(number: int, batch: Any) -> None:
                    if number and not course.moments:
                        compiled.extend((number - 1, one) for one in log.new())
                    course.at_batch(number, batch)

                batches = _batches(loop, way, plan, course, guard, before_batch)
                batches.draw(plan.count)
            built_compiling = bool(log.new())
            calls.look(_parameters(loop), collected=way.collected)
            not_loaded = calls.loads.left()
            course.begin(loop)
            stack.enter_context(generators_kept(loop))
            stack.enter_context(contextlib.closing(batches))
            stack.enter_context(torch.compiler.set_stance(**_stance(way)))
            if not way.random:
                stack.enter_context(dropout_off(loop))
            if way.alone:
                stack.enter_context(compiled_alone(_module(loop, way.alone), way.backend))
            stack.enter_context(around(loop))

            def before(*step: Any) -> Any:
                nonlocal beyond
                beyond += course.through
                if guard.out_of_time() or beyond > BEYOND:
                    guard.stop()
                return course.before_step(*step)

            def after(*step: Any) -> None:
                compiled.extend((len(course.moments) - 1, one) for one in log.new())
                course.after_step(*step)
                if way.anew:
                    torch.compiler.reset()

            stack.enter_context(hooked(before_steps(before), after_steps(after)))
            fit = fit_of(loop)
            if way.anew:
                torch.compiler.reset()
            seed_all(plan.seed)
            error = guard.call(lambda: fit(batches), lambda: len(course.moments), lambda: batches.at_end)
            if error is not None:
                reraise_ours(error)
            compiled.extend((len(course.moments), one) for one in log.new())
            made = Made(
                course=course,
                raised=None if error is None or course.through else raised(error),
                calls=calls.calls,
                breaks=graph_breaks(),
                compilations=compiled,
                device=_device(loop),
                parted=_parted(loop, calls.calls),
                not_loaded=not_loaded,
                refused_by_torch=error is not None and _raised_in_torch(error),
                built_compiling=built_compiling,
            )
            self._evidence.own_steps += len(course.moments)
            let_go(error)
            calls.let_go()
        return made


def _batches(
    loop: TrainLoop, way: Way, plan: Any, course: Course, guard: Guard, before: Callable[[int, Any], None]
) -> Batches:
    return Batches(
        loop,
        plan.count,
        spent=lambda: course.through,
        stepped=lambda: course.compared > 0 or bool(course.moments),
        stop=guard.stop,
        out_of_time=guard.out_of_time,
        read_ahead=plan.read_ahead,
        before=before,
        double=way.double,
    )


def _stance(way: Way) -> dict[str, Any]:
    if way.eager or way.wrapped:
        return {"stance": "force_eager"}
    return {"stance": "default", "force_backend": way.backend if way.everywhere else None}


def _raised_in_torch(error: BaseException) -> bool:
    """What torch raises in C++ ends at the line that calls it."""
    if type(error) is not RuntimeError:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return layer(last.filename) == 0 or not (last.line or "raise").startswith(("raise", "assert"))


def _module(loop: TrainLoop, path: str) -> torch.nn.Module:
    modules: Iterator[tuple[str, torch.nn.Module]] = (
        found for prefix, top in loop.modules.items() for found in members.named_modules(top, prefix=prefix)
    )
    found = [m for name, m in modules if plain(name) == path]
    return found[-1]  # a wrapper comes before what it wraps


def _parameters(loop: TrainLoop) -> Iterator[torch.Tensor]:
    return (parameter for module in loop.modules.values() for parameter in members.parameters(module))


def _device(loop: TrainLoop) -> str:
    kinds = {parameter.device.type for parameter in _parameters(loop)}
    return next(iter(sorted(kinds - {"cpu"})), "cpu")


def _parted(loop: TrainLoop, calls: list[CompileCall]) -> bool:
    held = {id(p) for o in loop.optimizers for g in getattr(o, "param_groups", ()) for p in g["params"]}
    modules = [m for call in calls if isinstance(m := call.given(), torch.nn.Module)]
    inside = {id(p) for module in modules for p in members.parameters(module)}
    return bool(held and inside) and not held & inside
