"""What the loop backpropagates (a root), and the declared parts at the same weights, batch and random state.

Runs are in float64 and without randomness: dropout is off, norms use running statistics, and equal draws give equal
numbers. Each root and each part is read as a value and as a gradient over all weights. A gradient gives as many
equations as there are weights, so one state is enough to write the root as a weighted sum of its parts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide, Refused, UsageError, UserCodeError
from pytest_trainloop.core.whose import reraise_ours, reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.gradients.dependence import stirred
from pytest_trainloop.recording.function_mode import aside, is_aside
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import as_real
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, is_functorch
from pytest_trainloop.runs import checkpoint_bypass
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.process_state import preserved, random_states, restore_random
from pytest_trainloop.runs.shared_draws import draws
from pytest_trainloop.runs.user_traceback import user_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_ROOTS = 64
"""Roots of a run that are read, at most."""

MOST_ENTRIES = 16_384
"""Entries of a gradient's vector, at most; a larger tensor is folded into as many."""

NEEDED = "a mapping of each term's name to its value, or to (weight, value), is needed"


class Moment:
    """A moment of a run to which the loop's code can be taken back: the random states, and what modules hold besides
    weights (buffers, other tensors, counters)."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.random, self._modules = random_states(), list(modules)
        self._kept = [_copied(_held(module)) for module in self._modules]
        for kept in self._kept:
            kept.pop("training", None)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was at that moment, and at the end as before the block. Tensors are exchanged, not written to: a graph
        that is yet to be backpropagated may have kept them."""
        now = [_held(module) for module in self._modules]
        with preserved():
            try:
                self._put([_copied(kept) for kept in self._kept])
                restore_random(self.random)
                yield
            finally:
                self._put(now)

    def _put(self, states: Iterable[Mapping[str, Any]]) -> None:
        for module, state in zip(self._modules, states, strict=True):
            for name, value in state.items():
                if name in vars(module):
                    vars(module)[name] = value
                else:
                    setattr(module, name, value)


def _held(module: nn.Module) -> dict[str, Any]:
    buffers = {n: b for n, b in members.named_buffers(module, recurse=False) if not torch.nn.parameter.is_lazy(b)}
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}
    tensors = {name: v for name, v in vars(module).items() if isinstance(v, torch.Tensor) and not v.requires_grad}
    return buffers | plain | tensors


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


@dataclass(slots=True)
class Part:
    """One declared term at one state, its declared weight included."""

    value: float
    gradient: torch.Tensor | None
    """Over all weights; None where the term has no history."""
    weight: float = 1.0
    """The declared weight."""
    plain: float = math.nan
    """The value without it."""
    bare: bool = False
    """Whether it was given without a weight."""


@dataclass(slots=True)
class State:
    """A root, or the sum of several, and the parts at the same moment."""

    place: Place
    site: Site
    item: int
    value: float
    gradient: torch.Tensor
    parts: dict[str, Part]
    spans: tuple[tuple[str, int, int], ...] = ()
    """The name of each parameter, and where its entries in the vectors begin and end."""
    numels: Mapping[str, int] = field(default_factory=dict)
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    draws: tuple[str, ...] = ()
    """The draws of random numbers that the loop made for it."""
    parts_draw: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a run differs from the loop's own."""

    rounds: int = 4
    stir: float = 0.1
    """Each weight is moved by this share of its root mean square before the run."""
    seed: int = 1
    batch: int | None = None
    """The one batch that is given again and again; None for the loop's own in their order."""
    chunks: int = 1
    """The parts are asked for the rows of the nth chunk at the nth root of a batch."""
    count: int | None = None
    fit_seed: int | None = None
    plain: bool = False
    """Whether dropout and draws are left as they are, and the precision too: values then say little of each other."""


@dataclass(slots=True)
class Seen:
    """The states of one run."""

    states: list[State]
    setup: Setup
    double: bool
    items: int
    """Batches that the loop took."""

    @property
    def rounding(self) -> float:
        """The largest share of a root that rounding may leave: sums of up to 1e6 terms in float64, or in float32 where
        the run was not wholly in float64."""
        return 1e-9 if self.double else 1e-3


def seen(evidence: Evidence, setup: Setup) -> Seen:
    """The states of a run. Raises ``CannotDecide``, ``UsageError`` for what is no mapping of terms, and
    ``UserCodeError`` where ``parts`` raises."""
    reader = _Reader(setup, outside=not evidence.run().backwards())
    plan = evidence.plan()

    def repeated(loop: TrainLoop) -> Iterator[Any]:
        number = setup.batch or 0
        return itertools.repeat(loop.batch if loop.batches is None else first_batches(loop, number + 1)[number])

    record = evidence.rerun(
        replace(
            plan,
            prepare=stirred(setup.stir, setup.seed),
            contexts=reader.contexts,
            before_item=reader.note_item,
            fit=reader.with_loop(plan.fit),
            stream=None if setup.batch is None else repeated,
            count=setup.count or plan.count,
            enough=lambda record: record.rounds >= setup.rounds or len(reader.states) >= MOST_ROOTS,
            fit_seed=setup.fit_seed,
            double=not setup.plain,
            may_raise=True,
        )
    )
    if reader.error is not None:
        _require_taken(evidence, setup, reader.error)
        raise reader.error
    if reader.states:
        return Seen(reader.states, setup, record.double, record.items)
    if record.raised is not None and evidence.run().raised is None:
        raise CannotDecide(
            f"fit raised {record.raised.summary} where its loss was differentiated together with its parts, in float64"
        )
    if reader.unread:
        raise CannotDecide(f"the loss at {reader.unread} cannot be differentiated a second time")
    raise CannotDecide("fit backpropagates nothing after it takes its first batch: there is no loss to compare with")


def _require_taken(evidence: Evidence, setup: Setup, error: Exception) -> None:
    """Raise ``Refused`` where the project's functions raise, or return no terms, only in a run that differs from the
    loop's own: in float64, with moved weights, on part of a batch."""
    own = Setup(rounds=1, stir=0.0, plain=True)
    if setup == own or not isinstance(error, (UserCodeError, UsageError)):
        return
    try:
        seen(evidence, own)
    except CannotDecide:
        return
    how = "with moved weights" if setup.plain else "in float64, with moved weights"
    part = " on part of a batch" if setup.chunks > 1 else ""
    raise Refused(f"{error}{part} {how}, and not in the loop's own steps") from error


class _Reader:
    """Reads roots and parts in a run that is made in its ``contexts``."""

    def __init__(self, setup: Setup, *, outside: bool) -> None:
        self._setup = setup
        self._outside = outside  # gradients are asked for by autograd.grad and accumulate nowhere
        self._loop: TrainLoop | None = None
        self._watch: Watch | None = None
        self._item: Any = None
        self._moment: Moment | None = None
        self._number = 0
        self._of_item = 0
        self._busy = False
        self._drawn: list[str] = []
        self.states: list[State] = []
        self.unread: Place | None = None
        self.error: Exception | None = None

    def with_loop(self, fit: Callable[[TrainLoop], Any]) -> Callable[[TrainLoop], Any]:
        def noted(loop: TrainLoop) -> Any:
            self._loop = loop
            return fit(loop)

        return noted

    def note_item(self, number: int, item: Any) -> None:
        if self._watch is not None:
            self._item, self._number, self._of_item = nested.copy(item), number, 0
            self._drawn = []
            self._moment = Moment(module for _, module in self._watch.table.named_modules())

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        self._watch = watch
        try:
            yield
        finally:
            self._watch = self._loop = self._item = self._moment = None

    def contexts(self, watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        yield self._watching(watch)
        yield checkpoint_bypass.switched(checkpoint_bypass.without)
        if not self._setup.plain:
            yield NoRandomness(keeps=self._note_draw)
        yield patched(torch.autograd, "backward", functools.partial(self._before, _of_backward))
        if self._outside:
            yield patched(torch.autograd, "grad", functools.partial(self._before, _of_grad))

    def _note_draw(self, name: str) -> bool:
        if draws(name):
            self._drawn.append(name)
        return False

    def _before(self, roots_of: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(tuple(a) if hasattr(a, "__next__") else a for a in args)
            kwargs = {n: tuple(v) if hasattr(v, "__next__") else v for n, v in kwargs.items()}
            watching = self._watch is not None and not self._watch.is_suspended and not is_aside()
            full = self._item is None or self.error is not None or len(self.states) >= MOST_ROOTS
            if not watching or full or self._busy:
                return original(*args, **kwargs)
            self._busy = True  # torch's own backward, called by a tensor's, comes by here a second time
            try:
                try:
                    self._look(_total(*roots_of(*args, **kwargs)))
                except Exception as error:  # raised after the run: a loop may swallow what its backward pass raises
                    self.error = error
                return original(*args, **kwargs)
            finally:
                self._busy = False

        return call

    def _look(self, root: torch.Tensor | None) -> None:
        watch, loop = self._watch, self._loop
        if root is None or watch is None or loop is None or self._moment is None or loop.parts is None:
            return
        place, site = here()
        known = {
            entry.name: tensor
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True)
            if tensor.requires_grad and tensor.is_leaf and not torch.nn.parameter.is_lazy(tensor)
        }
        tensors = list(known.values())
        drawn = tuple(self._drawn)
        try:
            gradient = _gradient(root, tensors)
        except RuntimeError as error:
            reraise_raised(error)
            self.unread = place
            return
        if gradient is None:
            return
        chunks = _chunks(loop, nested.copy(self._item), self._setup.chunks)
        with self._moment.again(), torch.enable_grad():
            self._drawn = []
            parts = _parts(loop, chunks[self._of_item % len(chunks)], tensors)
            parts_draw = tuple(self._drawn)
        self._drawn = list(drawn)
        self._of_item += 1
        weights = _flat(tensors, tensors)
        ends = list(itertools.accumulate(map(len, weights)))
        self.states.append(
            State(
                place=place,
                site=site,
                item=self._number,
                value=float(root.detach()),
                gradient=gradient,
                parts=parts,
                spans=tuple(zip(known, [0, *ends], ends, strict=False)),
                numels={name: tensor.numel() for name, tensor in known.items()},
                weights=torch.cat(weights),
                draws=drawn,
                parts_draw=parts_draw,
            )
        )


def _gradient(root: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """None where the root has no history."""
    if not root.requires_grad or not tensors:
        return None
    with aside():
        grads = torch.autograd.grad(root, tensors, retain_graph=True, allow_unused=True)
    return torch.cat(_flat(grads, tensors))


def _of_backward(tensors: Any, grad_tensors: Any = None, *_args: Any, **more: Any) -> tuple[Any, Any]:
    return tensors, grad_tensors if grad_tensors is not None else more.get("grad_variables")


def _of_grad(outputs: Any, _inputs: Any, grad_outputs: Any = None, *_args: Any, **_more: Any) -> tuple[Any, Any]:
    return outputs, grad_outputs


def _total(tensors: Any, gradients: Any) -> torch.Tensor | None:
    """The one number that is differentiated; None where it cannot be read."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients or [None] * len(roots))
    if not roots or any(not isinstance(t, torch.Tensor) or not has_values(t) or is_functorch(t) for t in roots):
        return None
    if any(t.is_complex() or (g is None and t.numel() != 1) for t, g in zip(roots, given, strict=True)):
        return None
    with torch.enable_grad():
        terms = [t.sum() if g is None else (t * g).sum() for t, g in zip(roots, given, strict=True)]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _chunks(loop: TrainLoop, batch: Any, count: int) -> list[Any]:
    if count == 1:
        return [batch]
    axis = loop.batch_dim if isinstance(loop.batch_dim, int) else 0
    try:
        if loop.split_batch is not None:
            return list(loop.split_batch(batch, count))
        rows = nested.rows(batch, axis)
        size = math.ceil(rows / count)
        return [nested.take(batch, range(at, min(at + size, rows)), axis) for at in range(0, rows, size)] or [batch]
    except Exception as error:  # of the project's own function, or torch's of a layout that has no rows
        reraise_ours(error)
        raise Refused(f"the batch cannot be split into {count} parts: {type(error).__name__}: {error}") from error


def _parts(loop: TrainLoop, batch: Any, tensors: Sequence[torch.Tensor]) -> dict[str, Part]:
    try:
        given = loop.parts(loop.model, batch)  # type: ignore[misc]
    except UsageError:
        raise
    except Exception as error:  # of the project's parts
        reraise_ours(error)
        raise UserCodeError(user_error(error, "TrainLoop.parts"), one_check=True) from None
    if not isinstance(given, Mapping):
        raise loop.located(UsageError(f"TrainLoop.parts returned {_described(given)}; {NEEDED}"))
    if not given:
        raise loop.located(UsageError(f"TrainLoop.parts returned an empty mapping; {NEEDED}"))
    try:
        return {str(name): _part(str(name), value, tensors) for name, value in given.items()}
    except UsageError as error:
        raise loop.located(error) from None


def _part(name: str, given: Any, tensors: Sequence[torch.Tensor]) -> Part:
    bare = not (isinstance(given, (tuple, list)) and len(given) == 2)
    weight, value = (1.0, given) if bare else given
    for one in (weight, value):
        _require_number(name, one)
    whole = weight * value
    number, weight, plain = (float(v.detach() if isinstance(v, torch.Tensor) else v) for v in (whole, weight, value))
    if not math.isfinite(number):
        raise CannotDecide(f"{name} of parts= is {number} at some step (see finite)")
    gradient = _gradient(whole.sum(), tensors) if isinstance(whole, torch.Tensor) else None
    return Part(number, gradient, weight, plain, bare)


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return
        raise UsageError(
            f"TrainLoop.parts gives {name!r} as {_described(value)}; one number is needed: take the mean that the loop "
            "takes"
        )
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"TrainLoop.parts gives {name!r} as {nested.describe(value)}; a number or a tensor with one entry is "
            "needed, or (weight, value)"
        ) from None


def _described(value: Any) -> str:
    """Without the dtype, which is that of this run."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else nested.describe(value)


def _flat(gradients: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each gradient as a vector in float64; zeros, in the shape of ``like``, where it is None.

    A larger tensor is folded: its entries are added up, with random signs, into ``MOST_ENTRIES`` places. The map is
    linear and always the same, so a weighted sum of gradients is the same weighted sum of vectors, and a gradient that
    is not zero gives a vector that is not zero.
    """
    return [_folded(torch.zeros_like(t) if g is None else g) for g, t in zip(gradients, like, strict=True)]


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = as_real(values).reshape(-1).to(device="cpu", dtype=torch.float64)
    if len(values) <= MOST_ENTRIES:
        return values.clone()
    random = torch.Generator().manual_seed(len(values))
    signs = torch.randint(0, 2, values.shape, generator=random).to(torch.float64) * 2 - 1
    padded = torch.zeros(math.ceil(len(values) / MOST_ENTRIES) * MOST_ENTRIES, dtype=torch.float64)
    padded[: len(values)] = values * signs
    return padded.view(-1, MOST_ENTRIES).sum(0)
