"""Which tensors of the batch make a difference: runs with the first row, or the last, in place of all rows.

All else stays the same: the seed, the weights (each moved a little, since nothing passes a layer that starts at zero),
the other tensors. Results are equal bit for bit, or they depend on that tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.declare.nested.listings import is_sequence
from pytest_trainloop.declare.nested.walk import NO_NEST
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.batches.values import binary, constant
from pytest_trainloop.instruments.gradients.dependence import moved_a_little
from pytest_trainloop.instruments.tracing.arguments import named_arguments
from pytest_trainloop.instruments.tracing.call_log import Calls, digests, lost_at
from pytest_trainloop.instruments.tracing.forward_pass import LONGEST
from pytest_trainloop.instruments.tracing.made_at import own_method
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.instruments.tracing.statements import use_of
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.torch_internals import has_values, is_transformed
from pytest_trainloop.recording.torch_names import CASTS, CONSTANT_ATTRIBUTES, SIZES
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.hooks import before_calls, call_from_outside, hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_TENSORS = 8
"""Tensors of a batch that are tried one by one, at most."""

STEPS_OF_A_RUN = 2
"""Optimizer steps of each run: a tensor that only the second loss depends on is used, too."""

_END, _NEXT = re.compile(r"done|terminal|terminated", re.IGNORECASE), re.compile("next|new_?(state|obs)", re.IGNORECASE)
_OF_A_LOSS = re.compile("advantage", re.IGNORECASE)
"""Names of what only a loss is made of. Labels may be there for an evaluation only, masks and lengths for other models
(odd: clouds_filled_with_zeros), and a rollout keeps log-probabilities that no ratio asks for
(odd: reinforce_by_numpy_with_rewards_of_one)."""

_PAST = re.compile(r"past|history|context|input|prev", re.IGNORECASE)
_TARGET = re.compile(r"future|target|label|\by\b", re.IGNORECASE)

FEW_VALUES = 16
"""Distinct values of a mask, a flag or a step of time, at most."""

LEAST_SPREAD, LEAST_DIFFERENCE = 0.01, 0.05
"""Standard deviation of an input over its mean, and of outputs over their size. Kelvin (280 +- 10) and images (0.45 +-
0.25) are above the first by a factor of 3 and more."""

Tensors = Mapping[int, torch.Tensor]
"""Tensors of the batch by their numbers, or of what a model is called with."""

Prepare = Callable[[Tensors], None]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch whose rows differ."""

    name: str
    """Where it is in the batch, as in ``batch["x"]``."""
    number: int
    passed: bool
    """Whether a model is called with it."""
    unread: bool
    """Whether no call of torch is given it, and its name says that a loss is made of it."""
    shape: tuple[int, ...]
    integer: bool
    largest: float
    is_mask: bool
    """Whether it has two values, one of them zero, and "mask" in its name or in that of the model's argument."""
    zeros: int
    """Entries that are 0, of a tensor of 0 and 1."""
    flat: bool
    """Whether it hardly varies, and has many values."""
    mean: float
    deviation: float
    """The standard deviation; both are NaN but for floating entries of three or more dimensions."""


class _Run(WatchingMode):
    """What one run shows: calls of models in training passes, and which tensors of the batch torch is given. Copies on
    another device or in another dtype count as what they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[tuple[float, ...]] = []
        """The values that backward was called on."""
        self.outputs: list[torch.Tensor] = []
        """Before the first step."""
        self.later: list[tuple[torch.Tensor, int]] = []
        """After it, each with the number of backward passes before the latest step."""
        self.addresses: list[int] = []
        """Those of the batch's tensors; of these ``passed`` went to a model and ``read`` to a call of torch."""
        self.passed, self.read = set[int](), set[int]()
        self.place = ""
        """The line of the first call of a model."""
        self.arguments: dict[int, str] = {}
        """The names of the model's arguments by address."""
        self.forwards: dict[int, str] = {}
        """The ``forward``, of the project's own, that is given each of them."""
        self._copies: dict[int, tuple[torch.Tensor, int]] = {}
        self._stepped = 0, 0
        """Steps, and backward passes before the latest of them."""

    def same_outputs(self, other: _Run) -> bool:
        """Whether outputs are the same, as far as the weights are: up to a step whose backward pass saw other
        values."""
        if len(self.outputs) != len(other.outputs) or not all(map(torch.equal, self.outputs, other.outputs)):
            return False
        for (one, before), (two, before_too) in zip(self.later, other.later, strict=False):
            if before != before_too or self.roots[:before] != other.roots[:before]:
                return True
            if not torch.equal(one, two):
                return False
        return True

    def contexts(self, watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        yield hooked(after_modules(unless_suspended(watch, self._leave), with_kwargs=True))
        yield from super().contexts(watch)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        name = name_of(func)
        with self.watch.suspended():
            places = (self._copies.get(id(t), (t, address(t)))[1] for t in tensors_in(args, kwargs))
            given = set(places) & {*self.addresses}
            if name in CASTS and isinstance(out, torch.Tensor) and given:
                self._copies[id(out)] = out, min(given)
            elif name not in CONSTANT_ATTRIBUTES | SIZES:
                self.read |= given
        return out

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch, record = self.watch, self.watch.record
        call = call_from_outside(watch, module)
        if call is None or not torch.is_grad_enabled() or watch.backward is not None or is_transformed():
            return
        if record.steps != self._stepped[0]:
            self._stepped = record.steps, len(record.of(Backward))
        with watch.suspended():
            self.place = self.place or str(call.place)
            self.passed |= {address(t) for t in nested.tensors((args, kwargs))} & {*self.addresses} - {0}
            given = named_arguments(module, args, kwargs).items()
            named = {address(t): name for name, t in given if isinstance(t, torch.Tensor) and address(t)}
            self.arguments |= named
            if forward := own_method(module, "forward"):
                self.forwards |= dict.fromkeys(named, str(forward))
            outputs = [t.detach().clone() for t in nested.tensors(output) if has_values(t)]
            if record.begun:
                self.later += [(t, self._stepped[1]) for t in outputs]
            else:
                self.outputs += outputs


class InputRuns:
    """The runs behind ``input_dependence``.

    The inputs are the tensors of the batch; where the loop makes its own data, those that its models are called with.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self._seen = evidence, evidence.run()
        self.own_data = False
        """Whether the loop makes its own data."""
        self.inputs: list[Input] = []
        """Those whose rows differ."""
        self.blind = False
        """Whether no output of any model depends on anything in the batch."""
        self.unchanged = _Run()
        self._named: dict[int, str] = {}
        """Where each input is, by its number."""

    def unused(self, uses: Sequence[str]) -> list[Input]:
        """What a model is called with, or is declared to use, and nothing depends on. Raises ``CannotDecide`` where
        this cannot be seen."""
        self._look()
        unchanged, inputs = self.unchanged, self.inputs
        if not unchanged.outputs:
            raise CannotDecide("no model of the loop is called with a gradient before its first step")
        if not all(bool(t.isfinite().all()) for t in unchanged.outputs):
            raise CannotDecide("outputs of the model are not finite (see finite)")
        if not inputs:
            return self._unused_of_own_data("all rows of the batch are equal", uses)
        if any(len(self._seen.parameters[i].shape) > 1 for i in self._seen.held):  # without a matrix it is a baseline
            blank = list(self._with_equal_rows(*inputs))
            self.blind = all(unchanged.same_outputs(run) for run in blank)
            if self.blind and all(unchanged.roots == run.roots for run in blank) and not any(t.passed for t in inputs):
                return self._unused_of_own_data("nothing in the batch makes a difference", uses)
        return [
            tensor
            for number, tensor in enumerate(inputs)
            if (tensor.name in uses or (number < MOST_TENSORS and (tensor.passed or self.blind or tensor.unread)))
            and all(unchanged.roots == r.roots and unchanged.same_outputs(r) for r in self._with_equal_rows(tensor))
        ]

    def _unused_of_own_data(self, given: str, uses: Sequence[str]) -> list[Input]:
        """The same of what the models are called with, where the loop makes its own data."""
        if not self.own_data and self._evidence.shared(makes_own_data):
            self.own_data, self.blind = True, False
            return self.unused(uses)
        if why := nested.without_tensors(first_batch(self._evidence.fresh_loop())):
            raise CannotDecide(why, needs="a batch of tensors")
        if self.own_data:
            given = "fit makes its own data, and rows do not differ in what its models are called with"
        raise CannotDecide(f"{given}: whether inputs are used cannot be seen")

    def hardly_varying(self) -> Iterator[tuple[Input, float]]:
        """Inputs that vary by less than a hundredth of their mean, where the first outputs for different rows differ as
        little, over their size: a norm in the model makes up for it (odd: pressures_that_the_model_normalises)."""
        first = next(iter(self.unchanged.outputs), None)
        if first is None or not first.is_floating_point() or first.dim() < 2 or len(first) < 2:
            return
        differ = float(first.std(0).mean()) / max(float(first.abs().mean()), 1e-30)
        for tensor in self.inputs:
            if tensor.passed and tensor.flat and differ < LEAST_DIFFERENCE:
                yield tensor, differ

    def read_behind(self, unused: Sequence[Input], uses: Sequence[str]) -> tuple[Input, Input] | None:
        """A mask among the unused inputs, and what it is to hide, if other values there change the loss.

        They are taken from entries that are not hidden. Of several inputs of the mask's shape each must change it: one
        may be labels, of which those that are ignored are no others. What is a mask by its values alone is asked about
        the one target that is blank wherever it is 0.
        """
        for mask in (t for t in unused if t.passed or t.name in uses):
            hidden = [t for t in self.inputs if t.passed and t not in unused]
            others = [t for t in hidden if t.shape[: len(mask.shape)] == mask.shape]
            if mask.is_mask and others and all(self._counts(mask, t) for t in others):
                return mask, others[0]
            named = [t for t in others if _TARGET.search(t.name) and not _PAST.search(t.name)]
            targets = [t for t in named if t.shape == mask.shape]
            by_values = not mask.is_mask and mask.zeros > 1 and len(targets) == 1
            if by_values and self._counts(mask, targets[0], blank=True):
                return mask, targets[0]
        return None

    def _counts(self, mask: Input, hidden: Input, *, blank: bool = False) -> bool:
        """Whether other values where the mask is 0 change the loss; ``blank``: if there is one value there, and several
        elsewhere."""

        def fill(tensors: Tensors) -> None:
            if not {mask.number, hidden.number} <= tensors.keys():
                return  # another model is called
            shown, values = tensors[mask.number] != 0, tensors[hidden.number]
            seen = values[shown]
            if blank and (constant(values[~shown]) is None or constant(seen) is not None):
                return
            values[~shown] = seen[torch.arange(int((~shown).sum())) * 7 % len(seen)]

        return self._run(fill).roots != self.unchanged.roots

    def to_change(self, *tensors: Input) -> str:
        """The line at which these inputs stop to matter. Where no call of torch is given them, what the ``forward``
        returns that is: to use them there."""
        runs = []
        for rows in (False, True):
            seen = Calls()
            next(self._with_equal_rows(*(tensors if rows else ()), seen=seen))
            runs.append([call for call in seen.calls if call.outputs])
        if any(digests(mine.inputs) != digests(theirs.inputs) for mine, theirs in zip(*runs, strict=False)):
            return lost_at(*runs)
        places = [] if self.own_data else [self.unchanged.addresses[t.number] for t in tensors]
        forward = next((self.unchanged.forwards[p] for p in places if p in self.unchanged.forwards), "")
        return use_of(forward, ())

    def _look(self) -> None:
        """The run as it is, and the inputs whose rows differ."""
        kept: dict[int, torch.Tensor] = {}

        def keep(tensors: Tensors) -> None:
            plain = {n: t for n, t in tensors.items() if t.layout is torch.strided and not t.is_nested and t.dim()}
            kept.update({n: t.detach().clone() for n, t in plain.items() if not torch.equal(t, t[:1].expand_as(t))})

        run = self.unchanged = self._run(keep)
        places = {n: run.addresses[n] if run.addresses and not self.own_data else 0 for n in kept}
        bootstraps = any(_NEXT.search(self._named[n]) and place in run.read for n, place in places.items())

        def tensor_of(number: int, t: torch.Tensor) -> Input:
            name, place = self._named[number], places[number]
            some = not t.is_complex() and t.dim() > 1 and bool(t.any())
            zeros = int((t == 0).sum()) if some and bool(((t == 0) | (t == t.max())).all()) else 0
            mean = deviation = math.nan
            if t.is_floating_point() and t.dim() > 2:
                mean, deviation = float(t.mean()), float(t.std())
            flat = deviation < LEAST_SPREAD * abs(mean) and len(torch.unique(t)) > FEW_VALUES
            # the end of an episode matters where a next state is read, and not where actions are copied
            # (odd: cloned_actions)
            of_a_loss = bool(_OF_A_LOSS.search(name)) or (bootstraps and bool(_END.search(name)))
            return Input(
                name,
                number,
                passed=self.own_data or place in run.passed,
                unread=not self.own_data and of_a_loss and place not in run.read,
                shape=tuple(t.shape),
                integer=not (t.is_floating_point() or t.is_complex()),
                largest=float(t.max()) if t.numel() and not t.is_complex() else 0.0,
                is_mask=zeros > 0 and "mask" in f"{name} {run.arguments.get(place, '')}".lower(),
                zeros=zeros if binary(t) else 0,
                flat=flat,
                mean=mean,
                deviation=deviation,
            )

        self.inputs = [tensor_of(n, t) for n, t in kept.items() if run.addresses or self.own_data]

    def _with_equal_rows(self, *tensors: Input, seen: Calls | None = None) -> Iterator[_Run]:
        """The runs in which all rows of these inputs are the first one, and the last one."""
        numbers = {tensor.number for tensor in tensors}
        for row in (0, -1):

            def repeat_row(tensors: Tensors, row: int = row) -> None:
                for number, tensor in tensors.items():
                    if number in numbers:
                        write(tensor, tensor[row].clone().expand_as(tensor))

            yield self._run(repeat_row, seen)

    def _run(self, prepare: Prepare, seen: Calls | None = None) -> _Run:
        """A run over one batch, whose tensors ``prepare`` is given first; where the loop makes its own data, those that
        a model is called with."""
        run, first = _Run(), list[Any]()

        def stream(loop: TrainLoop) -> Iterator[Any]:
            batch = nested.copy(first_batch(loop))
            if not self.own_data:
                tensors, names = dict(enumerate(nested.tensors(batch))), dict(named(batch))
                self._named = {n: names.get(id(t), f"tensor {n}") for n, t in tensors.items()}
                with torch.no_grad():
                    prepare(tensors)
            return itertools.repeat(batch)

        def before_item(number: int, item: Any) -> None:
            if number == 0:
                first.append(item)  # no tensor that the loop makes may get its place in memory
                run.addresses = [address(t) for t in nested.tensors(item)]
                if seen is not None:
                    seen.calls.clear()  # those that made the batch

        def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
            yield from run.contexts(watch)
            if seen is not None:
                yield from seen.contexts(watch)
            if self.own_data:
                yield self._changing_arguments(watch, prepare)

        record = self._evidence.rerun(
            stream=stream,
            before_item=before_item,
            prepare=moved_a_little,
            enough=lambda record: record.rounds >= STEPS_OF_A_RUN or len(record.backwards()) >= LONGEST,
            contexts=contexts,
        )
        run.roots = [tuple(root.value for root in b.roots) for b in record.of(Backward)]
        return run

    @contextlib.contextmanager
    def _changing_arguments(self, watch: Watch, prepare: Prepare) -> Iterator[None]:
        """Give ``prepare`` the tensors of data that models are called with, and the models what it makes of them."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or watch.backward is not None:
                return None
            fresh: dict[int, torch.Tensor] = {}
            numbered: dict[int, torch.Tensor] = {}
            with watch.suspended(), torch.no_grad():
                for path, t in nested.paths(named_arguments(module, args, kwargs)):
                    if has_values(t) and not t.requires_grad and t.layout is torch.strided and not t.is_nested:
                        name = f"{nested.shown(path)} of {watch.table.path_of(module) or type(module).__name__}"
                        number = next((n for n, known in self._named.items() if known == name), len(self._named))
                        self._named[number] = name
                        numbered[number] = fresh.setdefault(id(t), t.clone())
                prepare(numbered)
                return nested.mapped(
                    (args, kwargs), lambda _path, t: fresh.get(id(t), t), lambda value: isinstance(value, torch.Tensor)
                )

        with before_calls(watch, enter):
            yield


def named(batch: Any) -> Iterator[tuple[int, str]]:
    """The tensors of a nest by identity, and where each is: ``batch["input_ids"]``, ``batch[1]``."""
    todo: list[tuple[Any, str]] = [(batch, "batch")]
    seen: set[int] = set()
    while todo:
        value, path = todo.pop(0)
        if isinstance(value, torch.Tensor):
            yield id(value), path
        elif id(value) not in seen and not isinstance(value, NO_NEST) and not is_ours(value):
            seen.add(id(value))
            keyed = hasattr(value, "items") or is_sequence(value)
            children = value.items() if hasattr(value, "items") else nested.named_children(value)
            todo += [(child, f"{path}[{key!r}]" if keyed else f"{path}.{key}") for key, child in children]


def idle_layer(record: Record, tensor: Input) -> str:
    """The one layer of torch's own that trains, never ran and takes just such an input: ids for a table that has more
    rows than the largest, features for a linear layer, channels for a convolution. Empty where there is none, or
    more."""

    def takes(shape: Sequence[int]) -> bool:
        if tensor.integer:
            return len(shape) == 2 and shape[0] > tensor.largest >= 2
        if len(shape) == 2:
            return shape[1] == tensor.shape[-1] > 1
        return len(shape) == len(tensor.shape) and shape[1] == tensor.shape[1]

    idle = []
    for p in record.parameters:
        called = p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint + p.calls_empty
        never_ran = p.trainable and not called and not record.last_arrivals(p.index)
        if p.layer and p.index in record.held and never_ran and not record.declared_frozen(p.name):
            idle.append(p)
    owners = {p.owner for p in idle if len(p.shape) > 1 and takes(p.shape)}
    if tensor.integer:  # a table has no bias
        owners -= {p.owner for p in idle if len(p.shape) == 1}
    return owners.pop() if len(owners) == 1 else ""
