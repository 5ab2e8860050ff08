"""Everything that a loop's model, optimizer and functions can touch, and copies to compare, put back or carry over."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.core import members
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.torch_internals import has_values
from pytest_trainloop.runs.reachable_state.copies import Copy, copied, same_bits
from pytest_trainloop.runs.reachable_state.leaves import Leaf, same_value
from pytest_trainloop.runs.reachable_state.slots import OfList, shown_value
from pytest_trainloop.runs.reachable_state.stored import Stored, value_of
from pytest_trainloop.runs.reachable_state.transplant import Carrying
from pytest_trainloop.runs.reachable_state.walker import MOST_OBJECTS, Walked, quiet, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.reachable_state.slots import Place


class Reach:
    """What a loop can touch at this moment: its leaves by path, with the objects behind them.

    A reach holds the loop's own objects; drop it after use. Nothing is changed by a walk and no code
    of the project runs: attributes are read from ``__dict__`` and ``__slots__``, entries by the methods of ``dict`` and
    ``list`` themselves.

    ``leaves`` maps paths to leaves; ``cut`` is empty, or says in one sentence what was not looked at.
    """

    def __init__(self, walked: Walked) -> None:
        self.walked = walked
        self.leaves, self.cut = walked.leaves, walked.cut

    @classmethod
    def of(cls, loop: TrainLoop, *, most: int = MOST_OBJECTS) -> Reach:
        """Walk from the declared objects and from the functions of a loop, through at most ``most`` objects."""
        return cls(walk(loop, most))

    def value(self, path: str) -> Any:
        """The live value of a leaf, or the object at any other place that the walk came by. Raises ``KeyError``."""
        return shown_value(self.walked.places[path], self.walked.objects)

    def path_of(self, thing: Any) -> str:
        """The path of an object that was reached; empty for any other."""
        return self.walked.objects.get(id(thing), "")

    def holders(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The paths that hold this very tensor, or another with exactly its bits."""
        found = []
        with quiet():
            for path, place in self.walked.places.items():
                held = None if place.kind == "reference" else place.value
                if held is tensor or (isinstance(held, torch.Tensor) and has_values(held) and same_bits(held, tensor)):
                    found.append(path)
        return tuple(found)

    def snapshot(self) -> Snapshot:
        """Copies of all values, and references to the objects that hold them."""
        return Snapshot(self.walked)


class Snapshot:
    """The values of all leaves at one moment, and the objects that held them then.

    It holds objects of the loop; drop it after use. The copies are detached and share nothing with
    the loop.
    """

    def __init__(self, walked: Walked) -> None:
        self.walked = walked
        self.leaves: Mapping[str, Leaf] = walked.leaves
        self.places: Mapping[str, Place] = walked.places
        self.cut = walked.cut
        with quiet():
            self.copies: dict[str, Copy] = {
                path: copied(place, walked.objects) for path, place in walked.places.items()
            }
        self.by_slot: dict[object, str] = {}
        for path, place in walked.places.items():
            slot = None if place.slot is None else place.slot.same()
            if slot is not None:
                self.by_slot.setdefault(slot, path)

    def value(self, path: str) -> Any:
        """The value that a leaf had: a copy of a tensor or an array, the state of a generator. Raises ``KeyError``."""
        return self.copies[path].value

    def object(self, path: str) -> Any:
        """The object that was at a place; the loop's own, with whatever it holds by now."""
        return self.places[path].value

    def path_in(self, other: Snapshot, path: str) -> str:
        """The path that another snapshot of the same loop has for a place of this one; empty where it has none.

        An object that can be reached in two ways may be named by the other one when more was built.
        """
        if path in other.copies or path not in self.places:
            return path if path in other.copies else ""
        slot = self.places[path].slot
        return other.by_slot.get(None if slot is None else slot.same(), "")

    def put_back(self, paths: Collection[str] | None = None) -> list[str]:
        """Restore values in the loop that the snapshot is of: the object into its slot, and its value in place, so that
        whoever else holds the object sees it too. Paths that have appeared since are taken out of their slots.

        ``paths`` are those to restore, default all. Returns the paths that cannot be written to.
        """
        now = walk(self.walked.loop)
        chosen = dict.fromkeys([*self.leaves, *now.leaves] if paths is None else paths)
        process = {path for path in chosen if path in self.leaves and self.leaves[path].kind == "switch"}
        for path in process:  # not inside quiet(), which restores the gradients' at its end
            self.copies[path].into_slot()
        chosen = {path: None for path in chosen if path not in process}
        with quiet():
            for path in chosen:
                self._into_slot(path)
            failed = [path for path in chosen if path in self.leaves and not self.copies[path].restore()]
            failed += self._without(chosen, now)
        return failed

    def _into_slot(self, path: str) -> None:
        """The objects that held a leaf back into the slots that they were in, from the outermost on."""
        place, chain = self.places.get(path), []
        while place is not None:
            chain.append(place)
            place = place.within
        for above in reversed(chain):
            if above.path in self.copies:
                self.copies[above.path].into_slot()

    def _without(self, paths: Collection[str], now: Walked) -> list[str]:
        """Undo what has appeared: the outermost object that was put in another one's place, or that is in a slot which
        held nothing; entries of a list from its end on."""
        new: dict[str, Place] = {}
        for path in paths:
            chain: list[Place] = []
            above: Place | None = now.places.get(path)
            while above is not None:
                chain.append(above)
                above = above.within
            for place in reversed(chain):
                slot = None if place.slot is None else place.slot.same()
                known = self.by_slot.get(slot) if slot is not None else None
                if known is not None and self.places[known].value is not place.value:
                    if place is not chain[0]:
                        self.copies[known].into_slot()
                    if id(place.value) not in self.walked.objects:
                        break
                if slot is not None and known is None and place.kind != "length":
                    new[place.path] = place
                    break
        last_first = sorted(new.values(), key=_index, reverse=True)
        return [place.path for place in last_first if place.slot is None or not place.slot.take_out()]

    def carry_over(self, into: Reach, paths: Collection[str] | None = None) -> list[str]:
        """Write copies of the values into the leaves of another loop, by path.

        Where an object is missing there, a copy of it is made. ``paths`` are those to carry, default all but the
        process's switches. Returns the paths that could not be carried.
        """
        chosen = [p for p, leaf in self.leaves.items() if leaf.kind != "switch"] if paths is None else list(paths)
        with quiet():
            return Carrying(self.copies, into.walked).carry(chosen)


def empty_loop(snapshots: Sequence[Snapshot], earlier: Sequence[Snapshot] = ()) -> None:
    """Give back the memory of a loop that trains no more, by all its snapshots in their order: that of its declared
    weights and their gradients, which no other loop has (``require_fresh``), and of what moves in the states of its
    optimizers. The values are stored in the snapshots. ``earlier`` ones, of another loop, show what moves as well.

    The tensors keep shapes, dtypes and which of them share memory.
    """
    own = {id(p) for s in snapshots for module in s.walked.loop.modules.values() for p in members.parameters(module)}
    moved = {path for before, after in itertools.pairwise((*earlier, *snapshots)) for path in _moved(before, after)}
    emptied: dict[int, torch.Tensor] = {}
    with quiet():
        for snapshot in snapshots:
            for path, copy in snapshot.copies.items():
                place, copy.storage = copy.place, None
                kind = snapshot.leaves[path].kind if path in snapshot.leaves else ""
                owner = place.within.value if kind == "gradient" and place.within is not None else place.value
                is_own = id(owner) in own or (kind == "optimizer_state" and path in moved)
                if is_own and isinstance(copy.raw, Stored) and _fills_its_memory(place.value):
                    there = place.value.untyped_storage().data_ptr()
                    place.value.data = emptied.setdefault(there, place.value.new_zeros(())).expand(place.value.shape)
        left = {tensor.data_ptr() for tensor in emptied.values()}
        for copy in (copy for snapshot in snapshots for copy in snapshot.copies.values()):
            copy.emptied = copy.sort == "tensor" and address(copy.place.value) in left


def _moved(before: Snapshot, after: Snapshot) -> Iterator[str]:
    for path, copy in before.copies.items():
        now = after.copies[path].raw if path in after.copies else None
        if isinstance(copy.raw, Stored) and isinstance(now, Stored) and not copy.raw.is_same(now):
            yield path


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _index(place: Place) -> int:
    return place.slot.key if isinstance(place.slot, OfList) else 0


class Difference:
    """A leaf that differs between two snapshots; ``before`` or ``after`` is None where it was not there. They are read
    when they are asked for."""

    def __init__(self, leaf: Leaf, before: Copy | None, after: Copy | None) -> None:
        self.leaf = leaf
        self.how: Literal["changed", "appeared", "vanished"] = (
            "appeared" if before is None else "vanished" if after is None else "changed"
        )
        self._before, self._after = (None if copy is None else copy.raw for copy in (before, after))

    @property
    def before(self) -> Any:
        return value_of(self._before)

    @property
    def after(self) -> Any:
        return value_of(self._after)


def differences(
    before: Snapshot, after: Snapshot, *, same: Callable[[Any, Any], bool] | None = None
) -> list[Difference]:
    """The leaves whose values are not the same in two snapshots, of one loop or of two that one function built.

    ``same`` compares two values; default ``same_value``.
    """
    equal = same or same_value
    found: list[Difference] = []
    with quiet():
        for path, leaf in before.leaves.items():
            now = before.path_in(after, path)
            if not now:
                found.append(Difference(leaf, before.copies[path], None))
            elif not before.copies[path].is_same(after.copies[now], equal):
                found.append(Difference(leaf, before.copies[path], after.copies[now]))
        for path, leaf in after.leaves.items():
            then = after.path_in(before, path)
            if not then:
                found.append(Difference(leaf, None, after.copies[path]))
            elif then not in before.leaves and not before.copies[then].is_same(after.copies[path], equal):
                found.append(Difference(leaf, before.copies[then], after.copies[path]))
    return found
