"""Copies of what trains that no optimizer holds: target networks, old policies, references. Plain data, no torch.

Their values were those of trained parameters at some moment, bit for bit. A copy is brought up to date every thousand
steps as often as every ten, so that nothing which a run of a few steps leaves out is held against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.tracing.made_at import MadeAt


class Pair(NamedTuple):
    """The paths of a copy and of what it was copied from."""

    copy: str
    original: str

    @property
    def of_one_stack(self) -> bool:
        """Whether the two are layers of one list: layers are often made by ``deepcopy`` of the first, and all train."""
        (holder, _, last), (other, _, other_last) = self.copy.rpartition("."), self.original.rpartition(".")
        return bool(holder) and holder == other and last.isdigit() and other_last.isdigit()


def path(p: Parameter) -> str:
    """Its name in the model, which several may have had one after another."""
    return p.name.partition(" (")[0]


def called_copies(record: Record, missing: Sequence[Parameter]) -> set[int]:
    """The missing parameters of networks that are called from outside any module, are copies as a whole, and hold
    nothing that an optimizer steps."""
    pairs = _pairs(record, missing)
    found: set[int] = set()
    for network in _unheld_networks(record, missing):
        known = [p for p in network if not p.uniform]
        if known and all(p.index in pairs and not pairs[p.index].of_one_stack for p in known):
            found |= {p.index for p in network}
    return found


def all_loaded(record: Record, missing: Sequence[Parameter], made: MadeAt) -> bool:
    """Whether the missing parameters are those of networks that were loaded from state dicts: teachers."""
    loaded = (n for n in _unheld_networks(record, missing) if all(made.loaded(p.name) for p in n))
    return {p.index for p in missing} <= {p.index for network in loaded for p in network}


def _unheld_networks(record: Record, missing: Sequence[Parameter]) -> list[list[Parameter]]:
    """The missing parameters of each network that is called from outside any module and of which no optimizer holds a
    part."""
    called = {f.below for f in record.root_forwards() if f.below.isdisjoint(record.held)}
    return [network for below in called if (network := [p for p in missing if p.index in below])]


def copied_parts(record: Record, missing: Sequence[Parameter]) -> dict[int, Pair]:
    """The missing parameters of parts of a model that are copies of other parts, each with the two parts."""
    pairs = _pairs(record, missing)
    found: dict[int, Pair] = {}
    for pair in dict.fromkeys(pairs.values()):
        part = [p for p in missing if path(p).startswith(f"{pair.copy}.")]
        whole = all(p.index in pairs for p in part if not p.uniform)
        if pair.copy and pair.original and whole and not pair.of_one_stack:
            found |= {p.index: pair for p in part}
    return found


def _pairs(record: Record, missing: Sequence[Parameter]) -> dict[int, Pair]:
    """By missing parameter, the outermost parts in which it and a trained parameter of its values have one place."""
    held = record.held
    found = {}
    for p in missing:
        originals = [record.parameters[i] for i in sorted(p.equals) if i in held and record.reached(i)]
        if originals:
            found[p.index] = min((_pair(path(p), path(q)) for q in originals), key=lambda pair: len(pair.copy))
    return found


def _pair(copy: str, original: str) -> Pair:
    ours, theirs = copy.split("."), original.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return Pair(".".join(ours), ".".join(theirs))
