"""A run in step with another one on a part of its batch: where does the rest come in?

A call that keeps the part to itself commutes with cutting: on the part of its inputs it gives the part of its outputs.
The ``Tape`` holds the calls of the run on the part. ``Lockstep`` compares each call of a run on the whole with it.
If the results differ on the part, it makes the call once more on the part of its inputs, with all else as on the tape
(sizes, constants, masks). If this gives what is on the tape, the rest came in there: the call is an ``Entry``. Its
result can be replaced by that of the tape, and then all after it is clean: a counterfactual for any call.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.cut import close
from pytest_trainloop.instruments.batches.values import plain, two_valued
from pytest_trainloop.instruments.tracing.arguments import bound_arguments, in_place, is_dense
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.seams import closed, opened, passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import writes_in_place
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    AUTOGRAD_CALLS,
    IN_PLACE_OPERATORS,
    LOSSES,
    SOFTMAXES,
    SUBTRACTIONS,
)
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.shared_draws import Draw, draws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.instruments.batches.cut import Cut
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

Key = tuple[str, str, int]
"""A call: its function, its line, and how often that line had called it before."""

MOST_BYTES = 2**30
"""What a tape keeps at most. Calls after that are not compared: what comes in there is not found."""

INDEXED = frozenset({"gather", "take_along_dim", "__getitem__", "index_select"})
_UNSEEN = AUTOGRAD_CALLS | {"requires_grad_", "detach_", "item", "tolist", "numpy", "deepcopy", "__deepcopy__"}
"""To copy a batch is no step of its computation; the arguments hold objects that are half built."""
_DOT_PRODUCT = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Seen(NamedTuple):
    """A call and where it is made."""

    op: str
    place: Place


@dataclass(slots=True, eq=False)
class Meeting:
    """A call in which outputs meet values of the batch: in a loss, a difference or an index."""

    op: str
    place: Place
    trained: bool = False
    """Whether outputs of the rest get a gradient there."""
    in_the_model: bool = False
    """Whether weights take up what it gives."""


@dataclass(slots=True, eq=False)
class Entry:
    """A call through which the rest of the batch comes into its part."""

    op: str
    place: Place
    axes: int
    """Those of the first tensor that was cut, or else of the first."""
    lost: int
    """How many axes less its first output has."""
    joins: bool
    """Whether one of its tensors was cut: else a table or a constant is another one for the whole."""
    pairs: bool
    """Whether the first tensor that was cut has two such axes: pairs of entries."""
    moved: bool
    """Whether a constant that it takes has other values in the part."""
    zeros: bool
    """Whether all else that it takes is zero."""
    trained: bool
    """Whether what it takes has a gradient."""
    table: int
    """The most entries of a table that it takes."""
    met: tuple[Meeting, ...]
    """The calls before in which outputs met values of the batch, the last one first."""
    module: str
    """The path of the module that makes it."""
    in_the_model: bool = False
    """Whether weights take up what it gives."""
    spreads: bool = False
    """Whether what it gives goes back to every entry."""
    behind: bool = False
    """Whether what it gives for the rest, or behind it, has a gradient."""
    used: bool = False
    """Whether the loss depends on a result that differs: of a recurrent layer the last state may be left unused."""

    @property
    def named(self) -> str:
        """The function and the module, for a message."""
        return f"{self.op} in {self.module}" if self.module else self.op


class Call(NamedTuple):
    """One call of a run, as the modes below look at it."""

    key: Key
    place: Place
    func: Callable[..., Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments as they were before the call."""
    tensors: list[torch.Tensor]
    """Those among the arguments: of a call that writes in place, the one that is written to."""
    out: Any
    """What it gives, or the tensor that it has written to."""
    made: list[torch.Tensor]


class Calls(WatchingMode, NoRandomness):
    """Numbers the calls of a run without randomness. With ``pad_row_zero`` each embedding reads zeros in the row of its
    ``padding_idx``, where this is the id."""

    def __init__(self, *, statistics: bool = False, pad_row_zero: int | None = None) -> None:
        super().__init__()
        self._count: Counter[tuple[str, str]] = Counter()
        self._statistics, self._pad_row_zero = statistics, pad_row_zero
        self.drawn: list[Draw] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._statistics and name == "batch_norm":
            return passed_on(func, args, kwargs)
        known, tensors = name_of(func), list(tensors_in(args, kwargs))
        if known in _UNSEEN or not tensors or not all(map(is_dense, tensors)):
            return self._drawn(known, args, kwargs, NoRandomness.call(self, name, func, args, kwargs))
        first = args[0] if args else None
        written = first if isinstance(first, torch.Tensor) and writes(known) else None
        with self.watch.suspended():
            place = here()[0]
            self._count[known, str(place)] += 1
            key = known, str(place), self._count[known, str(place)]
            args, kwargs = self.prepared(key, place, tensors, args, kwargs)
            before = args if written is None else (written.clone(), *args[1:])
        out = self._drawn(known, args, kwargs, NoRandomness.call(self, name, func, args, kwargs))
        with self.watch.suspended():
            result = out if written is None else written
            made = list(tensors_in(result))
            if not all(map(is_dense, made)):
                return out
            other = self.looked_at(Call(key, place, func, (before, kwargs), tensors, result, made))
            if written is None:
                return other
            if other is not written:
                written.copy_(other)
        return out

    def prepared(self, key: Key, place: Place, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments that the call is made with."""
        return args, kwargs

    def _drawn(self, name: str, args: Any, kwargs: Any, out: Any) -> Any:
        if draws(name):
            numbers = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, (int, float)))
            self.drawn.append((name, tuple(out.shape[1:]) if isinstance(out, torch.Tensor) else (), numbers))
        return out

    def looked_at(self, call: Call) -> Any:
        """What the call gives, or what is put in its place."""
        if self._pad_row_zero is None or call.key[0] != "embedding":
            return call.out
        given = bound_arguments(torch.nn.functional.embedding, *call.given)
        if given.get("padding_idx") != self._pad_row_zero:
            return call.out
        return call.out.masked_fill((given["input"] == self._pad_row_zero).unsqueeze(-1), 0.0)

    def again(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function of the project's call gives in a call of ours."""
        seam = opened()
        try:
            return NoRandomness.call(self, getattr(func, "__name__", ""), func, args, kwargs)
        finally:
            closed(seam)


def writes(name: str) -> bool:
    """Whether a call of this name writes to its first argument."""
    return name in IN_PLACE_OPERATORS or in_place(name)


class Taped(NamedTuple):
    """A call of the run on the part. Of its arguments that have a gradient the shape is kept alone."""

    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    place: Place


class Tape(Calls):
    """The calls of the run on the part."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Key, Taped] = {}
        self._bytes = 0
        self._copies: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        try:
            with super().watching(watch):
                yield
        finally:
            self._copies.clear()

    def looked_at(self, call: Call) -> Any:
        if self._bytes <= MOST_BYTES:
            args, kwargs = (nested.mapped(each, lambda _, t: self._given(t), is_tensor) for each in call.given)
            self.calls[call.key] = Taped(args, kwargs, [self._copy(t) for t in call.made], call.place)
        return call.out

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("meta") if tensor.requires_grad else self._copy(tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """One copy of each tensor, however often it is taken, until it is written to."""
        key = id(tensor), writes_in_place(tensor)
        known = self._copies.get(key)
        if known is None or known[0]() is not tensor:
            known = self._copies[key] = weakref.ref(tensor), tensor.detach().clone()
            self._bytes += tensor.numel() * tensor.element_size()
        return known[1]


class Unlike(Calls):
    """The run on a batch with other values in some positions: the first call that carries them to other positions."""

    def __init__(self, tape: Tape, length: int) -> None:
        super().__init__()
        self._tape, self._length = tape.calls, length
        self.first: Seen | None = None

    def looked_at(self, call: Call) -> Any:
        taped = self._tape.get(call.key)
        for own, other in zip(call.made, taped.outputs if taped else (), strict=False):
            by_position = any(abs(n - self._length) <= 1 for n in own.shape)
            if self.first is None and own.requires_grad and not by_position and not close(own, other):
                self.first = Seen(call.key[0], call.place)
        return call.out


class _Known(NamedTuple):
    """What is known of a tensor of the run on the whole."""

    tensor: weakref.ref[torch.Tensor]
    of_batch: bool = False
    """Whether it is made of the batch's values alone."""
    binary: bool = False
    """Whether these are zeros and ones: a mask, and a target only where a loss takes them as one."""
    met: tuple[Meeting, ...] = ()
    """The meetings that it lies behind, the last one first."""
    entry: Entry | None = None
    """The entry that was replaced before it."""


class Lockstep(Calls):
    """The run on the whole. ``patched`` says of which entries the result is replaced. If ``silent``, linear layers get
    no gradient from the rest."""

    def __init__(self, tape: Tape, cut: Cut, patched: Callable[[Entry], bool], *, silent: bool = False) -> None:
        super().__init__()
        self._tape, self._cut, self._patched, self._silent = tape.calls, cut, patched, silent
        self._known: dict[int, _Known] = {}
        self._met: list[Meeting] = []
        self._meeting: Meeting | None = None
        """That of the call under way."""
        self.entries: list[Entry] = []
        self.names: set[str] = set()
        """Functions that were given something that was cut."""
        self.unlike: Seen | None = None
        """The first call that is made more often, or gives something else for the part and cannot be made on it."""
        self.looks_elsewhere: Seen | None = None
        """The first attention whose weights are all outside of the part."""
        self.hides_queries = False
        """Whether a mask hides what the rest looks at, and not the rest: its axes are swapped."""
        self.length_is_target = False
        """Whether the size of the part is the target of a loss."""

    @property
    def meetings(self) -> list[Meeting]:
        """Where outputs of the rest meet values of the batch in the loss and get a gradient from them, in order."""
        return [m for m in self._met if m.trained and not m.in_the_model]

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        try:
            with super().watching(watch):
                yield
        finally:
            self._tape, self._known = {}, {}

    def before_item(self, _number: int, item: Any) -> None:
        """For the plan of the run."""
        for _, tensor in nested.paths(item):
            if plain(tensor):
                self._known[id(tensor)] = _Known(weakref.ref(tensor), True, two_valued(tensor))

    def looked_at(self, call: Call) -> Any:
        name, made, taped = call.key[0], call.made, self._tape.get(call.key)
        met, replaced = self._follow(call)
        if taped is None and (*call.key[:2], 1) in self._tape and any(t.requires_grad for t in made):
            self.unlike = self.unlike or Seen(name, call.place)  # a loop over positions that goes on
        if taped is None or len(made) != len(taped.outputs):
            return call.out
        if self._silent and name == "linear" and made[0].dim() > 2 and made[0].requires_grad:
            shape = taped.outputs[0].shape
            on_gradient(made[0], lambda gradient: self._cut.alone(gradient, shape))
        floats = [n for n, t in enumerate(made) if t.is_floating_point()]
        before = list(tensors_in(taped.args, taped.kwargs))
        given = list(tensors_in(*call.given))
        if len(before) == len(given) and any(a.shape != b.shape for a, b in zip(given, before, strict=True)):
            self.names.add(name)
            if replaced is not None and any(made[n].shape != taped.outputs[n].shape for n in floats):
                replaced.spreads = True
        if name in LOSSES and len(given) > 1 and given[1].numel() and not given[1].requires_grad:
            self.length_is_target |= bool((given[1] == len(self._cut.kept)).all())
        if name in ATTENTION | {"softmax"} and self.looks_elsewhere is None and self._looks_elsewhere(call, taped):
            self.looks_elsewhere = Seen(name, call.place)
        if not floats or any(self._is_the_part(made, taped.outputs, floats, inner) for inner in (False, True)):
            return call.out
        if name in SOFTMAXES and not self.hides_queries:
            self.hides_queries = self._hides_queries(made[0].detach(), taped.outputs[0].shape[-1])
        for inner in (False, True):
            parts = list(tensors_in(self._on_the_part(call, taped, inner=inner)))
            if len(parts) == len(made) and all(close(parts[n], taped.outputs[n]) for n in floats):
                return self._entered(self._entry(call, taped, given, before, met), call, parts, inner=inner)
        self.unlike = self.unlike or Seen(name, call.place)
        return call.out

    def _is_the_part(self, made: list[torch.Tensor], taped: list[torch.Tensor], which: list[int], inner: bool) -> bool:
        parts = (self._cut.take(made[n].detach(), taped[n].shape, inner=inner) for n in which)
        return all(part is not None and close(part, taped[n]) for n, part in zip(which, parts, strict=True))

    def _entered(self, entry: Entry, call: Call, parts: list[torch.Tensor], *, inner: bool) -> Any:
        """What the call gives, or where it is patched, with these parts in it."""
        self.entries.append(entry)
        patched, alone, given = self._patched(entry), entry.op in SOFTMAXES, []
        for own, part in zip(call.made, parts, strict=True):
            replaced = patched and own.is_floating_point()
            given.append(self._cut.put(part, own, inner=inner, alone=alone) if replaced else own)
            if own.requires_grad and (own.shape != part.shape or not close(own.detach(), part)):

                def look(gradient: torch.Tensor, shape: torch.Size = part.shape) -> None:
                    entry.behind |= bool(self._cut.has_rest(gradient, shape))

                def use(_gradient: torch.Tensor) -> None:
                    entry.used = True

                on_gradient(own, look)
                taken = self._cut.take(own.detach(), part.shape, inner=inner)
                if taken is None or not close(taken, part):
                    on_gradient(given[-1], use)
        if not patched:
            return call.out
        put = iter(given)
        out = nested.mapped(call.out, lambda _, t: next(put), is_tensor)
        for tensor in tensors_in(out):
            self._known[id(tensor)] = _Known(weakref.ref(tensor), met=entry.met, entry=entry)
        return out

    def _looks_elsewhere(self, call: Call, taped: Taped) -> bool:
        """Whether all attention of the part goes to the rest: no weight inside, and some outside."""
        name = call.key[0]
        weights, keys = call.made[0].detach(), taped.outputs[0].shape[-1]
        if name == "multi_head_attention_forward":
            given, before = (bound_arguments(call.func, a, k) for a, k in (call.given, taped[:2]))
            if not given or not before:
                return False
            keys = before["key"].shape[0]
            weights = self.again(call.func, (), {**given, "need_weights": True})[1].detach()
        elif name == "scaled_dot_product_attention":
            given, before = (dict(zip(_DOT_PRODUCT, a, strict=False)) | k for a, k in (call.given, taped[:2]))
            keys, every = before["key"].shape[-2], given["key"].shape[-2]
            one = torch.eye(every, dtype=given["query"].dtype, device=given["query"].device)
            given["value"] = one.expand(*given["key"].shape[:-1], -1)
            first = [given.pop(word) for word in _DOT_PRODUCT[:3]]
            weights = self.again(call.func, first, given).detach()
        if weights.dim() < 2 or weights.shape[-1] == keys:
            return False
        at = self._cut.places(weights.shape[-1], keys)
        if at is None:
            return False
        at = at.to(weights.device)
        if weights.shape[-2] == weights.shape[-1] and weights.dim() > 2:
            weights = weights.index_select(-2, at)
        inside = weights.index_select(-1, at).sum(-1)
        return bool((inside == 0).all()) and bool((weights.sum(-1) > 0).all())

    def _hides_queries(self, weights: torch.Tensor, keys: int) -> bool:
        """Whether weights (..., queries, keys) are all equal for each query outside of the part, as where all of its
        scores are masked, and for none inside."""
        every = weights.shape[-1] if weights.dim() > 2 else 0
        at = self._cut.places(every, keys) if every > keys and weights.shape[-2] == every else None
        if at is None:
            return False
        masked = weights.amax(-1) == weights.amin(-1)
        inside = torch.zeros(every, dtype=torch.bool, device=weights.device).index_fill(0, at.to(weights.device), True)
        return bool(masked[..., ~inside].all()) and not bool(masked[..., inside].any())

    def _on_the_part(self, call: Call, taped: Taped, *, inner: bool) -> Any:
        """What the call gives on the part of what has a gradient, with all else as on the tape; None where it cannot
        be made so."""

        def part(own: Any, other: Any) -> Any:
            if is_tensor(own) and is_tensor(other):
                if not (own.requires_grad or other.is_meta):
                    return other
                taken = own if own.shape == other.shape else self._cut.take(own, other.shape, inner=inner)
                if taken is None:
                    raise ValueError("the shapes do not say where the part lies")
                return taken
            if isinstance(own, (list, tuple)) and type(own) is type(other) and len(own) == len(other):
                found = [part(a, b) for a, b in zip(own, other, strict=True)]
                return type(own)(*found) if hasattr(own, "_fields") else type(own)(found)
            if isinstance(own, dict) and isinstance(other, dict):
                return {k: part(v, other.get(k)) for k, v in own.items()}
            return other

        try:
            args, kwargs = part(call.given[0], taped.args), part(call.given[1], taped.kwargs)
            if not writes(call.key[0]) or not is_tensor(args[0]):
                return self.again(call.func, args, kwargs)
            first = args[0].clone()
            self.again(call.func, (first, *args[1:]), kwargs)
            return first
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError):
            return None

    def _entry(
        self, call: Call, taped: Taped, given: list[torch.Tensor], before: list[torch.Tensor], met: tuple[Meeting, ...]
    ) -> Entry:
        pairs = list(zip(given, before, strict=False))
        cut = [(a, b) for a, b in pairs if a.shape != b.shape and a.is_floating_point()]
        parts = [(self._cut.take(a, b.shape), b) for a, b in pairs if not (a.requires_grad or b.is_meta)]
        first = cut[0][0] if cut else given[0]
        tables = [max(t.shape[:-1], default=0) for t in given if t.grad_fn is None and t.is_floating_point()]
        return Entry(
            call.key[0],
            call.place,
            axes=first.dim(),
            lost=first.dim() - call.made[0].dim(),
            joins=bool(cut),
            pairs=bool(cut) and sum(n != m for n, m in zip(first.shape, cut[0][1].shape, strict=False)) > 1,
            moved=any(a is None or not close(a, b) for a, b in parts),
            zeros=bool(cut) and self._cut.has_rest(first.detach(), cut[0][1].shape) is False,
            trained=any(t.requires_grad for t in given),
            table=max(tables, default=0),
            met=met,
            module=self.watch.module_path(),
        )

    def _of(self, tensor: torch.Tensor) -> _Known | None:
        known = self._known.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def prepared(self, key: Key, place: Place, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Where outputs meet values of the batch, with outputs whose gradient from this call alone is looked at."""
        of_batch = [known for t in tensors if (known := self._of(t)) is not None and known.of_batch]
        taped = self._tape.get(key)
        if taped is None or not _meets(key[0], tensors, of_batch):
            return args, kwargs
        self._met.append(Meeting("subtraction" if key[0] in SUBTRACTIONS else key[0], place))
        meeting = self._meeting = self._met[-1]

        def hooked(own: Any, other: Any) -> Any:
            if not (is_tensor(own) and own.requires_grad and is_tensor(other) and own.shape != other.shape):
                return own
            seen = own.view_as(own)

            def look(gradient: torch.Tensor) -> None:
                meeting.trained |= bool(self._cut.has_rest(gradient, other.shape))

            on_gradient(seen, look)
            return seen

        args = tuple(hooked(a, b) for a, b in itertools.zip_longest(args, taped.args))
        return args, {word: hooked(value, taped.kwargs.get(word)) for word, value in kwargs.items()}

    def _follow(self, call: Call) -> tuple[tuple[Meeting, ...], Entry | None]:
        """The meetings that the results lie behind, and the entry that was replaced before them."""
        known = [each for t in call.tensors if (each := self._of(t)) is not None]
        of_batch = [each for each in known if each.of_batch]
        met = tuple(dict.fromkeys(m for each in reversed(known) for m in each.met))
        entry = next((each.entry for each in known if each.entry is not None), None)
        if any(isinstance(t, nn.Parameter) for t in call.tensors):
            for meeting in met:
                meeting.in_the_model = True
            if entry is not None:
                entry.in_the_model = True
            met = ()
        elif self._meeting is not None:
            met = (self._meeting, *met)
        self._meeting = None
        if known or met:
            binary = all(each.binary for each in of_batch)
            for tensor in call.made:
                from_batch = bool(of_batch) and not tensor.requires_grad
                self._known[id(tensor)] = _Known(weakref.ref(tensor), from_batch, binary, met, entry)
        return met, entry


def _meets(name: str, tensors: list[torch.Tensor], of_batch: list[_Known]) -> bool:
    if not of_batch or not any(t.requires_grad for t in tensors) or any(isinstance(t, nn.Parameter) for t in tensors):
        return False
    if name in INDEXED and not tensors[0].requires_grad:
        return False  # the batch's values looked up, not the outputs
    return name in LOSSES or (name in SUBTRACTIONS | INDEXED and not all(each.binary for each in of_batch))


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
