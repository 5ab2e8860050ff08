"""Which tensors of the batch make a difference: runs with the first row, or the last, in place of all rows.

All else stays the same: the seed, the weights (each moved a little, since nothing passes a layer that starts at zero),
the other tensors. Results are equal bit for bit, or they depend on that tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.batches.values import binary, constant
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.dependence import moved_a_little
from pytest_trainloop.memory_layout import write
from pytest_trainloop.ours import is_ours
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.torch_internals import has_values, is_transformed
from pytest_trainloop.recording.torch_names import CASTS, CONSTANT_ATTRIBUTES, SIZES
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.hooks import before_calls, call_from_outside, hooked, unless_suspended
from pytest_trainloop.tracing.arguments import named_arguments
from pytest_trainloop.tracing.forward_pass import LONGEST
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 8
"""Tensors of a batch that are tried one by one, at most."""

STEPS = 2
"""Optimizer steps of each run: a tensor that only the second loss depends on is used, too."""


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor of the batch whose rows differ."""

    name: str
    """Where it stands in the batch, as in ``batch["x"]``."""
    number: int
    passed: bool
    """Whether a model is called with it."""
    shape: tuple[int, ...] = ()
    integer: bool = False
    largest: float = 0.0
    """Its largest entry."""
    masks: int = 0
    """Entries that it hides, where it is a mask: two values, one of them zero, and "mask" in its name or in that of
    the model's argument."""
    zeros: int = 0
    """Entries that are 0, of a tensor of 0 and 1."""
    unread: bool = False
    """Whether no call of torch is given it, and its name says that a loss is made of it."""


@dataclass(frozen=True, slots=True)
class UnusedInputs:
    """Tensors that a model is called with, or is declared to use, and nothing depends on."""

    tensors: tuple[BatchTensor, ...]
    no_input_used: bool
    """Whether no output of any model depends on anything in the batch."""
    place: str
    mask: BatchTensor | None = None
    hidden: BatchTensor | None = None
    """Of the unused ``mask``: what it is to hide, and on whose hidden entries the loss depends."""


@dataclass(slots=True)
class _Run:
    """What one run shows: models are looked at in training passes."""

    roots: list[tuple[float, ...]] = field(default_factory=list)
    """The values that backward was called on."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Before the first step."""
    later: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """After it, each with the number of backward passes before the latest step."""
    passed: set[int] = field(default_factory=set)
    """Addresses of the batch's tensors that a model was called with."""
    place: str = ""
    """The line of the first call."""
    arguments: dict[int, str] = field(default_factory=dict)
    """The names of the model's arguments by address."""
    read: set[int] = field(default_factory=set)
    """Addresses of the batch's tensors that a call of torch was given, one that only moves them left out."""

    def equals(self, other: _Run) -> bool:
        return self.roots == other.roots and self.same_outputs(other) and self.same_later(other)

    def same_outputs(self, other: _Run) -> bool:
        a, b = self.outputs, other.outputs
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    def same_later(self, other: _Run) -> bool:
        """Whether outputs after the first step are the same, as far as the weights are: up to a step whose backward
        pass saw other values."""
        for (one, before), (two, before_too) in zip(self.later, other.later, strict=False):
            if before != before_too or self.roots[:before] != other.roots[:before]:
                return True
            if not torch.equal(one, two):
                return False
        return True


_END, _NEXT = re.compile(r"done|terminal|terminated", re.IGNORECASE), re.compile("next", re.IGNORECASE)
_OF_A_LOSS = re.compile("advantage", re.IGNORECASE)
"""Names of what only a loss is made of. Labels may be there for an evaluation only, masks and lengths for other models
(odd: clouds_filled_with_zeros), and a rollout keeps log-probabilities that no ratio asks for
(odd: reinforce_by_numpy_with_rewards_of_one)."""

Tensors = Mapping[int, torch.Tensor]
"""Tensors of the batch by their numbers, or of what a model is called with."""

Prepare = Callable[[Tensors], None]


class InputRuns:
    """The runs behind ``input_dependence``.

    The inputs are the tensors of the batch; where the loop makes its own data, those that its models are called with.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._seen, self._plan, self._rerun = evidence.run(), evidence.plan(), evidence.rerun
        self.own_data = False
        """Whether the loop makes its own data."""
        self.names: tuple[str, ...] = ()
        """Inputs whose rows differ."""
        self._named: dict[int, str] = {}
        """Where each input stands, by its number."""

    def unused(self, uses: Sequence[str] = ()) -> UnusedInputs | None:
        """What a model is called with, or is declared to use, and does not, if there is any. Raises ``CannotDecide``
        where this cannot be seen."""
        unchanged, tensors = self._unchanged()
        self.names = tuple(t.name for t in tensors)
        if not unchanged.outputs:
            raise CannotDecide("no model of the loop is called with a gradient before its first step")
        if not all(bool(t.isfinite().all()) for t in unchanged.outputs):
            raise CannotDecide("outputs of the model are not finite (see finite)")
        if not tensors:
            return self._unused_of_own_data("all rows of the batch are equal", uses)
        has_matrix = any(len(self._seen.parameters[i].shape) > 1 for i in self._seen.held)
        blank = list(self._with_equal_rows(*tensors)) if has_matrix else []
        blind = has_matrix and all(unchanged.same_outputs(run) and unchanged.same_later(run) for run in blank)
        if blind and all(unchanged.roots == run.roots for run in blank) and not any(t.passed for t in tensors):
            return self._unused_of_own_data("nothing in the batch makes a difference", uses)
        unused = tuple(
            tensor
            for number, tensor in enumerate(tensors)
            if (tensor.name in uses or (number < MOST and (tensor.passed or blind or tensor.unread)))
            and all(unchanged.equals(run) for run in self._with_equal_rows(tensor))
        )
        if not unused:
            return None
        read = (
            None
            if blind
            else self._read_behind(
                [t for t in unused if t.passed or t.name in uses], [t for t in tensors if t.passed], unchanged
            )
        )
        mask, hidden = read or (None, None)
        return UnusedInputs(unused, blind, unchanged.place, mask, hidden)

    def _unused_of_own_data(self, given: str, uses: Sequence[str]) -> UnusedInputs | None:
        """The same of what the models are called with, where the loop makes its own data."""
        if not self.own_data and self._evidence.shared(makes_own_data):
            self.own_data = True
            return self.unused(uses)
        if why := self._no_tensors():
            raise CannotDecide(why, needs="a batch of tensors")
        if self.own_data:
            given = "fit makes its own data, and rows do not differ in what its models are called with"
        raise CannotDecide(f"{given}: whether inputs are used cannot be seen")

    def _no_tensors(self) -> str:
        loop = self._evidence.fresh_loop()
        return nested.without_tensors(first_batch(loop))

    def _read_behind(
        self, unused: Sequence[BatchTensor], passed: Sequence[BatchTensor], unchanged: _Run
    ) -> tuple[BatchTensor, BatchTensor] | None:
        """A mask among the unused tensors, and what it is to hide, if other values there change the loss.

        They are taken from entries that are not hidden. Of several tensors of the mask's shape each must change it: one
        may be labels, of which those that are ignored are no others. What is a mask by its values alone is asked about
        the one target that is blank wherever it is 0.
        """
        for mask in unused:
            others = [t for t in passed if t.shape[: len(mask.shape)] == mask.shape and t not in unused]
            targets = [t for t in others if t.shape == mask.shape and _is_target(t.name)]
            if mask.masks and others and all(self._counts(mask, t, unchanged) for t in others):
                return mask, others[0]
            by_values = not mask.masks and mask.zeros > 1 and len(targets) == 1
            if by_values and self._counts(mask, targets[0], unchanged, blank=True):
                return mask, targets[0]
        return None

    def _counts(self, mask: BatchTensor, hidden: BatchTensor, unchanged: _Run, *, blank: bool = False) -> bool:
        """Whether other values where the mask is 0 change the loss; ``blank``: one value stands there, and several
        elsewhere."""

        def fill(tensors: Tensors) -> None:
            if not {mask.number, hidden.number} <= tensors.keys():
                return  # another model is called
            shown, values = tensors[mask.number] != 0, tensors[hidden.number]
            seen = values[shown]
            if blank and (constant(values[~shown]) is None or constant(seen) is not None):
                return
            values[~shown] = seen[torch.arange(int((~shown).sum())) * 7 % len(seen)]

        return self._run(fill, []).roots != unchanged.roots

    def _unchanged(self) -> tuple[_Run, list[BatchTensor]]:
        """The run as it is, and the inputs whose rows differ."""
        listed: dict[int, BatchTensor] = {}
        addresses: list[int] = []

        def list_tensors(tensors: Tensors) -> None:
            listed.update({n: _batch_tensor(self._named[n], n, t) for n, t in tensors.items() if _rows_differ(t)})

        run = self._run(list_tensors, addresses)
        found = listed.values()
        if self.own_data:
            return run, [replace(t, passed=True, masks=t.masks if "mask" in t.name.lower() else 0) for t in found]
        bootstraps = any(_NEXT.search(t.name) and addresses[t.number] in run.read for t in found if addresses)
        return run, [_as_passed(t, addresses[t.number], run, bootstraps=bootstraps) for t in found if addresses]

    def _with_equal_rows(self, *tensors: BatchTensor) -> Iterator[_Run]:
        """The runs in which all rows of these tensors are the first one, and the last one."""
        numbers = {tensor.number for tensor in tensors}
        for row in (0, -1):

            def repeat_row(tensors: Tensors, row: int = row) -> None:
                for number, tensor in tensors.items():
                    if number in numbers:
                        write(tensor, tensor[row].clone().expand_as(tensor))

            yield self._run(repeat_row, [])

    def _run(self, prepare: Prepare, addresses: list[int]) -> _Run:
        """A run over one batch, whose tensors ``prepare`` is given first; ``addresses`` gets theirs. Where the loop
        makes its own data ``prepare`` is given those that a model is called with."""
        run = _Run()
        first: list[Any] = []

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
                addresses.extend(map(address, nested.tensors(item)))

        def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
            yield _watching(watch, run, addresses)
            yield from _Reads(run, addresses).contexts(watch)
            if self.own_data:
                yield self._changing_arguments(watch, prepare)

        plan = replace(
            self._plan,
            stream=stream,
            before_item=before_item,
            prepare=moved_a_little,
            enough=lambda record: record.rounds >= STEPS or len(record.backwards()) >= LONGEST,
            contexts=contexts,
        )
        record = self._rerun(plan)
        run.roots = [tuple(root.value for root in b.roots) for b in record.of(Backward)]
        return run

    @contextlib.contextmanager
    def _changing_arguments(self, watch: Watch, prepare: Prepare) -> Iterator[None]:
        """Give ``prepare`` the tensors of data that models are called with, and the models what it makes of them."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or watch.backward is not None:
                return None
            with watch.suspended(), torch.no_grad():
                given = list(self._numbered(watch, module, named_arguments(module, args, kwargs)))
                fresh = {id(tensor): tensor.clone() for _, tensor in given}
                prepare({number: fresh[id(tensor)] for number, tensor in given})
                return nested.mapped(
                    (args, kwargs), lambda _path, t: fresh.get(id(t), t), lambda value: isinstance(value, torch.Tensor)
                )

        with before_calls(watch, enter):
            yield

    def _numbered(
        self, watch: Watch, module: nn.Module, arguments: dict[str, Any]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        known = {name: number for number, name in self._named.items()}
        for path, tensor in nested.paths(arguments):
            if (
                has_values(tensor)
                and not tensor.requires_grad
                and tensor.layout is torch.strided
                and not tensor.is_nested
            ):
                name = f"{nested.shown(path)} of {watch.table.path_of(module) or type(module).__name__}"
                number = known.setdefault(name, len(known))
                self._named[number] = name
                yield number, tensor


class _Reads(WatchingMode):
    """Notes which tensors of the batch torch is given, by address; copies on another device or in another dtype count
    as what they copy."""

    def __init__(self, run: _Run, addresses: list[int]) -> None:
        super().__init__()
        self._run, self._addresses = run, addresses
        self._copies: dict[int, tuple[torch.Tensor, int]] = {}

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        name = name_of(func)
        with self.watch.suspended():
            given = {a for t in tensors_in(args, kwargs) if (a := self._original(t)) in self._addresses}
            if name in CASTS and isinstance(out, torch.Tensor) and given:
                self._copies[id(out)] = out, min(given)
            elif name not in CONSTANT_ATTRIBUTES | SIZES:
                self._run.read |= given
        return out

    def _original(self, tensor: torch.Tensor) -> int:
        known = self._copies.get(id(tensor))
        return address(tensor) if known is None else known[1]


@contextlib.contextmanager
def _watching(watch: Watch, run: _Run, addresses: list[int]) -> Iterator[None]:
    stepped = [0, 0]  # steps, and backward passes before the latest of them

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, record = call_from_outside(watch, module), watch.record
        if call is None or not torch.is_grad_enabled() or watch.backward is not None or is_transformed():
            return
        if record.steps != stepped[0]:
            stepped[:] = record.steps, len(record.of(Backward))
        with watch.suspended():
            run.place = run.place or str(call.place)
            run.passed |= {address(t) for t in nested.tensors((args, kwargs))} & {*addresses} - {0}
            run.arguments |= _arguments(module, args, kwargs)
            outputs = [t.detach().clone() for t in nested.tensors(output) if has_values(t)]
            if record.begun:
                run.later += [(t, stepped[1]) for t in outputs]
            else:
                run.outputs += outputs

    with hooked(after_modules(unless_suspended(watch, leave), with_kwargs=True)):
        yield


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """The name of each tensor that is an argument of its own, by address."""
    given = named_arguments(module, args, kwargs)
    places = ((address(value), name) for name, value in given.items() if isinstance(value, torch.Tensor))
    return {place: name for place, name in places if place}


def _as_passed(tensor: BatchTensor, address: int, run: _Run, *, bootstraps: bool) -> BatchTensor:
    """The tensor with what the run shows of it: whether a model is called with it, and whether as a mask. Where an
    episode ends matters where a next state is read, and not where actions are copied (odd: cloned_actions)."""
    is_mask = "mask" in f"{tensor.name} {run.arguments.get(address, '')}".lower()
    of_a_loss = bool(_OF_A_LOSS.search(tensor.name)) or (bootstraps and bool(_END.search(tensor.name)))
    unread = of_a_loss and address not in run.read
    return replace(tensor, passed=address in run.passed, masks=tensor.masks if is_mask else 0, unread=unread)


def _batch_tensor(name: str, number: int, tensor: torch.Tensor) -> BatchTensor:
    values = tensor.detach()
    of_two = not values.is_complex() and bool(((values == 0) | (values == values.max())).all())
    zeros = int((values == 0).sum()) if of_two and values.dim() > 1 and bool(values.any()) else 0
    return BatchTensor(
        name,
        number,
        passed=False,
        shape=tuple(tensor.shape),
        integer=not (tensor.is_floating_point() or tensor.is_complex()),
        largest=float(values.max()) if values.numel() and not values.is_complex() else 0.0,
        masks=zeros,
        zeros=zeros if binary(tensor) else 0,
    )


def _is_target(name: str) -> bool:
    """Whether a tensor is to be predicted, by its name; a past one is an input."""
    past = re.search(r"past|history|context|input|prev", name, re.IGNORECASE)
    return past is None and re.search(r"future|target|label|\by\b", name, re.IGNORECASE) is not None


def _rows_differ(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0 and len(tensor) > 1
    return plain and not torch.equal(tensor, tensor[:1].expand_as(tensor))


def named(batch: Any) -> Iterator[tuple[int, str]]:
    """The tensors of a nest by identity, and where each stands: ``batch["input_ids"]``, ``batch[1]``."""
    todo: list[tuple[Any, str]] = [(batch, "batch")]
    seen: set[int] = set()
    while todo:
        value, path = todo.pop(0)
        if id(value) in seen or is_ours(value):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield id(value), path
        elif hasattr(value, "items"):
            todo += [(v, f"{path}[{k!r}]") for k, v in value.items()]
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            todo += [(v, f"{path}[{i}]") for i, v in enumerate(value)]
        elif hasattr(value, "_asdict"):
            todo += [(v, f"{path}.{k}") for k, v in value._asdict().items()]
        elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
            todo += [(v, f"{path}.{k}") for k, v in vars(value).items()]
