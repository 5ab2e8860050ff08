"""Which tensor of the baseline is which tensor of the loop now: a refactor renames, moves, joins and splits them.

A tensor is the same if it begins with the same values, whatever its name. With another layout (transposed, a
convolution over one position in place of a linear layer), both sums of its entries are equal. Joined tensors (q, k and
v in one) have sums that add up. Tensors that hold one number only (zeros, ones) are identified by their gradient, and
by the module that holds them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_trainloop.instruments.baselines.trajectory import Digest, distance, sum_of
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.instruments.baselines.trajectory import Course, Tensor

How = Literal["same", "wrapped", "renamed", "laid_out", "joined", "split"]

MOST_JOINED = 8
"""Tensors that are joined to one, at most."""

CHANCE = 1e-7
"""The chance of a larger difference of means or deviations in two draws of one distribution: of a thousand tensors none
has it."""

START = 1e-9
"""Draws agree to the rounding of what scales them."""


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors of the baseline and those that are the same now: one of each, but where they were joined or split."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    how: How = "same"

    def digests(self, old: Mapping[str, Digest], new: Mapping[str, Digest]) -> tuple[Digest, Digest]:
        """Those of both sides, comparable; what is not there counts as zero."""
        zero = Digest(0.0, 0.0, 0.0, 0.0)
        a, b = ([known.get(n, zero) for n in names] for names, known in ((self.old, old), (self.new, new)))
        return (a[0], b[0]) if self.how in ("same", "wrapped", "renamed") else (_whole(a), _whole(b))


class Names:
    """The matches of two courses, from what is certain to what is left; ``gone`` and ``came`` have no counterpart."""

    def __init__(self, old: Course, new: Course, rounding: float) -> None:
        self.matches: list[Match] = []
        self.modules: dict[str, str] = {}
        """The path of a module of the baseline to its path now, where one of its tensors is known."""
        self.gone: list[str] = []
        self.came: list[str] = []
        self._rounding, self._pairs = rounding, list(old.paired(new))
        for before, now in ((old.parameters, new.parameters), (old.buffers, new.buffers)):
            self._old, self._new = before, now
            self._match_by_name(same_values=True)
            self._match_by_value()
            self._match_by_name(same_values=False)
            self._match_laid_out()
            self._match_joined()
            self._match_constants()
            self.gone += self._old
            self.came += self._new

    @property
    def moved(self) -> list[Match]:
        """Those that are under another name, or in other pieces."""
        return [match for match in self.matches if match.how != "same"]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(a, b) for match in self.matches for a in match.old for b in match.new]

    def now(self, path: str) -> str:
        """The path that a module of the baseline has now: its own where its tensors moved, else that of the nearest
        module above it that did."""
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            head = ".".join(parts[:cut])
            if self.modules.get(head, head) != head:
                return plain(".".join((self.modules[head], *parts[cut:])))
        return plain(path)

    def _take(self, old: Sequence[str], new: Sequence[str], how: How) -> None:
        self.matches.append(Match(tuple(old), tuple(new), how))
        for a, b in itertools.product(old, new):
            self.modules.setdefault(self._old[a].owner, self._new[b].owner)
        for name in old:
            del self._old[name]
        for name in new:
            del self._new[name]

    def _match_by_name(self, *, same_values: bool) -> None:
        known: dict[str, str] = {}
        for name, tensor in self._new.items():
            for alias in (name, *tensor.also):
                known.setdefault(plain(alias), name)
        for name, tensor in list(self._old.items()):
            other = next((known[plain(n)] for n in (name, *tensor.also) if plain(n) in known), "")
            fits = other in self._new and self._new[other].shape == tensor.shape
            if fits and (not same_values or self._same(tensor, self._new[other])):
                self._take([name], [other], "same" if name == other else "wrapped")

    def _match_by_value(self) -> None:
        """Where both names are still there, two tensors of one shape may have begun with each other's numbers: a rename
        only where their gradients changed places too."""
        for name, tensor in list(self._old.items()):
            for other, now in [] if constant(tensor) else list(self._new.items()):
                swapped = name in self._new and other in self._old and self._new[name].shape == tensor.shape
                if self._same(tensor, now) and (not swapped or self._same_slope(name, other)):
                    self._take([name], [other], "renamed" if tensor.shape == now.shape else "laid_out")
                    break

    def _match_laid_out(self) -> None:
        for name, tensor in list(self._old.items()):
            found = (
                [] if constant(tensor) else [n for n, t in self._new.items() if self._same(tensor, t, ordered=False)]
            )
            if found:
                self._take([name], found[:1], "laid_out")

    def _match_joined(self) -> None:
        for name in [name for name, tensor in self._new.items() if not constant(tensor)]:
            if parts := self._adding_up(self._new[name], self._old):
                self._take(parts, [name], "joined")
        for name in [name for name, tensor in self._old.items() if not constant(tensor)]:
            if parts := self._adding_up(self._old[name], self._new):
                self._take([name], parts, "split")

    def _match_constants(self) -> None:
        """Zeros and ones: by their gradient, in modules that are known, then in order of their kind."""
        for name, tensor in list(self._old.items()):
            same_values = (n for n, t in self._new.items() if t.shape == tensor.shape and self._same(tensor, t))
            if other := next((n for n in same_values if self._same_slope(name, n)), None):
                self._take([name], [other], "renamed")
        for name, tensor in list(self._new.items()):
            parts = [n for n, t in self._old.items() if self._lies_with(n, t, name, tensor)]
            if parts and sum(self._old[n].size for n in parts) == tensor.size:
                self._take(parts, [name], "renamed" if len(parts) == 1 else "joined")
        for name, tensor in list(self._old.items()):
            parts = [n for n, t in self._new.items() if self._lies_with(name, tensor, n, t)]
            if parts and sum(self._new[n].size for n in parts) == tensor.size:
                self._take([name], parts, "renamed" if len(parts) == 1 else "split")
        kinds = {side: _by_kind(known) for side, known in (("old", self._old), ("new", self._new))}
        for kind, own in kinds["old"].items():
            others = kinds["new"].get(kind, [])
            for name, other in zip(own, others, strict=True) if len(own) == len(others) else ():
                self._take([name], [other], "renamed")

    def _same(self, a: Tensor, b: Tensor, *, ordered: bool = True) -> bool:
        one, other = (a.start, b.start) if ordered else (a.start.unordered, b.start.unordered)
        return a.size == b.size and distance(one, other) <= self._rounding

    def _same_slope(self, one: str, other: str) -> bool:
        """Whether two tensors have one and the same gradient at the first step that has both."""
        slopes = ((a.gradients.get(one), b.gradients.get(other)) for a, b in self._pairs)
        return any(distance(a, b) < 1e-6 for a, b in slopes if a is not None and b is not None)

    def _adding_up(self, whole: Tensor, others: Mapping[str, Tensor]) -> list[str]:
        """Neighbours among the others that are the whole in pieces along one axis."""
        fitting = [n for n, t in others.items() if len(t.shape) == len(whole.shape) and not constant(t)]
        for first, most in itertools.product(range(len(fitting)), range(2, MOST_JOINED + 1)):
            parts = fitting[first : first + most]
            shapes = [others[name].shape for name in parts]
            joined = any(
                all((*s[:axis], *s[axis + 1 :]) == (*whole.shape[:axis], *whole.shape[axis + 1 :]) for s in shapes)
                and sum(s[axis] for s in shapes) == whole.shape[axis]
                for axis in range(len(whole.shape))
            )
            starts = [others[name].start for name in parts]
            if len(parts) == most and joined and distance(sum_of(starts), whole.start.unordered) <= self._rounding:
                return parts
        return []

    def _lies_with(self, name: str, tensor: Tensor, other: str, now: Tensor) -> bool:
        """Whether two constants of one value and attribute lie in modules that hold the same tensors."""
        same_values = constant(tensor) and constant(now) and _attribute(name) == _attribute(other)
        if not same_values or not math.isclose(_entry(tensor), _entry(now), rel_tol=1e-6, abs_tol=1e-12):
            return False
        together = [m for m in self.matches if any(owner(n) == tensor.owner for n in m.old)]
        return any(owner(n) == now.owner for match in together for n in match.new)

    def renames(self) -> list[str]:
        """What moved, in words: whole modules where all of their tensors went the same way."""
        words = {
            "laid_out": "{old} is now {new} with another layout",
            "joined": "{old} are joined in {new}",
            "split": "{old} is split into {new}",
        }
        said: dict[str, None] = {}
        for match in self.moved:
            old, new = ", ".join(match.old), ", ".join(match.new)
            if match.how in ("renamed", "wrapped"):
                a, b = old.split("."), new.split(".")
                while len(a) > 1 and len(b) > 1 and a[-1] == b[-1] and self._went(".".join(a[:-1]), ".".join(b[:-1])):
                    a.pop()
                    b.pop()
                old, new = ".".join(a), ".".join(b)
            said[words.get(match.how, "{old} is now {new}").format(old=old, new=new)] = None
        return list(said)

    def _went(self, module: str, to: str) -> bool:
        """Whether all tensors of a module are in another one now, under their own names."""
        kept = [
            m for m in self.matches if m.how in ("same", "renamed", "wrapped") and m.old[0].startswith(f"{module}.")
        ]
        return all(match.new[0] == f"{to}{match.old[0].removeprefix(module)}" for match in kept)


class Begun(NamedTuple):
    """Tensors that begin with other values, in the order of registration."""

    drawn: tuple[str, ...]
    """Those with the same mean and standard deviation: only the random numbers differ."""
    scaled: tuple[str, ...]
    """Those with another mean or standard deviation."""
    text: str
    """What the first of these begins with, before and now."""


def begun(old: Course, new: Course, names: Names) -> Begun | None:
    """The tensors that begin with other values; None where there are none."""
    order = {name: place for place, name in enumerate(new.tensors)}
    starts = [{name: tensor.start for name, tensor in course.tensors.items()} for course in (old, new)]
    found: dict[bool, list[tuple[str, Match]]] = {True: [], False: []}
    for match in names.matches:
        if distance(*match.digests(*starts)) > START:
            found[_one_distribution(match, old, new)].append((match.new[0], match))
    drawn, scaled = (sorted(found[kind], key=lambda own: order[own[0]]) for kind in (True, False))
    if not drawn and not scaled:
        return None
    text = ""
    if scaled:
        name, match = scaled[0]
        before, now = _moments(old, match.old), _moments(new, match.new)
        text = f"{name}: mean {now[0]:.3g}, deviation {now[1]:.3g}; in the baseline {before[0]:.3g}, {before[1]:.3g}"
    return Begun(tuple(name for name, _ in drawn), tuple(name for name, _ in scaled), text)


def _moments(course: Course, own: Sequence[str]) -> tuple[float, float, int]:
    """Mean, standard deviation and number of the entries of tensors joined."""
    size = max(sum(course.tensors[name].size for name in own), 1)
    whole = sum_of(course.tensors[name].start for name in own)
    mean = (whole.total or 0.0) / size
    return mean, math.sqrt(max(whole.squares / size - mean * mean, 0.0)), size


def _one_distribution(match: Match, old: Course, new: Course) -> bool:
    """Whether mean and deviation differ no more than chance makes them in two draws of this size, by the tests of
    Student and Fisher. The deviation of two entries says nothing, nor does the mean of one."""
    (mean, spread, size), (other_mean, other, _) = _moments(old, match.old), _moments(new, match.new)
    if size == 1:
        return not {mean, other_mean} & {0.0, 1.0}  # no random number is exactly that
    if any(constant(c.tensors[n]) for c, own in ((old, match.old), (new, match.new)) for n in own):
        return False
    free = size - 1
    ratio = max(spread, other) / min(spread, other) if spread and other else math.inf
    if 2 * _beta_tail(1 / (1 + ratio**2), free / 2, free / 2) < CHANCE:
        return False
    student = (mean - other_mean) ** 2 * free / (spread**2 + other**2)
    return _beta_tail(2 * free / (2 * free + student), free, 0.5) >= CHANCE


def _beta_tail(z: float, a: float, b: float) -> float:
    """An upper bound of the incomplete beta function I_z(a, b), close where it is small: z^a (1-z)^b / (a B(a, b))
    times the geometric series that bounds the rest."""
    if z >= (a + 1) / (a + b) or z >= 1.0:
        return 1.0
    if z <= 0.0:
        return 0.0
    beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    tail = math.exp(a * math.log(z) + b * math.log1p(-z) - math.log(a) - beta)
    return min(1.0, tail / (1 - z * (a + b) / (a + 1)))


def constant(tensor: Tensor) -> bool:
    """Whether all entries are one number: the mean of the squares is the square of the mean."""
    size, start = tensor.size, tensor.start
    if not size or start.total is None:
        return True
    return math.isclose(start.squares * size, start.total**2, rel_tol=1e-9, abs_tol=1e-300)


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def _attribute(name: str) -> str:
    return name.rpartition(".")[2]


def _entry(tensor: Tensor) -> float:
    """The mean of the entries."""
    return (tensor.start.total or 0.0) / max(tensor.size, 1)


def _whole(parts: Sequence[Digest]) -> Digest:
    return sum_of(parts).unordered


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[object, ...], list[str]]:
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if constant(tensor):
            kinds.setdefault((_attribute(name), tensor.shape, round(_entry(tensor), 9)), []).append(name)
    return kinds
