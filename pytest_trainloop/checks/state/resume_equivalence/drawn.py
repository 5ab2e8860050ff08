"""What a loop draws when it is built, that no checkpoint holds and that training reads."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.lost import in_a_module, loss_finding
from pytest_trainloop.core.wording import some
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.runs.process_state import random_states, restore_random, seed_all
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.snapshot import Difference, Snapshot


def drawn_attributes(a: Uninterrupted, b: Resumed, other: Resumed) -> Iterator[Finding]:
    """Attributes of modules.

    ``other`` is resumed in a loop built under another seed. With everything that differs there carried over it must end
    as the uninterrupted run, and with everything but these attributes it must not. Only what follows from draws inside
    a module's ``__init__`` is looked at, and permutations that a call returned: other attributes may follow from the
    data (an order of frequencies). A permutation is at fault; other draws may be replaced by what is loaded from
    elsewhere (an embedding, an assignment to clusters).
    """
    as_built = [
        d
        for d in other.lost
        if d.leaf.kind in ("tensor", "array", "scalar") and d.how == "changed" and not b.renewed.covers(d.leaf)
        if d.leaf.path in b.built.leaves and d.leaf.path in other.built.leaves
        if "model" in d.leaf.reached_from and in_a_module(a, (d,))  # a data set's order is the task, not the model
        # neither load nor training has set it
        if same_value(b.built.value(d.leaf.path), d.before) and same_value(other.built.value(d.leaf.path), d.after)
    ]
    inside, orders = _drawn(a.evidence) if as_built else (set(), [])
    mine: dict[bool, list[Difference]] = {True: [], False: []}
    for d in as_built:
        if d.leaf.path in inside or any(same_value(order, d.before) for order in orders):
            mine[_is_permutation(d.before)].append(d)
    everything = {d.leaf.path for d in other.lost if d.leaf.reached_from != {"batches"}}
    if not any(mine.values()) or b.again(everything, other_seed=1).unequal():
        return
    for permutes, some_of_them in mine.items():
        paths = [d.leaf.path for d in some_of_them]
        unequal = b.again(everything - {*paths}, other_seed=1).unequal() if paths else []
        if unequal:
            facts: dict[str, Any] = {"what": some(paths), "unequal": tuple(unequal)}
            facts |= {"level": "fault" if permutes else "advice", "permutes": permutes}
            yield loss_finding(a, b, "drawn_from_seed", some_of_them, "attribute", **facts)


def _is_permutation(value: Any) -> bool:
    order = sorted(value.tolist()) if getattr(value, "ndim", 0) == 1 else []
    return len(order) > 1 and order == list(range(len(order)))


def _drawn(evidence: Evidence) -> tuple[set[str], list[Any]]:
    """The paths of what follows from draws inside a module's ``__init__``, and the permutations drawn for a loop.

    Two loops of one seed differ in these paths, in which modules draw numbers of their own, and others in each.
    """
    orders: list[Any] = []

    class Orders(FunctionMode):
        def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = super().call(name, func, args, kwargs)
            orders.extend([out] if name == "randperm" else [])
            return out

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def permutation(*given: Any) -> Any:
            orders.append(original(*given))
            return orders[-1]

        return permutation

    numpy = sys.modules.get("numpy")
    with Orders(), patched(numpy.random, "permutation", noted) if numpy else contextlib.nullcontext():
        evidence.fresh_loop()
    first, second = (_built_from_two_seeds(evidence, number) for number in (1, 2))
    return {d.leaf.path for d in differences(first, second)}, orders


def _built_from_two_seeds(evidence: Evidence, number: int) -> Snapshot:
    """A loop whose modules draw from generators seeded by ``number``, and all else from those of the run."""
    outside: dict[FrameType, Any] = {}
    inside: list[Any] = []

    def seen(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "return" and frame in outside:
            inside[:] = [random_states()]
            restore_random(outside.pop(frame))
        elif event == "call" and not outside and code.co_name == "__init__" and code.co_argcount:
            if not isinstance(frame.f_locals.get(code.co_varnames[0]), torch.nn.Module):
                return
            outside[frame] = random_states()
            restore_random(inside[0]) if inside else seed_all(number)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        return Reach.of(evidence.fresh_loop()).snapshot()
    finally:
        sys.setprofile(before)
