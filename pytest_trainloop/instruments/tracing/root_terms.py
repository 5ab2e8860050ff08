"""What each tensor that a loop backpropagates (a root) is a sum of, and the scalars with a history that are outside it.

A root is split along additions, plain factors, sums and means. What has no history there is an additive constant:
whatever it is, it trains nothing. Nodes are kept for the whole of a short run, since a root may be made before a step
and backpropagated after it; what is read after the run is plain data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.node_sums import (
    DERIVATIVE,
    LEAF,
    PARAMETER,
    below,
    derivative_below,
    ended_below,
    origin,
    parameters_below,
    sides,
    stopped_below,
    summands,
    trained_below,
    trains,
)
from pytest_trainloop.instruments.tracing.provenance import Lineage, Node, name_of, watched
from pytest_trainloop.instruments.tracing.terms import DetachedDerivative, Scalar, Term, TermsOfRoot
from pytest_trainloop.recording.function_mode import is_aside, tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import as_real, raw_bytes, readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import is_transformed
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    DIVISIONS,
    LOSSES,
    MULTIPLICATIONS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.instruments.tracing.terms import Cut
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.watch import Watch

    Look = Callable[[str, tuple[Any, ...], Callable[[torch.Tensor], Scalar | None]], None]
    """Gets the name of a call, its arguments, and what tells the number that a tensor is."""

_NOWHERE: tuple[str, Site] = ("", ())

MOST_NODES = 60_000
"""Nodes that are kept of one run."""

MOST_COMPLETE = 500
"""Single numbers of a run of which is read off what they were computed of; of more, only of those that no other was
made of."""

_MOST_ENTRIES = 1 << 16
"""Entries of a tensor of data that are read to tell it from others."""


class _Tagged(Lineage):
    """Lineage in which a parameter is one node with its number, and a derivative a node of its own."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.places: dict[int, tuple[str, Site]] = {}
        self.sums: dict[int, float] = {}
        self.data: dict[int, str] = {}
        """Of what was computed of the batch alone: equal for equal tensors."""
        self.kept: list[Node] = []
        """Every node: its ``id`` is its key."""
        self._early: set[int] = set()

    def of(self, tensor: torch.Tensor) -> Node:
        if isinstance(tensor, nn.Parameter) and (id(tensor) in self._early or self._watch.table.index(tensor) is None):
            self._note_early(tensor)
        node = super().of(tensor)
        if node.op or node.parents or self._known.get(id(tensor), (None, None))[1] is node:
            return node
        index = self._watch.table.index(tensor)
        if index is not None:
            node.op, node.numbers = PARAMETER, (float(index),)
        elif tensor.requires_grad and tensor.is_leaf and not node.parameter:
            node.op = LEAF
        self.put(tensor, node)
        return node

    def _note_early(self, parameter: nn.Parameter) -> None:
        """A parameter that is drawn before its model is known (where the building is watched too) is one node from then
        on that it is."""
        if self._watch.table.index(parameter) is None:
            self._early.add(id(parameter))
        else:
            self._early.discard(id(parameter))
            self._known.pop(id(parameter), None)

    def put(self, tensor: torch.Tensor, node: Node) -> None:
        with contextlib.suppress(TypeError):
            self._known[id(tensor)] = (weakref.ref(tensor), node)
        self.kept.append(node)

    def draw(self, batch: Any) -> None:
        """Know the tensors of a batch as such."""
        for tensor in tensors_in(batch):
            self.adopt(tensor)
            node = self.of(tensor)
            self.kept.append(node)
            self.data[id(node)] = _digest(tensor)

    def derive(self, tensor: torch.Tensor, node: Node, parents: tuple[Node, ...]) -> None:
        """Note what is computed of the batch alone."""
        if parents and not node.history and all(id(p) in self.data for p in parents):
            self.data[id(node)] = _digest(tensor)


class RootTerms(WatchingMode):
    """Splits the roots of a run into terms; ``roots`` and ``scalars`` hold what was seen."""

    def __init__(self, look: Look | None = None) -> None:
        super().__init__()
        self.roots: list[TermsOfRoot] = []
        self.scalars: list[Scalar] = []
        self._look = look
        self._lineage: _Tagged | None = None
        self._by_node: dict[int, tuple[Scalar, Node]] = {}
        self._detached_derivatives: list[tuple[Node, DetachedDerivative]] = []
        self._added: set[int] = set()
        """The terms with a gradient that some root is the sum of, by the ``id`` of their nodes."""
        self._nodes = 0
        self._in_backward = False

    def take_batch(self, _number: int, item: Any) -> None:
        """For ``RunPlan.before_item``."""
        if self._lineage is not None:
            self._lineage.draw(item)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self.on_while_full(watch))

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        self._lineage = lineage = _Tagged(watch)
        try:
            with (
                super().watching(watch),
                patched(torch.autograd, "grad", self._around_grad),
                patched(torch.autograd, "backward", self._around_backward),
            ):
                yield
        finally:
            self._look_into_totals()
            every = len(self._by_node) <= MOST_COMPLETE
            used = {key for key, (scalar, _) in self._by_node.items() if scalar.used}
            for scalar, node in self._by_node.values():
                if every or not scalar.consumed:
                    _complete(lineage, scalar, node)
                    scalar.of_used = not scalar.used and _is_of_used(node, used, self._added)
            self._lineage = None
            self._by_node.clear()
            self._added.clear()
            self._detached_derivatives.clear()

    def _look_into_totals(self) -> None:
        """Of a total that is not backpropagated, and of which some part is, the other parts are what is lost."""
        for scalar, node in list(self._by_node.values()):
            if not scalar.used and not scalar.consumed and node.op in ADDITIONS | SUBTRACTIONS:
                used, lost = self._parts(node)
                if used:
                    scalar.consumed = True
                    for part in lost:
                        part.consumed = False

    def _parts(self, total: Node) -> tuple[bool, list[Scalar]]:
        """Whether some part of a total is backpropagated by itself, and those that are not."""
        used, lost, todo = False, list[Scalar](), list(total.parents)
        while todo:
            node = todo.pop()
            part = self._by_node[id(node)][0] if id(node) in self._by_node else None
            if part is not None and part.used:
                used = True
            elif node.op in ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | DIVISIONS or node.moves:
                todo.extend(node.parents)
            elif part is not None:
                lost.append(part)
        return used, lost

    def _around_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not self._looks():
                return original(*args, **kwargs)
            return self._derivative(original, args, kwargs, reads=False)

        return grad

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd.backward``, called by itself: ``Tensor.backward`` comes by ``call`` first."""

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._looks() and not self._in_backward:
                with self.watch.suspended():
                    self._root(args[0] if args else kwargs.get("tensors"))
            return original(*args, **kwargs)

        return backward

    def active(self) -> bool:
        """While the run is watched in full: these steps are enough to judge by."""
        return self.watch.full and super().active()

    def _looks(self) -> bool:
        return self._lineage is not None and not is_aside() and not is_transformed() and self.active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lineage = self._lineage
        reads, name = name == "__get__", name_of(func)
        if lineage is None or self._nodes > MOST_NODES:
            return passed_on(func, args, kwargs)
        if name == "grad":
            return self._derivative(func, args, kwargs, reads=reads)
        if not watched(name):
            return passed_on(func, args, kwargs)
        if name == "backward":
            return self._backward(func, args, kwargs)
        with self.watch.suspended():
            parents = lineage.before(name, args, kwargs)
            if self._look is not None:
                self._look(name, args, self.scalar_of)
        out = passed_on(func, args, kwargs)
        with self.watch.suspended():
            lineage.note(self.watch, func, name, args, kwargs, parents, out)
            for result in tensors_in(args[0] if name.startswith("__i") and args else out):
                self._note_result(lineage, result, parents, args)
        return out

    def _backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.watch.suspended():
            self._root(args[0] if args else kwargs.get("tensors"))
        self._in_backward = True
        try:
            return passed_on(func, args, kwargs)
        finally:
            self._in_backward = False

    def scalar_of(self, tensor: torch.Tensor) -> Scalar | None:
        known = None if self._lineage is None else self._by_node.get(id(self._lineage.of(tensor)))
        return known[0] if known is not None else None

    def _note_result(
        self, lineage: _Tagged, result: torch.Tensor, parents: tuple[Node, ...], given: tuple[Any, ...]
    ) -> None:
        node = lineage.of(result)
        self._nodes += 1
        lineage.kept.append(node)
        lineage.derive(result, node, parents)
        if not node.floating:
            return
        if result.numel() == 1:
            place, site = here()
            lineage.places[id(node)] = str(place), site
            if result.requires_grad:
                self._note_scalar(result, node, parents, str(place), site)
            return
        both = [p for p in parents if p.floating]
        if node.op in ADDITIONS | SUBTRACTIONS and len(both) == 2 and both[0].history != both[1].history:
            dead, live = sorted(both, key=lambda side: side.history)
            self._note_sum(lineage, result, dead, live)
            for tensor in tensors_in(given):
                if not tensor.requires_grad and tensor.is_floating_point() and readable(tensor):
                    lineage.sums[id(dead)] = float(tensor.detach().double().sum())

    def _note_scalar(self, result: torch.Tensor, node: Node, parents: tuple[Node, ...], place: str, site: Site) -> None:
        for parent in parents:
            if (before := self._by_node.get(id(parent))) is not None:
                before[0].consumed = True
        scalar = Scalar(node.op, place, site, self.watch.module_path(), node.value, window=len(self.roots))
        self._by_node[id(node)] = scalar, node
        self.scalars.append(scalar)
        on_gradient(result, lambda gradient: _weigh(scalar, gradient))

    def _note_sum(self, lineage: _Tagged, result: torch.Tensor, dead: Node, live: Node) -> None:
        """A sum, entry by entry, of what has no history and what has one."""
        place, site = here()
        lineage.places.setdefault(id(dead), (str(place), site))
        taken = derivative_below(dead, detached=False) if dead.shape == live.shape and trains(live) else None
        if taken is not None and (trained := parameters_below(taken)):
            node = lineage.of(result)
            self._detached_derivatives.append(
                (node, DetachedDerivative(lineage.places[id(taken)][0], str(place), trained))
            )

    def _derivative(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, reads: bool
    ) -> Any:
        """A call of ``autograd.grad``, or the gradient of a tensor that is no parameter, read."""
        lineage = self._lineage
        if lineage is None:
            return passed_on(func, args, kwargs)
        with self.watch.suspended():
            outputs = list(tensors_in(args[:1], kwargs.get("outputs", ())))
            inputs = [] if reads else list(tensors_in(args[1:2], kwargs.get("inputs", ())))
            known = [self.watch.table.index(t) is not None for t in (outputs if reads else inputs)]
            if not reads and all(known) and known and len(outputs) == 1:
                self._root(outputs[0])
            parents = tuple(lineage.of(t) for t in (*outputs, *inputs))
            of_weights = [_is_weight(lineage.of(t)) for t in (outputs if reads else inputs)]
        out = passed_on(func, args, kwargs)
        with self.watch.suspended():
            if not any(known) and not all(of_weights):
                place, site = here()
                for result in tensors_in(out):
                    node = Node(DERIVATIVE, parents, tuple(result.shape), history=result.requires_grad)
                    lineage.put(result, node)
                    lineage.places[id(node)] = str(place), site
        return out

    def _root(self, given: Any) -> None:
        roots, lineage = list(tensors_in((given,))), self._lineage
        at = self.watch.tick()
        if lineage is None or len(roots) != 1 or roots[0].numel() != 1 or roots[0].is_complex():
            return
        place, _ = here()
        node = lineage.of(roots[0])
        found = list(summands(node))
        live = [n for n in found if isinstance(n, Node) and trains(n)]
        self._added |= {id(n) for n in live}
        behind = {id(n) for term in live for n in below(term)}
        for n in below(node):  # what has no line of its own is seen where it is added
            for parent in n.parents:
                if id(n) in lineage.places:
                    lineage.places.setdefault(id(parent), lineage.places[id(n)])
        terms = tuple(
            self._term(lineage, n, live, behind)
            if isinstance(n, Node)
            else Term("number", *lineage.places.get(id(n.added), _NOWHERE), live=False, value=n.value, cut="number")
            for n in found
        )
        reached = (n for n in below(node, through=lambda n: n.history or bool(n.shape)) if n.op == PARAMETER)
        values = frozenset(abs(n.value) for n in below(node) if n.history and n.parents and not math.isnan(n.value))
        detached = next((derivative for n, derivative in self._detached_derivatives if id(n) in behind), None)
        self.roots.append(
            TermsOfRoot(at, str(place), terms, values, detached, frozenset(int(n.numbers[0]) for n in reached))
        )

    def _term(self, lineage: _Tagged, node: Node, live: list[Node], behind: set[int]) -> Term:
        made = origin(node)
        place, site = next((lineage.places[id(n)] for n in (made, node) if id(n) in lineage.places), _NOWHERE)
        value = lineage.sums.get(id(node), math.nan) if math.isnan(node.value) else node.value
        if id(node) in {id(n) for n in live}:
            ends = list(trained_below(node))
            return Term(
                made.op,
                place,
                site,
                live=True,
                value=value,
                parameters=frozenset(int(n.numbers[0]) for n in ends if n.op == PARAMETER),
                elsewhere=any(n.op != PARAMETER for n in ends),
                stopped=tuple(stopped_below(node)),
            )
        derivative = derivative_below(node)
        cut: Cut = "derivative" if derivative is not None else "end" if trains(made) else "before"
        if not node.parents and derivative is None:
            cut = "number"
        stopped = (n for n in below(node, through=lambda n: not n.history) if not n.history and id(n) in behind)
        parts = {id(n) for n in summands(made)} if trains(made) else set()
        return Term(
            made.op,
            place,
            site,
            live=False,
            value=value,
            cut=cut,
            derivative=lineage.places.get(id(derivative), _NOWHERE)[0],
            parameters=parameters_below(node),
            ended=frozenset(ended_below(node)) if cut == "before" else frozenset(),
            sides=sides(made),
            shared=any(parameters_below(n, trained=True) for n in stopped),
            twin=(trains(made) and id(made) in behind) or any(id(n) in parts for n in live),
        )


def _is_weight(node: Node) -> bool:
    """Whether it is a parameter, or one after a step of its own (the weights of an inner loop)."""
    return node.parameter or any(n.op == PARAMETER and n.shape == node.shape for n in below(node))


def _digest(tensor: torch.Tensor) -> str:
    """Equal for equal tensors; of large ones for all of one shape."""
    if tensor.numel() > _MOST_ENTRIES or not readable(tensor) or tensor.layout is not torch.strided:
        return f"{tuple(tensor.shape)}"
    entries = tensor.detach().cpu().contiguous().flatten()
    plain = as_real(entries).flatten()
    return hashlib.sha256(raw_bytes(plain.double())).hexdigest()[:16] + str(tuple(tensor.shape))


def _weigh(scalar: Scalar, gradient: Any) -> None:
    if isinstance(gradient, torch.Tensor) and readable(gradient):
        scalar.weights.append(float(gradient.detach().double().sum()))


def _complete(lineage: _Tagged, scalar: Scalar, node: Node) -> None:
    """Read off what a number was computed of."""
    behind = list(below(node))
    scalar.of_weights = all(n.op == PARAMETER for n in behind if not n.parents)
    scalar.of_losses = any(n.op in LOSSES for n in behind)
    scalar.parameters = frozenset(int(n.numbers[0]) for n in behind if n.op == PARAMETER and n.history)
    scalar.data = frozenset(lineage.data[id(n)] for n in behind if id(n) in lineage.data)


def _is_of_used(node: Node, used: set[int], added: set[int]) -> bool:
    """Whether all that a number trains is behind one number that is used, or it is a sum of terms that are added."""
    terms = [n for n in summands(node) if isinstance(n, Node) and trains(n)]
    if terms and all(id(n) in added for n in terms):
        return True
    reached = list(below(node, through=lambda n: n.history and id(n) not in used))
    ends = {id(n) for n in reached if n.history and not n.parents}
    met = {id(n) for n in reached} & used
    return len(met) == 1 and ends <= met
