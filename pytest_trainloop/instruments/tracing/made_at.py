"""Where the parts of a loop were made: the line that the repair of a wiring fault goes to."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.instruments.tracing import definitions, own_steps, statements
from pytest_trainloop.instruments.tracing.asked_names import AskedNames
from pytest_trainloop.instruments.tracing.data_lines import DataLines
from pytest_trainloop.recording.construction import Construction, memory_of
from pytest_trainloop.recording.parameters import plain_objects
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.core.registry import Part
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.parameters import PlainObject
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Contexts = Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]

T = TypeVar("T")

_BEFORE = {
    "cast before": r"^(to|half|bfloat16|type|type_as)$",
    "loss before": r"loss|entropy|criterion",
    "padding before": r"^pad$",
    "reduction before": r"^(a?max|a?min|mean|sum|gather|squeeze)$",
}
"""Names of the calls that made what a line reads."""


class MadeAt:
    """Lines of the user's as text, by the names and numbers of the record; empty where a line is not known."""

    def __init__(self) -> None:
        self._noted = Construction()
        self._optimizers: dict[int, Place] = {}
        self._groups: dict[int, Place] = {}
        self._kinds: dict[int, type] = {}
        self._modules: dict[str, Place] = {}
        self._forwards: dict[str, Place] = {}
        self._attributes: dict[str, Place] = {}
        self._set: dict[str, Place] = {}
        self._plain: dict[str, PlainObject] = {}
        self._frozen: dict[str, Place] = {}
        self._thawed: dict[str, Place] = {}
        self._casts: dict[str, Place] = {}
        self._drawn: dict[str, Place] = {}
        self._loaded: dict[str, Place] = {}
        self._switched: dict[str, Place] = {}
        self._last: dict[type, Place] = {}

    @classmethod
    def of(cls, evidence: Evidence) -> MadeAt:
        """What a further run of the loop shows; of a run that cannot be repeated, what its instrument saw."""
        found = cls()
        if evidence.repeatable:
            with contextlib.suppress(CannotDecide, UsageError, UserCodeError):
                found.along(evidence)
        return found

    def along(self, evidence: Evidence, look: Contexts = lambda watch: (), **plan: Any) -> Record:
        """The record of a further run in which the lines are read and ``look`` is entered, with these fields of its
        plan. Raises as ``Evidence.rerun`` does."""
        contexts = lambda watch: (*look(watch), *self._named(watch))  # noqa: E731
        return evidence.rerun(around=self._noted.watching, contexts=contexts, **plan)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What ``observe()`` opens: without the function mode, which would cost each torch call."""
        return (*self._named(watch), self._noted.watching(freezes=False))

    def optimizer(self, index: int = 0) -> str:
        """The line that built an optimizer."""
        return _text(self._optimizers.get(index))

    def group(self, index: int = 0) -> str:
        """The last line that gave an optimizer parameters: its constructor, or ``add_param_group``."""
        return _text(self._groups.get(index)) or self.optimizer(index)

    def method_of(self, index: int, name: str = "step") -> str:
        """The line that defines a method of an optimizer, in a class of the project's own."""
        return _text(_method(self._kinds[index], name)) if index in self._kinds else ""

    def prepare(self) -> str:
        """The line that gave model and optimizer to Accelerate."""
        return _text(self._noted.prepared)

    def scheduler(self) -> str:
        """The line that built the last scheduler."""
        return _text(self._last.get(LRScheduler))

    def scaler(self) -> str:
        """The line that built the last gradient scaler."""
        return _text(self._last.get(GradScaler))

    def loader(self) -> str:
        """The line that built the last data loader."""
        return _text(self._last.get(DataLoader))

    def module(self, path: str) -> str:
        """The line that made the module of this path, or the nearest module that holds it."""
        while path and path not in self._modules:
            path = path.rpartition(".")[0]
        return _text(self._modules.get(path))

    def layer_of(self, finding: Finding) -> str:
        """The line that made the layer in which an operation lies ("relu in head.1") that the line where it was seen
        does not spell out."""
        operation, _, path = next(iter(finding.culprits), "").partition(" in ")
        called = rf"\bself(\.\w+)*\.{re.escape(path.rpartition('.')[2])}\("  # a layer that is named as its operation
        inside = path in self._modules and operation not in re.sub(called, "", code_of(finding.where))
        return self.module(path) if inside else ""

    def forward(self, owners: Sequence[str]) -> str:
        """The ``forward`` of the project's own that holds all of these modules, or the nearest one above."""
        path = os.path.commonpath([owner.replace(".", "/") for owner in owners]) if owners else ""
        path = path.replace("/", ".")
        while path and path not in self._forwards:
            path = path.rpartition(".")[0]
        return _text(self._forwards.get(path))

    def attribute(self, name: str) -> str:
        """The line that assigns a parameter, or the list, dict or object that holds it, to an attribute of a module of
        the project's own; else the line that made its module."""
        owner = name.rpartition(".")[0]
        return _text(self._attributes.get(name)) or (self.module(owner) if owner else "")

    def set_at(self, name: str) -> str:
        """The last line that set an attribute of a module, or registered it as a buffer, by its path."""
        return _text(self._set.get(name))

    def plain_object(self, name: str) -> PlainObject | None:
        """The object that is no module and carries the parameter of this name."""
        return next((plain for path, plain in self._plain.items() if f"{name}.".startswith(f"{path}.")), None)

    def froze(self, names: Sequence[str]) -> str:
        """The line that switched ``requires_grad`` off for the first of these parameters."""
        return _text(next((self._frozen[name] for name in names if name in self._frozen), None))

    def thawed(self, names: Sequence[str]) -> str:
        """The line that switched ``requires_grad`` on for the first of these parameters, after it was made."""
        return _text(next((self._thawed[name] for name in names if name in self._thawed), None))

    def drawn(self, names: Sequence[str]) -> str:
        """The last line that drew or filled in the values of the first of these parameters: outside of its layer's
        constructor, if any is."""
        return self.drawn_outside(names) or next(filter(None, (_text(self._drawn.get(name)) for name in names)), "")

    def drawn_outside(self, names: Sequence[str]) -> str:
        """The same, where it is no line that made the layer."""
        lines = [(_text(self._drawn.get(name)), self.module(name.rpartition(".")[0])) for name in names]
        return next((line for line, module in lines if line and line != module), "")

    def loaded(self, name: str) -> str:
        """The last line that loaded the parameter of this name from a state dict."""
        return _text(self._loaded.get(name))

    def switched_on(self, path: str) -> str:
        """The last line that called ``train()`` on the module of this path, or on a part of the model that holds it."""
        while path and path not in self._switched:
            path = path.rpartition(".")[0]
        return _text(self._switched.get(path)) if path else ""

    def cast(self, names: Sequence[str]) -> str:
        """The line that cast the module of the first of these parameters to its dtype."""
        return _text(next((self._casts[name] for name in names if name in self._casts), None))

    def _named(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._naming(watch),)

    @contextlib.contextmanager
    def _naming(self, watch: Watch) -> Iterator[None]:
        """Put the lines under the names of the record when the run ends."""
        try:
            yield
        finally:
            self._read(watch)

    def _read(self, watch: Watch) -> None:
        noted = self._noted
        for index, optimizer in watch.optimizers.indexed():
            _put(self._optimizers, index, noted.made.of(optimizer) or noted.trainer)
            _put(self._groups, index, noted.groups.of(optimizer))
            self._kinds[index] = type(optimizer)
        modules = dict(watch.table.named_modules())
        for path, module in modules.items():
            _put(self._modules, path, noted.made.of(module))
            _put(self._forwards, path, own_method(module, "forward"))
            _put(self._switched, path, noted.switched.of(module))
            self._plain.update(plain_objects(module, path))
        paths = {id(module): path for path, module in modules.items()}
        for (at, attribute), place in noted.attributes.items():
            if at in paths:
                self._set[f"{paths[at]}.{attribute}".lstrip(".")] = place
        for entry in watch.table.entries:
            if entry.role == "unregistered" or not entry.layer:
                owner, _, attribute = entry.name.partition("[")[0].rpartition(".")
                _put(self._attributes, entry.name, assigned_at(modules.get(owner), attribute))
        for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
            _put(self._frozen, entry.name, noted.frozen.of(tensor))
            _put(self._thawed, entry.name, noted.thawed.of(tensor))
            _put(self._casts, entry.name, noted.casts.of(tensor))
            in_memory = noted.drawn_memory.get(memory_of(tensor) or -1)
            _put(self._drawn, entry.name, in_memory or noted.drawn.of(tensor))
            _put(self._loaded, entry.name, noted.loaded.of(tensor))
        for kind in (LRScheduler, GradScaler, DataLoader):
            _put(self._last, kind, noted.made.last(kind))
        if noted.trainer is not None:
            self._last.setdefault(LRScheduler, noted.trainer)


def line_of(part: Part, finding: Finding, evidence: Evidence) -> str:
    """The line that made a part of the loop: the one that belongs to the first parameter among the finding's names."""
    names, seen = finding.culprits, finding.where
    match part:  # what the source says, or a fresh loop: no further run is made
        case "seen":
            return seen
        case "data":
            return evidence.shared(DataLines.of).at(names)
        case "labels":
            return evidence.shared(DataLines.of).called(r"label|target|tags")
        case "ids":
            return evidence.shared(DataLines.of).called(r"\bids|_ids|tokens")
        case "carried":
            return statements.carried(seen)
        case "entry":
            return statements.entry(seen)
        case "sorting":
            return statements.sorting(evidence.shared(DataLines.of).at(names))
        case "index of data":
            return definitions.index(evidence.shared(DataLines.of).chosen())
        case "collated":
            return evidence.shared(DataLines.of).chosen(names)
        case "index":
            return definitions.index(seen)
        case "targets":
            return definitions.compared(seen)
        case "overwritten":
            return statements.overwritten(seen)
        case "source of draws":
            return definitions.source_of_draws(seen)
        case "no_sync":
            return statements.unsynchronised(seen)
        case "part of the loss":
            return definitions.entry(seen, next(iter(names), ""))
        case "cast before" | "loss before" | "padding before" | "reduction before":
            return definitions.made_by(seen, _BEFORE[part])
        case "first argument":
            return definitions.first_argument(seen)
        case "asked":
            return evidence.shared(AskedNames.of).never_true()
        case "subtracted":
            return definitions.subtracted(seen)
        case "criterion":
            return definitions.criterion(seen)
        case "class weights":
            return definitions.criterion(seen, "weight") or definitions.criterion(seen, "pos_weight")
        case "use of the score":
            return statements.used_next(seen)
        case "filled":
            return evidence.shared(DataLines.of).filled_at(names)
        case "mask":
            return definitions.mask(seen)
        case "padding mask":
            return definitions.mask(seen, of=definitions.PADDING_MASKS)
        case "positions":
            line, name = definitions.positions(seen)
            return (evidence.shared(DataLines.of).at([f"batch['{name}']"]) if name else "") or line
        case "loss":
            return definitions.value(seen)
        case "own backward":
            return statements.backward_of(evidence.contract.criterion)  # type: ignore[attr-defined]
        case "call of helper":
            return statements.call_next_to_step(seen)
        case "condition":
            return statements.condition_of(seen)
        case "wrapper":
            return statements.only_call(seen, "DistributedDataParallel")
        case "seed":
            return statements.only_call(seen, "manual_seed")
        case "stepped":
            return definitions.value_here(seen, "step")
        case "names":
            return definitions.names_in_condition(seen)
        case "bound of clip":
            return definitions.argument(seen, "clip_grad_norm_", "max_norm", 1)
        case "copied":
            return definitions.copied(seen)
        case "without gradients":
            return statements.without_gradients(seen) or statements.without_gradients(definitions.value(seen))
        case "network":
            return definitions.network(seen, next(iter(names), ""))
        case "given":
            return definitions.given(seen)
        case "parts":
            return statements.only_statement(evidence.fresh_loop().parts, most=20)
        case "end of evaluation":
            return statements.end_of(evidence.fresh_loop().evaluate, seen)
        case "written in forward":
            return statements.within(seen, "forward")
        case "cast in place":
            return next(filter(None, (definitions.value_here(seen, cast) for cast in ("half", "bfloat16"))), "")
        case "end of saving":
            return statements.end_of(evidence.fresh_loop().save, seen)
    record = evidence.run()
    backward = next((str(b.place) for b in record.backwards()), "")
    if part in ("backward", "backpropagated"):
        return backward if part == "backward" else definitions.value(backward)
    made = evidence.shared(MadeAt.of)
    known = {p.name: p for p in record.parameters}
    owners = {name.rpartition(".")[0] for name in names if name in {s.name for s in record.statistics}}
    own = [name for name in names if name in known] or [name for name, p in known.items() if p.owner in owners]
    index = next((o for name in own for o in record.held.get(known[name].index, ())), 0)
    owner = next((known[name].owner for name in own), next((name for name in names if made.module(name)), ""))
    match part:
        case "optimizer":
            return made.optimizer(index)
        case "group":
            return made.group(index)
        case "step":
            return own_steps.update_in(made.method_of(index), functools.partial(made.method_of, index))
        case "option" | "count of steps":
            key = "**" if part == "count of steps" else next(iter(names), "")
            return own_steps.read_in(made.method_of(index), key, functools.partial(made.method_of, index))
        case "groups":
            return definitions.first_argument(made.group(index))
        case "thawed":
            return made.thawed(own)
        case "loaded":
            return next(filter(None, map(made.loaded, own or known)), "")
        case "freeze":
            return made.froze(own)
        case "names of freeze":
            return definitions.names_in_condition(made.froze(own))
        case "scheduler":
            return made.scheduler()
        case "scaler":
            return made.scaler()
        case "loader":
            return made.loader()
        case "sampler":
            loader = made.loader() or seen
            sampler = definitions.argument(loader, "DataLoader", "sampler", 3)
            return sampler or definitions.argument(loader, "DataLoader", "batch_sampler", 4)
        case "cast":
            return made.cast(own)
        case "module":
            return made.attribute(own[0]) if own else made.module(owner) if owner else ""
        case "layer":
            return made.layer_of(finding)
        case "attribute":
            return next(
                filter(None, (made.set_at(name.removeprefix("model.")) or made.set_at(name) for name in names)), ""
            )
        case "drawn":
            return made.drawn([*own, *(name for name, p in known.items() if p.owner in names)])
    forward = made.forward([known[name].owner for name in own])
    return statements.use_of(forward, own) if part == "use" else forward


def _put(places: dict[T, Place], key: T, place: Place | None) -> None:
    if place is not None:
        places[key] = place


def _text(place: Place | None) -> str:
    return "" if place is None else str(place)


def assigned_at(owner: Any, attribute: str, part: str = "") -> Place | None:
    """The first line of an object's class that assigns the attribute, or registers it as a buffer; with this part."""
    name = re.escape(attribute)
    assigns = re.compile(rf"[^=#]*\bself\.{name}\b[^=]*=[^=]|.*\bregister_buffer\(\s*[\"']{name}[\"']")
    for kind in type(owner).__mro__:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None or layer(file) != 2:
            continue
        with contextlib.suppress(OSError, TypeError):
            lines, first = inspect.getsourcelines(kind)
            for number, line in enumerate(lines, first):
                if assigns.match(line) and part in line:
                    return place_of(file, number)
    return None


def class_line(kind: type) -> str:
    """The line that begins a class of the project's own; empty where its source is not known."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or layer(file) != 2:
        return ""
    with contextlib.suppress(OSError, TypeError):
        lines, first = inspect.getsourcelines(kind)
        number = next((n for n, line in enumerate(lines, first) if line.lstrip().startswith("class ")), first)
        return str(place_of(file, number))
    return ""


def own_method(thing: Any, name: str) -> Place | None:
    """The line that defines a method of an object, in a class of the project's own."""
    return _method(type(thing), name)


def _method(kind: type, name: str) -> Place | None:
    method = inspect.getattr_static(kind, name, None)  # of a script, to read it raises
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    if code is None or layer(code.co_filename) != 2:
        return None
    line = code.co_firstlineno  # of its first decorator
    while linecache.getline(code.co_filename, line).lstrip().startswith("@"):
        line += 1
    return place_of(code.co_filename, line)
