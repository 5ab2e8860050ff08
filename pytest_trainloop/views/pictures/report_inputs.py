"""What the further run that the card makes shows to those who draw: sizes of weights, gradients, updates and outputs at
every step, and how long the rows of each batch are."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare.nested import paths, shown
from pytest_trainloop.instruments.batches.padding import Proof, padding_ids, read_paddings
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.runs.hooks import around_steps, hooked, stepped_by, unless_suspended
from pytest_trainloop.views.loop_facts.measured import Measured
from pytest_trainloop.views.pictures.sizes import Sizes, norm, sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

    Taken = tuple["Moment", dict[int, torch.Tensor]]
    """A step, and the weights before it."""

MOST_STEPS = 24
"""Steps of one optimizer that are looked at; few runs are longer."""


@dataclass(slots=True)
class Moment:
    """One step of one optimizer."""

    optimizer: int
    number: int
    """Among the steps of its optimizer, from 1 on."""
    gradients: dict[int, float] = field(default_factory=dict)
    """The norm of each gradient as the step reads it, by parameter."""
    updates: dict[int, float] = field(default_factory=dict)
    """The norm of each update over that of the weights before it."""
    gradient_sizes: Sizes = field(default_factory=Sizes)
    weight_sizes: Sizes = field(default_factory=Sizes)


@dataclass(slots=True, kw_only=True)
class Fed:
    """One batch that the loop took."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    lengths: tuple[int, ...] = ()
    """The real positions of each row; empty where nothing says which are padding."""
    padded_to: int = 0
    reason: str = ""
    """What says which positions are padding, in words."""


class ReportInputs:
    """What was seen, as plain data; for ``evidence.shared``."""

    def __init__(self) -> None:
        self.measured = Measured()
        self.moments: list[Moment] = []
        self.batches: list[Fed] = []
        self.outputs: dict[str, Sizes] = {}
        """Of each layer that has no other in it, what it gave for the last step, in the order of the calls."""
        self.why = ""
        """Why something was not looked at: a mistake of this package, or a tensor of a kind that it does not know."""
        self._padding: Any = None
        self._pad_ids: list[int] = []
        self._seen: set[str] = set()

    @classmethod
    def of(cls, evidence: Evidence) -> ReportInputs:
        """The run of ``Measured``, looked at more closely; of a loop that cannot be run again, nothing."""
        found = cls()
        found._padding = evidence.declared("padding") if evidence.repeatable else None
        found.measured = Measured.along(evidence, found._contexts, found._note)
        return found

    def _contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._looking(watch),)

    @contextlib.contextmanager
    def _looking(self, watch: Watch) -> Iterator[None]:
        counts: Counter[int] = Counter()
        self._pad_ids = padding_ids(
            m for _, m in watch.table.named_modules() if next(members.children(m), None) is None
        )
        outputs = unless_suspended(watch, functools.partial(self._note_output, watch))
        take = functools.partial(self._take, watch, counts)
        with around_steps(watch, take, functools.partial(self._use, watch)), hooked(after_modules(outputs)):
            yield

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """An exception of what looks on must not leave ``fit``, where it would pass for the project's."""
        try:
            yield
        except Exception as error:
            self.why = self.why or f"{type(error).__name__}: {error}"

    def _take(self, watch: Watch, counts: Counter[int], optimizer: Any) -> Taken | None:
        index = watch.optimizers.index(optimizer)
        counts[index] += 1
        if counts[index] > MOST_STEPS:
            return None
        moment, before = Moment(index, counts[index]), {}
        with self._safely():
            for number, weight in _watched(watch, optimizer):
                before[number] = weight.detach().clone()
                moment.weight_sizes.add(sizes(weight))
                if weight.grad is not None:
                    moment.gradients[number] = norm(weight.grad)
                    moment.gradient_sizes.add(sizes(weight.grad))
        self._seen.clear()
        self.moments.append(moment)
        return moment, before

    def _use(self, watch: Watch, optimizer: Any, taken: Taken) -> None:
        moment, before = taken
        with self._safely():
            for number, weight in _watched(watch, optimizer):
                old = before.get(number)
                if old is not None and old.shape == weight.shape and (size := norm(old)) > 0:
                    moment.updates[number] = norm(weight.detach() - old) / size

    def _note_output(self, watch: Watch, module: nn.Module, _args: Any, output: Any) -> None:
        if watch.backward is not None or not torch.is_grad_enabled() or not watch.table.knows(module):
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if (
            next(members.children(module), None) is not None
            or not isinstance(tensor, torch.Tensor)
            or not _counts(tensor)
        ):
            return
        with watch.suspended(), torch.no_grad(), self._safely():
            path, found = watch.table.path_of(module), sizes(tensor)
            if path in self._seen:
                self.outputs[path].add(found)
            else:
                self.outputs[path] = found
                self._seen.add(path)

    def _note(self, _number: int, item: Any) -> None:
        with self._safely():
            fed = Fed(shapes=tuple((shown(path), tuple(tensor.shape)) for path, tensor in paths(item)))
            self.batches.append(fed)
            found = read_paddings(item, at_least=Proof.SAID, declared=self._padding, pad_ids=self._pad_ids)
            for mask in found[:1]:
                fed.lengths, fed.padded_to, fed.reason = mask.lengths, mask.grid.length, mask.reason


def _watched(watch: Watch, optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The weights of an optimizer that require gradients, by their number in the record, each once."""
    found: dict[int, torch.Tensor] = {}
    for _, _, weight in stepped_by(optimizer):
        index = watch.table.index(weight)
        if index is not None and _counts(weight):
            found.setdefault(index, weight)
    yield from found.items()


def _counts(tensor: torch.Tensor) -> bool:
    """Whether the entries are numbers that can be read."""
    return readable(tensor) and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0
