"""An input and its target that are cut at two places: both are given the same content, and what arrives is compared.

Each place has a number of its own: the value of an entry says where it lay. It is put into the tensors that are stored
for the data, or into the batches where none are. Where one draw cuts both, each number of the target lies where one
number of the input lies, in all rows. Where each is cut by a draw of its own, a number lies on several, and these on
several. A value that is changed on the way is found no second time: noise and brightness say nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.data_order.arrivals import Arrivals
from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.checks.state.data_order.streams import MOST_BYTES, ReachableObjects
from pytest_trainloop.checks.state.two_runs import line_of
from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.values import plain
from pytest_trainloop.instruments.tracing.statements import second_of_two_calls
from pytest_trainloop.recording.source import place_of, user_frames
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    DIVISIONS,
    LOSSES,
    MULTIPLICATIONS,
    SUBTRACTIONS,
)
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from pytest_trainloop.checks.state.data_order.arrivals import Leaf
    from pytest_trainloop.checks.state.data_order.streams import Stream
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.events import Place

LEAST_PLACES = 16
"""Places of a row, at least."""

MOST_ROWS, MOST_WIDTH = 8, 64
"""Rows of a batch that are compared, and places of each dimension."""

MOST_STORED = 4096
"""Stored tensors that are given other content, at most."""

ROUNDS = 2
"""Batches that are compared: of one row each, two."""

_NUMBERS = re.compile(r"\[\d+\]")


def cut_at_two_places(stream: Stream) -> Iterator[Finding]:
    """A target that meets a prediction entry by entry, and lies at other places than the input of that prediction."""
    evidence, batches = stream.evidence, stream.reading.epochs[0].batches
    sizes = Counter(_places(leaf.shape) for leaf in batches[0].values()) if batches else Counter[tuple[int, ...]]()
    if not stream.source.given or not any(n > 1 for last, n in sizes.items() if last) or "fit" not in evidence.offers:
        return
    seen = Places({id(value) for _, value in stream.held.stored})
    try:
        evidence.rerun(
            fit=seen.fit,
            contexts=seen.contexts,
            before_item=seen.take,
            enough=lambda record: record.rounds >= ROUNDS,
            may_raise=True,
            kept=None,
        )
    finally:
        seen.put_back()
    item = line_of(getattr(type(getattr(stream.source.of, "dataset", None)), "__getitem__", None))
    for path, target in seen.met:
        wrong, places, moved = seen.displaced(path, target)
        if wrong >= LEAST_PLACES / 2 and 2 * wrong > places:
            facts: dict[str, Any] = {"inputs": path, "labels": target, "changed": wrong, "rows": places}
            # an input at any place may have its target at one place (odd: a_target_at_one_place)
            facts |= {"stream": stream.source.name, "moved": moved, "level": "fault" if moved else "advice"}
            facts["change"] = seen.second_cut(path, target) or second_of_two_calls(item)
            yield found("labels_apart", stream.source, (path, target), "cut", kinds=("input",) * 2, **facts)
            return


def _places(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the dimensions of places: the last two, or the only one. Empty where they are few."""
    last = tuple(shape[-2:])
    return last if math.prod(last) >= LEAST_PLACES else ()


def displaced(inputs: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor]) -> tuple[int, int, bool]:
    """How many numbers of the targets lie where several of the inputs lie that lie on several themselves; how many
    come in more than one row; whether the targets lie at other places in other rows. Numbers that come twice in a row
    are padding."""
    moved: dict[int, set[float]] = defaultdict(set)
    inputs_at, targets_at, times = defaultdict(set), defaultdict(set), Counter[float]()
    for x, y in zip(inputs, targets, strict=True):
        if x is None:
            continue
        last = y.shape[-2:] if y.dim() > 2 and y.shape[-2:] == x.shape[-2:] else y.shape[-1:]
        if len(x) != len(y) or y.shape[-len(last) :] != x.shape[-len(last) :] or not y.numel() or not x.numel():
            continue
        for own, other in zip(_rows(x, last), _rows(y, last), strict=True):
            once_x, once_y = Counter(own), Counter(other)
            for place, (u, v) in enumerate(zip(own, other, strict=True)):
                if once_x[u] == once_y[v] == 1:
                    inputs_at[v].add(u)
                    targets_at[u].add(v)
                    times[v] += 1
                    moved[place].add(v)
    several = [v for v, number in times.items() if number > 1]
    wrong = [v for v in several if len(inputs_at[v]) > 1 and all(len(targets_at[u]) > 1 for u in inputs_at[v])]
    return len(wrong), len(several), any(len(numbers) > 1 for numbers in moved.values())


def _rows(tensor: torch.Tensor, last: torch.Size) -> list[list[float]]:
    """The values in the middle of the first rows, of the first of several channels."""
    first = tensor[:MOST_ROWS].double().reshape(-1, math.prod(tensor.shape[1:]) // last.numel(), *last)[:, 0]
    for axis, size in enumerate(last, start=1):
        width = min(size, MOST_WIDTH)
        first = first.narrow(axis, (size - width) // 2, width)
    rows: list[list[float]] = first.flatten(1).tolist()
    return rows


class Places(Arrivals):
    """Gives leaves a number for each place, and keeps what arrives of them, first, second and so on."""

    comparing = ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | DIVISIONS | LOSSES

    def __init__(self, kept: AbstractSet[int]) -> None:
        """``kept``: by ``id``, what every build of the loop holds. It is not filled: what it caches stays."""
        super().__init__()
        self._kept, self._on_cpu = kept, True
        self._arrived: dict[Leaf, list[torch.Tensor]] = defaultdict(list)
        self._compared: dict[Leaf, torch.Tensor] = {}
        self._moves: dict[str, list[tuple[Place, ...]]] = defaultdict(list)
        """The lines, innermost first, at which a leaf was moved."""
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stored = False

    def fit(self, loop: TrainLoop) -> Callable[[Any], Any]:
        """The loop's own, with other content in what is stored for its batches."""
        parameters = (p for module in loop.modules.values() for p in members.parameters(module))
        self._on_cpu = all(p.device.type == "cpu" for p in parameters)
        held = [
            (path, value)
            for path, value in ReachableObjects.by(("batches", loop.batches)).stored
            if isinstance(value, torch.Tensor) and plain(value)
        ]
        by_sizes: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for path, value in held:
            several = value.dim() > 1 and not _NUMBERS.search(path)
            by_sizes[_places(value.shape[several:])].append((_NUMBERS.sub("", path), value))
        fresh = self._kept.isdisjoint(id(value) for _, value in held)
        small = len(held) <= MOST_STORED and sum(value.nbytes for _, value in held) <= MOST_BYTES
        for sizes, of_one_size in by_sizes.items() if fresh and small else ():
            if sizes and len({path for path, _ in of_one_size}) > 1:
                self._stored = True
                for _, value in of_one_size:
                    self._fill(value, sizes)
        return fit_of(loop)

    def take(self, number: int, item: Any) -> None:
        """Have the leaves with places followed; they are filled where nothing stored was."""
        for path, leaf in nested.paths(item):
            if plain(leaf) and (sizes := _places(leaf.shape[1:])):
                if not self._stored:
                    self._fill(leaf, sizes)
                self.adopt((nested.shown(path), number), leaf)

    def _fill(self, tensor: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Random numbers, of which no two sums are equal: of a mixture of two places nothing is said. A class outside
        of its table ends the process on a GPU."""
        if not tensor.is_floating_point() and not self._on_cpu:
            return
        numbers = torch.rand(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        content = (numbers if tensor.is_floating_point() else numbers * 2**20).to(tensor.device, tensor.dtype)
        self._filled.append((tensor, tensor.data))
        tensor.data = content.expand_as(tensor).clone()

    def put_back(self) -> None:
        """Give everything its own content again: no memory of the project's was written."""
        while self._filled:
            tensor, own = self._filled.pop()
            tensor.data = own

    def note_move(self, leaf: Leaf) -> None:
        lines = (place_of(frame.f_code.co_filename, frame.f_lineno) for frame in user_frames(8))
        self._moves[leaf[0]].append(tuple(lines))

    def note_arrival(self, leaf: Leaf, value: torch.Tensor) -> None:
        if value.is_floating_point():
            self._arrived[leaf].append(value)

    def note_comparison(self, leaf: Leaf, value: torch.Tensor) -> None:
        self._compared.setdefault(leaf, value)

    def displaced(self, path: str, target: str) -> tuple[int, int, bool]:
        """``displaced`` of what the loop does with the input first, second and so on in each batch: the fewest."""
        compared = {leaf[1]: value for leaf, value in self._compared.items() if leaf[0] == target}
        uses = itertools.zip_longest(*(self._arrived[path, number] for number in compared))
        found = (displaced(xs, list(compared.values())) for xs in uses)
        return min((one for one in found if one[1]), default=(0, 0, False))

    def second_cut(self, first: str, second: str) -> str:
        """The line that moves the second leaf by a helper, where another line of that function moves the first."""
        for lines in self._moves[second]:
            for others in self._moves[first]:
                pairs = list(zip(lines, others, strict=False))
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
                if at and pairs[at][0].file == pairs[at][1].file:
                    return str(pairs[at][0])
        return ""
