"""Which tensor of the baseline is which of the loop as it is: a refactor renames, moves, joins and splits them.

A tensor is the same where it begins with the same values, whatever its name. Where it is laid out otherwise
(transposed, a convolution over one position in place of a linear layer), both sums of its entries are the same. Joined
tensors (q, k and v in one) have sums that add up. Tensors that hold one number only (zeros, ones) are told by their
gradient, and by the module that they lie in.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.guard.baseline.bounds import distance, sum_of, without_order
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.baselines.trajectory import Course, Digest, Tensor

How = Literal["same", "wrapped", "renamed", "laid_out", "joined", "split"]

MOST_JOINED = 8
"""Tensors that are joined to one, at most."""


@dataclass(frozen=True, slots=True)
class Match:
    """Tensors of the baseline and those that are the same now: one of each, but where they were joined or split."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    how: How = "same"

    @property
    def ordered(self) -> bool:
        """Whether entries keep their order."""
        return self.how not in ("laid_out", "joined", "split")

    def digest(self, old: Mapping[str, Digest], new: Mapping[str, Digest]) -> tuple[Digest | None, Digest | None]:
        """The digests of both sides, comparable; None where one of the tensors has none."""
        return self._of(self.old, old), self._of(self.new, new)

    def _of(self, names: tuple[str, ...], known: Mapping[str, Digest]) -> Digest | None:
        found = [known[name] for name in names if name in known]
        if len(found) < len(names):
            return None
        return found[0] if self.ordered else without_order(sum_of(found))


@dataclass(slots=True)
class Names:
    """The matches of two courses, and what has no counterpart."""

    matches: list[Match] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    came: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """The path of a module of the baseline to its path now, where one of its tensors is known."""

    @property
    def moved(self) -> list[Match]:
        """Those that are under another name, or in other pieces."""
        return [match for match in self.matches if match.how != "same"]

    def now(self, name: str) -> tuple[str, ...]:
        """What a tensor of the baseline is called now."""
        return next((match.new for match in self.matches if name in match.old), ())


def names_of(old: Course, new: Course, rounding: float) -> Names:
    """The matches of two courses; values that agree up to ``rounding`` are the same."""
    found = Names()
    for buffers in (False, True):
        tensors = _tensors(old, buffers=buffers), _tensors(new, buffers=buffers)
        _Matching(found, *tensors, rounding, _same_slope(old, new))
    return found


def _tensors(course: Course, *, buffers: bool) -> dict[str, Tensor]:
    return dict(course.buffers if buffers else course.parameters)


def _same_slope(old: Course, new: Course) -> Callable[[str, str], bool]:
    """Whether two tensors have one and the same gradient at the first step."""

    def same(one: str, other: str) -> bool:
        for mine, theirs in old.paired(new):
            a, b = mine.gradients.get(one), theirs.gradients.get(other)
            if a is not None and b is not None:
                return distance(a, b) < 1e-6
        return False

    return same


class _Matching:
    """Finds the matches, from what is certain to what is left."""

    def __init__(
        self,
        found: Names,
        old: dict[str, Tensor],
        new: dict[str, Tensor],
        rounding: float,
        same_slope: Callable[[str, str], bool],
    ) -> None:
        self.found, self.old, self.new, self.rounding, self.same_slope = found, old, new, rounding, same_slope
        self._by_name(same_values=True)
        self._by_value()
        self._by_name(same_values=False)
        self._laid_out()
        self._joined()
        self._constants()
        found.gone += self.old
        found.came += self.new

    def _take(self, old: Sequence[str], new: Sequence[str], how: How) -> None:
        self.found.matches.append(Match(tuple(old), tuple(new), how))
        for a, b in itertools.product(old, new):
            self.found.modules.setdefault(self.old[a].owner, self.new[b].owner)
        for name in old:
            del self.old[name]
        for name in new:
            del self.new[name]

    def _by_name(self, *, same_values: bool) -> None:
        known: dict[str, str] = {}
        for name, tensor in self.new.items():
            for alias in (name, *tensor.also):
                known.setdefault(plain(alias), name)
        for name in list(self.old):
            tensor = self.old[name]
            other = next((known[plain(alias)] for alias in (name, *tensor.also) if plain(alias) in known), None)
            if other is None or other not in self.new or self.new[other].shape != tensor.shape:
                continue
            if same_values and not self._same(tensor, self.new[other]):
                continue
            self._take([name], [other], "same" if name == other else "wrapped")

    def _same(self, a: Tensor, b: Tensor, *, ordered: bool = True) -> bool:
        if math.prod(a.shape) != math.prod(b.shape):
            return False
        one, other = (a.start, b.start) if ordered else (without_order(a.start), without_order(b.start))
        return distance(one, other) <= self.rounding

    def _by_value(self) -> None:
        """Where both names are still there, two tensors of one shape may have begun with each other's numbers: a rename
        only where their gradients changed places too."""
        for name in list(self.old):
            if constant(self.old[name]):
                continue
            for other in self.new:
                if not self._same(self.old[name], self.new[other]):
                    continue
                both = name in self.new and other in self.old and self.new[name].shape == self.old[name].shape
                if not both or self.same_slope(name, other):
                    same_shape = self.old[name].shape == self.new[other].shape
                    self._take([name], [other], "renamed" if same_shape else "laid_out")
                    break

    def _laid_out(self) -> None:
        for name in list(self.old):
            if constant(self.old[name]):
                continue
            other = next((n for n, t in self.new.items() if self._same(self.old[name], t, ordered=False)), None)
            if other is not None:
                self._take([name], [other], "laid_out")

    def _joined(self) -> None:
        for name in [name for name, tensor in self.new.items() if not constant(tensor)]:
            if parts := self._adding_up(self.new[name], self.old):
                self._take(parts, [name], "joined")
        for name in [name for name, tensor in self.old.items() if not constant(tensor)]:
            if parts := self._adding_up(self.old[name], self.new):
                self._take([name], parts, "split")

    def _adding_up(self, whole: Tensor, others: Mapping[str, Tensor]) -> list[str]:
        """Neighbours among the others that are the whole in pieces."""
        fitting = [n for n, t in others.items() if len(t.shape) == len(whole.shape) and not constant(t)]
        for first, most in itertools.product(range(len(fitting)), range(2, MOST_JOINED + 1)):
            parts = fitting[first : first + most]
            if len(parts) < most or not _one_axis([others[n] for n in parts], whole):
                continue
            if distance(sum_of(others[n].start for n in parts), without_order(whole.start)) <= self.rounding:
                return parts
        return []

    def _constants(self) -> None:
        """Zeros and ones: by their gradient, in modules that are known, then in order of their kind."""
        for name in list(self.old):
            alike = [
                n for n, t in self.new.items() if t.shape == self.old[name].shape and self._same(self.old[name], t)
            ]
            if other := next((n for n in alike if self.same_slope(name, n)), None):
                self._take([name], [other], "renamed")
        for name in list(self.new):
            parts = [n for n, t in self.old.items() if self._lies_with(n, t, name)]
            size = sum(math.prod(self.old[n].shape) for n in parts)
            if parts and size == math.prod(self.new[name].shape):
                self._take(parts, [name], "renamed" if len(parts) == 1 else "joined")
        for name in list(self.old):
            parts = [n for n, t in self.new.items() if self._lies_with(name, self.old[name], n)]
            size = sum(math.prod(self.new[n].shape) for n in parts)
            if parts and size == math.prod(self.old[name].shape):
                self._take([name], parts, "renamed" if len(parts) == 1 else "split")
        for kind, olds in _by_kind(self.old).items():
            news = _by_kind(self.new).get(kind, [])
            if len(olds) == len(news):
                for name, other in zip(olds, news, strict=True):
                    self._take([name], [other], "renamed")

    def _lies_with(self, name: str, tensor: Tensor, other: str) -> bool:
        """Whether two constants of one value and attribute lie in modules that hold the same tensors."""
        now = self.new[other]
        if not (constant(tensor) and constant(now)) or attribute(name) != attribute(other):
            return False
        if not math.isclose(entry(tensor), entry(now), rel_tol=1e-6, abs_tol=1e-12):
            return False
        together = [m for m in self.found.matches if any(owner(n) == tensor.owner for n in m.old)]
        return any(owner(n) == now.owner for match in together for n in match.new)


def same_optimizers(old: Course, new: Course, names: Names) -> Iterator[tuple[int, int, frozenset[str]]]:
    """Optimizers of both that hold tensors in common, by number, with these tensors by their names now."""
    for index, optimizer in enumerate(old.optimizers):
        now = {name for before in optimizer.options_of() for name in names.now(before)}
        for number, other in enumerate(new.optimizers):
            if shared := now & set(other.options_of()):
                yield index, number, frozenset(shared)


def constant(tensor: Tensor) -> bool:
    """Whether all entries are one number: the mean of the squares is the square of the mean."""
    size, start = math.prod(tensor.shape), tensor.start
    if not size or start.total is None:
        return True
    return math.isclose(start.squares * size, start.total**2, rel_tol=1e-9, abs_tol=1e-300)


def entry(tensor: Tensor) -> float:
    """The mean of the entries."""
    return (tensor.start.total or 0.0) / max(math.prod(tensor.shape), 1)


def attribute(name: str) -> str:
    return name.rpartition(".")[2]


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def _by_kind(tensors: Mapping[str, Tensor]) -> dict[tuple[object, ...], list[str]]:
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if constant(tensor):
            kinds.setdefault((attribute(name), tensor.shape, round(entry(tensor), 9)), []).append(name)
    return kinds


def _one_axis(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the parts, joined along one axis, have the shape of the whole."""
    shapes = [part.shape for part in parts]
    return any(
        sum(shape[axis] for shape in shapes) == whole.shape[axis]
        and all(shape[:axis] == whole.shape[:axis] and shape[axis + 1 :] == whole.shape[axis + 1 :] for shape in shapes)
        for axis in range(len(whole.shape))
    )


def renames(names: Names) -> Iterator[str]:
    """What moved, in words: whole modules where all of their tensors went the same way."""
    said: dict[str, None] = {}
    for match in names.moved:
        if match.how in ("renamed", "wrapped"):
            said.setdefault(_pairs(match.old[0], match.new[0], names))
        elif match.how == "laid_out":
            said.setdefault(f"{match.old[0]} is laid out otherwise as {match.new[0]}")
        elif match.how == "joined":
            said.setdefault(f"{', '.join(match.old)} are joined in {match.new[0]}")
        else:
            said.setdefault(f"{match.old[0]} is split into {', '.join(match.new)}")
    yield from said


def _pairs(old: str, new: str, names: Names) -> str:
    """Two names without as much of the ending that they have in common as all tensors of the module went with it."""
    a, b = old.split("."), new.split(".")
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1] and _went(".".join(a[:-1]), ".".join(b[:-1]), names):
        a.pop()
        b.pop()
    return f"{'.'.join(a)} is now {'.'.join(b)}"


def _went(module: str, to: str, names: Names) -> bool:
    """Whether all tensors of a module are in another one now, under their own names."""
    return all(
        new == f"{to}{old.removeprefix(module)}"
        for match in names.matches
        if match.how in ("same", "renamed", "wrapped")
        for old, new in zip(match.old, match.new, strict=True)
        if old.startswith(f"{module}.")
    )
