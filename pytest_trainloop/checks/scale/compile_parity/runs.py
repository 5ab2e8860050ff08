"""One run of the loop that no mode of this package watches: torch compiles nothing under a mode.

The loop is built in float64, under the mode that makes it so; then the mode is removed, and ``fit`` runs. Hooks around
each optimizer step and torch's compiler say what happens in it. One thing is changed in each run (``Way``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from pytest_trainloop.checks.scale.compile_parity.compared import Loads, without_prefix
from pytest_trainloop.core import members
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.recording.compiler_internals import (
    CompilationLog,
    compiled_alone,
    compiling_as_eager,
    graph_breaks,
)
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.mode_stack import modes_kept
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.runs.batch_stream import Batches, generators_kept
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.float64 import double_by_default, promoting, widen
from pytest_trainloop.runs.guard import Guard, let_go
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.loader_workers import workers_ended
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.user_traceback import raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.scale.compile_parity.compared import Difference, StepTrace
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.compiler_internals import Compilation, GraphBreak
    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.runs.evidence import Evidence

    Context = contextlib.AbstractContextManager[Any]

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

BEYOND = 25
"""Steps after the last one that counts in which a loop may return by itself; then it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one run is made."""

    compiled: bool = True
    """The value of the knob."""
    disabled: bool = False
    """Whether ``torch.compile`` returns what it is given."""
    wrapped: bool = False
    """Whether it only puts its wrapper around the model, and compiles nothing."""
    plain_names: bool = False
    """Whether parameters in the wrapper have the names that they have without it."""
    bare: bool = False
    """Whether the loop is built under no mode, since it calls what it compiles already then."""
    backend: Any = None
    """In place of the loop's own, where ``torch.compile`` is called."""
    everywhere: bool = False
    """Whether ``backend`` is also that of what was compiled before the loop was built: torch then ignores what
    the calls say of guards."""
    double: bool = True
    random: bool = True
    """Whether dropout draws."""
    recompile: bool = False
    """Whether everything is compiled again for each step, the first included."""
    alone: str = ""
    """The one module whose calls are compiled, by its plain name, with ``backend``."""
    collected: bool = False
    """Whether garbage is collected before training, which takes half a second."""


@dataclass(slots=True)
class CompileCall:
    """A call of ``torch.compile``, ``torch.jit.trace`` or ``torch.jit.script``."""

    how: str
    what: str
    """What was compiled, in words."""
    place: str
    given: Callable[[], Any]
    """The module that it was given, while it lives."""
    backend: Any = "inductor"
    """A name, or a function."""
    filters_guards: bool = False
    returned: Callable[[], Any] = lambda: None
    dropped: bool = False
    """Whether its result was freed before the loop began to train."""
    trains: bool = False
    """Whether it was given parameters of the loop's."""


@dataclass(slots=True)
class Made:
    """What one run showed."""

    trace: StepTrace
    calls: list[CompileCall]
    raised: Raised | None = None
    """What ended ``fit`` before enough was seen."""
    breaks: list[GraphBreak] = field(default_factory=list)
    compilations: list[tuple[int, Compilation]] = field(default_factory=list)
    """With the number of the optimizer step in which it was compiled, from 0; of the batch where no hook is called."""
    device: str = "cpu"
    own_parameters: bool = False
    """Whether what was compiled shares no parameter with the optimizers."""
    not_loaded: tuple[str, tuple[str, ...]] = ("", ())
    """The line that loads weights, and the parameters that only the prefix of their names keeps from being loaded."""
    refused_by_torch: bool = False
    """Whether torch's own code raised it, and no statement of the project or of a library."""
    built_compiling: bool = False
    """Whether something was compiled while the loop was built."""

    @property
    def difference(self) -> Difference | None:
        """Where it differs from the eager run; None where it raises."""
        return self.trace.difference if self.raised is None else None

    @property
    def agrees(self) -> bool:
        return self.raised is None and self.trace.difference is None


def make(
    evidence: Evidence, knob: str, way: Way, trace: StepTrace, around: Callable[[], Context] = contextlib.nullcontext
) -> Made:
    """One run of a fresh loop; ``knob`` is the user's keyword, ``around`` is entered for the time of ``fit``.

    Raises ``UserCodeError`` and ``UsageError`` as ``build`` does, and ``TimeRanOut``.
    """
    with workers_ended():
        try:
            return _make(evidence, knob, way, trace, around)
        except Exception as error:
            let_go(error)
            raise
        finally:
            trace.end()


def _make(evidence: Evidence, knob: str, way: Way, trace: StepTrace, around: Callable[[], Context]) -> Made:
    plan = replace(evidence.plan(), knobs={**evidence.plan().knobs, knob: way.compiled})
    watched = CompileCalls(way)
    made = Made(trace, watched.calls)
    log, guard, beyond = CompilationLog(), Guard(plan.timeout), 0
    with contextlib.ExitStack() as stack:
        for context in (preserved(), modes_kept(), compiling_as_eager(), watched.noted()):
            stack.enter_context(context)
        warnings.simplefilter("ignore")  # they were shown in the watched run
        torch.set_grad_enabled(True)
        if way.double:
            stack.enter_context(double_by_default())
        if way.plain_names:
            stack.enter_context(plain_names())

        def before_batch(number: int, batch: Any) -> None:
            if number and not trace.moments:
                made.compilations.extend((number - 1, one) for one in log.new())
            trace.at_batch(number, batch)

        with promoting() if way.double and not way.bare else contextlib.nullcontext():
            kept = None if plan.kept is None else plan.kept.of(plan.seed, plan.knobs, double=way.double)
            loop = build(evidence.make, plan.knobs, plan.seed, kept)
            if way.double:
                widen(loop)
            batches = Batches(
                loop,
                plan.count,
                spent=lambda: trace.through,
                stepped=lambda: trace.compared > 0 or bool(trace.moments),
                stop=guard.stop,
                out_of_time=guard.out_of_time,
                read_ahead=plan.read_ahead,
                before=before_batch,
                double=way.double,
            )
            batches.draw(plan.count)
        made.built_compiling = bool(log.new())
        parameters = [p for module in loop.modules.values() for p in members.parameters(module)]
        watched.look(parameters, collected=way.collected)
        made.not_loaded = watched.loads.left()
        trace.begin(loop)
        stack.enter_context(generators_kept(loop))
        stack.enter_context(contextlib.closing(batches))
        eager = way.disabled or way.wrapped
        backend = way.backend if way.everywhere and not eager else None
        stack.enter_context(torch.compiler.set_stance("force_eager" if eager else "default", force_backend=backend))
        if not way.random:
            stack.enter_context(dropout_off(loop))
        if way.alone:
            named = (pair for prefix, top in loop.modules.items() for pair in members.named_modules(top, prefix=prefix))
            inner = [module for name, module in named if plain(name) == way.alone][
                -1
            ]  # a wrapper comes before its module
            stack.enter_context(compiled_alone(inner, way.backend))
        stack.enter_context(around())

        def before(*step: Any) -> Any:
            nonlocal beyond
            beyond += trace.through
            if guard.out_of_time() or beyond > BEYOND:
                guard.stop()
            return trace.before_step(*step)

        def after(*step: Any) -> None:
            made.compilations.extend((len(trace.moments) - 1, one) for one in log.new())
            trace.after_step(*step)
            if way.recompile:
                torch.compiler.reset()

        stack.enter_context(hooked(before_steps(before), after_steps(after)))
        fit = fit_of(loop)
        if way.recompile:
            torch.compiler.reset()
        seed_all(plan.seed)
        error = guard.call(lambda: fit(batches), lambda: len(trace.moments), lambda: batches.at_end)
        if error is not None:
            reraise_ours(error)
            made.raised = None if trace.through else raised(error)
            made.refused_by_torch = _raised_in_torch(error)
        made.compilations.extend((len(trace.moments), one) for one in log.new())
        made.breaks = graph_breaks()
        made.device = next(iter(sorted({p.device.type for p in parameters} - {"cpu"})), "cpu")
        held = {id(p) for o in loop.optimizers for g in getattr(o, "param_groups", ()) for p in g["params"]}
        given = [module for call in made.calls if isinstance(module := call.given(), nn.Module)]
        inside = {id(p) for module in given for p in members.parameters(module)}
        made.own_parameters = bool(held and inside) and not held & inside
        evidence.own_steps += len(trace.moments)
        let_go(error)
        watched.let_go()
    return made


def compiles_in_building(evidence: Evidence, knob: str, way: Way) -> bool:
    """Whether something is compiled while the loop is built, under no mode of this package."""
    plan = evidence.plan()
    with workers_ended(), preserved(), modes_kept(), compiling_as_eager(), CompileCalls(way).noted():
        warnings.simplefilter("ignore")
        torch.set_grad_enabled(True)
        with double_by_default() if way.double else contextlib.nullcontext():
            log = CompilationLog()
            build(evidence.make, {**plan.knobs, knob: True}, plan.seed)
            return bool(log.new())


def _raised_in_torch(error: BaseException) -> bool:
    """What torch raises in C++ ends at the line that calls it."""
    if type(error) is not RuntimeError:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return layer(last.filename) == 0 or not (last.line or "raise").startswith(("raise", "assert"))


class CompileCalls:
    """Notes every call that compiles in its ``with`` block, those of ``Module.compile`` included, which calls
    ``torch.compile``; guards are made as the call asks."""

    def __init__(self, way: Way) -> None:
        self.calls: list[CompileCall] = []
        self.loads = Loads()
        self._way = way

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(torch, "compile", self._compile)
            patches.put(nn.Module, "load_state_dict", self.loads.around)
            for name in ("trace", "script"):
                patches.put(torch.jit, name, functools.partial(self._trace, f"torch.jit.{name}"))
            yield

    def look(self, trained: list[nn.Parameter], *, collected: bool) -> None:
        """Note which results were freed, those in reference cycles only after garbage was ``collected``."""
        if collected:
            gc.collect()
        known = {id(parameter) for parameter in trained}
        for call in self.calls:
            module = call.given()
            call.dropped = call.returned() is None
            call.trains = isinstance(module, nn.Module) and any(id(p) in known for p in members.parameters(module))

    def let_go(self) -> None:
        for call in self.calls:
            call.given = call.returned = lambda: None
        self.loads.not_loaded.clear()

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            if model is None:  # used as a decorator with options
                return lambda function: compile(function, **options)
            call, way = _noted("torch.compile", model, options), self._way
            if way.wrapped:
                options = {**options, "fullgraph": False}
            if way.backend is not None:  # another backend does not know inductor's mode and options
                filters = {n: v for n, v in (options.get("options") or {}).items() if n == "guard_filter_fn"}
                options = {name: value for name, value in options.items() if name not in ("options", "mode")}
                options |= {"backend": way.backend, **({"options": filters} if filters else {})}
            out = model if way.disabled or way.alone else original(model, **options)
            call.returned = _weak(out)
            self.calls.append(call)
            return out

        return compile

    def _trace(self, how: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if not args:
                return original(*args, **kwargs)
            call, way = _noted(how, args[0], {}), self._way
            out = args[0] if way.disabled or way.alone or way.wrapped else original(*args, **kwargs)
            call.returned = _weak(out)
            self.calls.append(call)
            return out

        return traced


def _noted(how: str, given: Any, options: dict[str, Any]) -> CompileCall:
    """A call that is about to be made: torch takes some options out of what it is given."""
    inner, module = options.get("options"), isinstance(given, nn.Module)
    what = type(given).__name__ if module else str(getattr(given, "__qualname__", None) or type(given).__name__)
    weak = _weak(given if module else getattr(given, "__self__", None))
    filters = isinstance(inner, dict) and "guard_filter_fn" in inner
    name = what.rpartition("<locals>.")[2]
    return CompileCall(how, name, str(here()[0]), weak, options.get("backend", "inductor"), filters)


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # takes no weak references
        return lambda: thing


_STATE_DICT = nn.Module.state_dict
"""Torch's own, also while a patch of a run replaces it."""


@contextlib.contextmanager
def plain_names() -> Iterator[None]:
    """Wrappers give and take the names that the models in them have."""

    def renamed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: ((without_prefix(name), thing) for name, thing in original(*args, **kwargs))

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            for name in [] if args or kwargs.get("destination") is not None else list(found):  # else of a part
                found[without_prefix(name)] = found.pop(name)
            return found

        return state_dict

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            actual = {without_prefix(name): name for name in _STATE_DICT(self)}
            own = OrderedDict((actual.get(without_prefix(n), n), value) for n, value in state_dict.items())
            return original(self, own, *args, **kwargs)

        return load_state_dict

    with Patches() as patches:
        for name in ("named_parameters", "named_buffers", "named_modules"):
            patches.put(nn.Module, name, renamed)
            patches.put(members, name, renamed)
        patches.put(nn.Module, "state_dict", saving)
        patches.put(nn.Module, "load_state_dict", loading)
        yield


@contextlib.contextmanager
def dropout_off(loop: TrainLoop) -> Iterator[None]:
    """Dropout returns its input, without a mode: in the functions, which a compiler reads like those of the project, in
    attention, and in recurrent modules."""

    def attention(original: Callable[..., Any]) -> Callable[..., Any]:
        def without(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("dropout_p", None)
            return original(query, key, value, attn_mask, 0.0, *args[1:], **kwargs)

        return without

    recurrent = [m for top in loop.modules.values() for m in members.modules(top) if isinstance(m, nn.RNNBase)]
    kept = [module.dropout for module in recurrent]
    with Patches() as patches:
        for owner, name in (*((functional, name) for name in DROPOUTS), (torch, "dropout")):
            patches.put(owner, name, lambda _original: lambda input, *_args, **_kwargs: input)
        patches.put(functional, "scaled_dot_product_attention", attention)
        for module in recurrent:
            module.dropout = 0.0
        try:
            yield
        finally:
            for module, dropout in zip(recurrent, kept, strict=True):
                module.dropout = dropout


@contextlib.contextmanager
def asking(places: dict[str, None] | None = None) -> Iterator[None]:
    """Note the lines that ask whether they are compiled; without ``places`` the answer is no, also where it is yes."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked() -> bool:
            if places is not None and (place := here()[0]).file:
                places[str(place)] = None
            return bool(original())

        return asked if places is not None else lambda: False

    with Patches() as patches:
        for name in ("is_compiling", "is_dynamo_compiling"):
            patches.put(torch.compiler, name, wrap)
        yield
