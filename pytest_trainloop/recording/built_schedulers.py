"""The schedulers of a run: those that are built while it is watched, those that are declared and those that step; and
the optimizers that are built."""

from __future__ import annotations

import ast
import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.declare.fields import listed
from pytest_trainloop.recording.as_caller import as_caller
from pytest_trainloop.recording.construction import maker
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.record import Scheduler
from pytest_trainloop.recording.source import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place

_NOT_SET = frozenset({"optimizer", "last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"})
"""Attributes of torch's schedulers that are no settings: they change with the calls."""


class BuiltSchedulers:
    """Numbers schedulers; ``watching`` notes those that are built in a block, and the line that builds them.

    Schedulers are held weakly: a loop that builds one for each batch is not to look as if it kept them.
    """

    def __init__(self) -> None:
        self.entries: list[Scheduler] = []
        self.tick: Callable[[], int] = lambda: 0
        """The position in the run; 0 before it begins."""
        self._references: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any] | None] = []
        self._numbers: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._built_optimizers: list[weakref.ref[Optimizer]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with Patches() as patches:
            for cls in with_subclasses(LRScheduler):
                if "__init__" in vars(cls):
                    patches.put(cls, "__init__", self._noting)
            patches.put(Optimizer, "__init__", self._noting_optimizer)
            yield

    def _noting_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            as_caller(original, (optimizer, *args), kwargs)
            self._built_optimizers.append(weakref.ref(optimizer))

        return init

    def optimizers(self) -> Iterator[Optimizer]:
        """The optimizers that were built in the block and are still held."""
        for reference in self._built_optimizers:
            if (optimizer := reference()) is not None:
                yield optimizer

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if id(scheduler) in self._under_way:  # the constructor of its parent class
                as_caller(original, (scheduler, *args), kwargs)
                return
            self._under_way.add(id(scheduler))
            try:
                as_caller(original, (scheduler, *args), kwargs)
            finally:
                self._under_way.discard(id(scheduler))
            self.number(scheduler, maker(scheduler))

        return init

    def number(self, scheduler: Any, place: Place | None = None) -> int:
        """The number of a scheduler; one that is not known gets an entry."""
        known = self._numbers.get(id(scheduler))
        if known is not None and self._references[known]() is scheduler:
            return known
        number = len(self.entries)
        optimizer = getattr(scheduler, "optimizer", None)
        entry = Scheduler(
            number=number,
            kind=type(scheduler).__name__,
            from_torch=type(scheduler).__module__.startswith("torch."),
            settings=_settings(scheduler),
            place=place,
            at=self.tick(),
            groups=len(getattr(optimizer, "param_groups", None) or ()),
            shares=_shared_variables(getattr(scheduler, "lr_lambdas", None) or ()),
            function=_line_of_functions(getattr(scheduler, "lr_lambdas", None) or ()),
        )
        self.entries.append(entry)
        self._references.append(weakref.ref(scheduler, lambda _: setattr(entry, "gone", self.tick())))
        self._optimizers.append(None if optimizer is None else weakref.ref(optimizer))
        self._numbers[id(scheduler)] = number
        return number

    def called(self, scheduler: Any) -> int:
        """The number of a scheduler that steps now."""
        number = self.number(scheduler)
        self.entries[number].calls += 1
        return number

    def steps_inside(self, scheduler: Any) -> None:
        """Note that another scheduler steps this one."""
        self.entries[self.number(scheduler)].inner = True

    def declare(self, given: Any) -> None:
        """Note what ``TrainLoop.scheduler`` holds: a scheduler, or a list or dict of some."""
        for scheduler in listed(given):
            if isinstance(scheduler, LRScheduler):
                self.entries[self.number(scheduler)].declared = True

    def finish(self, index_of: Callable[[Any], int | None]) -> list[Scheduler]:
        """The entries, once the run is over; ``index_of`` gives the index of an optimizer that is in the record."""
        for number, reference in enumerate(self._references):
            optimizer = self._optimizers[number]
            held = None if optimizer is None else optimizer()
            if held is not None:
                self.entries[number].optimizer = index_of(held)
            for inner in _held_by(reference()):
                if (known := self._numbers.get(id(inner))) is not None and self._references[known]() is inner:
                    self.entries[known].inner = True
        return self.entries


def _held_by(scheduler: Any) -> Iterator[Any]:
    """The schedulers that are attributes of another one, or lie in a list that is."""
    for value in vars(scheduler).values() if scheduler is not None else ():
        for held in listed(value):
            if isinstance(held, LRScheduler):
                yield held


def _settings(scheduler: Any) -> dict[str, str]:
    """The settings of a scheduler as text."""
    kept = {k: v for k, v in vars(scheduler).items() if k not in _NOT_SET and not k.startswith("_")}
    return {name: _text(value) for name, value in kept.items()}


def _text(value: Any, depth: int = 3) -> str:
    """A value as text, equal where it would act the same: functions by their code and closure, others by identity."""
    if value is None or isinstance(value, (int, float, str, bool, bytes)):
        return repr(value)
    if depth and isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, depth - 1) for v in value)}]"
    if depth and isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_text(v, depth - 1)}' for k, v in value.items())}}}"
    if depth and isinstance(value, functools.partial):
        return f"partial({_text([value.func, *value.args], depth)}, {_text(value.keywords, depth)})"
    code = getattr(value, "__code__", None)
    if depth and code is not None:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        given = [*cells, *(value.__defaults__ or ()), *([value.__self__] if hasattr(value, "__self__") else [])]
        inside = ", ".join(_text(v, depth - 1) for v in given)
        return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}({inside})"
    return f"{type(value).__name__} {id(value)}"


def _shared_variables(functions: Any) -> tuple[str, ...]:
    """The variables of a loop that several functions made in it share: each reads the last value."""
    closures = [f.__closure__ for f in functions if getattr(f, "__closure__", None)]
    codes = {f.__code__ for f in functions if getattr(f, "__code__", None)}
    if len({id(f) for f in functions}) < 2 or len(closures) != len(functions) or len(codes) != 1:
        return ()
    code = next(iter(codes))
    cells = zip(code.co_freevars, zip(*closures, strict=True), strict=True)
    shared = [name for name, of_each in cells if len(set(map(id, of_each))) == 1]
    looped = _looped_over(code.co_filename, code.co_firstlineno) if shared else frozenset()
    return tuple(name for name in shared if name in looped)


def _line_of_functions(functions: Any) -> str:
    if not _shared_variables(functions):
        return ""
    code = functions[0].__code__
    return str(place_of(code.co_filename, code.co_firstlineno))


@functools.cache
def _looped_over(file: str, line: int) -> frozenset[str]:
    """The variables of the loops around a function that begins on a line: of ``for`` and of comprehensions."""
    targets: list[ast.expr] = []
    for node in ast.walk(syntax_of(file)):
        inside = node.lineno <= line <= (node.end_lineno or 0) if isinstance(node, (ast.expr, ast.stmt)) else False
        if inside and isinstance(node, ast.For):
            targets.append(node.target)
        elif inside and isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            targets += [comprehension.target for comprehension in node.generators]
    return frozenset(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def with_subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    todo = [cls]
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo.extend(one.__subclasses__())
            yield one
