"""What a loop draws when it is built, that no checkpoint holds and that training reads: values, and the split.

A split is shown without a step. The rows that ``batches`` gives and those that ``evaluate`` gives to the model are
disjoint in one loop. Another one draws other orders as it is built, and loads the first one's checkpoint: some of its
training rows are among those that were held out, and all of them are known.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.resume_equivalence.causes import found
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.checks.state.resume_equivalence.lost import in_a_module, loss_finding
from pytest_trainloop.checks.state.resume_equivalence.positions import MOST_BATCHES, of_data, rows_given
from pytest_trainloop.checks.state.resume_equivalence.runs import rows_in
from pytest_trainloop.core.errors import UserCodeError
from pytest_trainloop.core.whose import project_may_raise
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.process_state import preserved, random_states, restore_random, seed_all
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.reachable_state.snapshot import Reach, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.snapshot import Difference, Snapshot


def drawn_attributes(a: Uninterrupted, b: Resumed, other: Resumed) -> Iterator[Finding]:
    """What is drawn and kept: attributes of modules, and what ``fit`` and ``loss`` hold besides.

    ``other`` is resumed in a loop built under another seed. With everything that differs there carried over it must end
    as the uninterrupted run, and with everything but these values it must not. Only what follows from draws inside
    a module's ``__init__`` is looked at, and permutations that a call returned: other attributes may follow from the
    data (an order of frequencies). Outside of modules the values of loops count whose data are the same under both
    seeds. A permutation of a module is at fault; other draws may be replaced by what is loaded from elsewhere (an
    embedding, an assignment to clusters).
    """
    as_built = [
        d
        for d in other.lost
        if d.leaf.kind in ("tensor", "array", "scalar") and d.how == "changed" and not b.renewed.covers(d.leaf)
        if d.leaf.path in b.built.leaves and d.leaf.path in other.built.leaves
        # neither load nor training has set it
        if same_value(b.built.value(d.leaf.path), d.before) and same_value(other.built.value(d.leaf.path), d.after)
    ]
    # a data set's order is the task, not the model
    of_modules = [d for d in as_built if "model" in d.leaf.reached_from and in_a_module(a, (d,))]
    inside, orders = _drawn(a.evidence) if of_modules else (set(), [])
    mine: dict[str, list[Difference]] = {"permutes": [], "draws": [], "outside": []}
    for d in of_modules:
        if d.leaf.path in inside or any(same_value(order, d.before) for order in orders):
            mine["permutes" if _is_permutation(d.before) else "draws"].append(d)
    held = [d for d in as_built if d.leaf.reached_from & {"fit", "step", "loss"} and not in_a_module(a, (d,))]
    held = [d for d in held if "batches" not in d.leaf.reached_from]
    if held and _has_same_data(a.evidence):
        mine["outside"] = held
    everything = {d.leaf.path for d in other.lost if d.leaf.reached_from != {"batches"}}
    if not any(mine.values()) or b.again(everything, other_seed=1).unequal():
        return
    for how, some_of_them in mine.items():
        paths = [d.leaf.path for d in some_of_them]
        if not paths:
            continue
        without = b.again(everything - {*paths}, other_seed=1, rows=how == "outside")
        if (unequal := without.unequal()) and not (how == "outside" and _are_data(b, without, some_of_them)):
            names = paths if how != "outside" else list(dict.fromkeys(d.leaf.component for d in some_of_them))
            facts: dict[str, Any] = {"what": some(names), "several": len(names) > 1, "unequal": tuple(unequal)}
            facts |= {"level": "fault" if how == "permutes" else "advice", "permutes": how == "permutes"}
            variant = "outside" if how == "outside" else "attribute"
            yield loss_finding(a, b, "drawn_from_seed", some_of_them, variant, **facts)


def _has_same_data(evidence: Evidence) -> bool:
    """Whether ``fit`` trains on the batches that it is given, and another seed gives batches of the same rows."""
    loops = evidence.fresh_loop(), evidence.fresh_loop(other_seed=1)
    own, other = (rows_given(loop, most=None) for loop in loops)
    return bool(other) and other <= own and not evidence.shared(makes_own_data)


def _are_data(b: Resumed, without: Resumed, drawn: Sequence[Difference]) -> bool:
    """Whether one of these may be data or trained weights in a test: its rows are given to a module, there
    is one for each example, or it is what weights begin as."""
    loop = b.a.evidence.fresh_loop()
    batches = [nested.tensors(batch) for batch in first_batches(loop, MOST_BATCHES)]
    examples = {len(rows_given(loop)), *(len(tensor) for batch in batches for tensor in batch if tensor.ndim)}
    weights = [b.built.value(path) for path, leaf in b.built.leaves.items() if leaf.kind == "weight"]
    for d in drawn:
        value = torch.as_tensor(d.after) if d.leaf.kind in ("tensor", "array") else torch.empty(0)
        if value.ndim and (len(value) in examples or not (without.rows or set()).isdisjoint(rows_in(value))):
            return True
        if any(same_value(weight, d.before) for weight in weights):
            return True
    return False


def _is_permutation(value: Any) -> bool:
    order = sorted(value.tolist()) if getattr(value, "ndim", 0) == 1 else []
    return len(order) > 1 and order == list(range(len(order)))


def _drawn(evidence: Evidence) -> tuple[set[str], list[Any]]:
    """The paths of what follows from draws inside a module's ``__init__``, and the permutations drawn for a loop.

    Two loops of one seed differ in these paths, in which modules draw numbers of their own, and others in each.
    """
    orders: list[tuple[Any, str]] = []
    with orders_drawn(orders):
        evidence.fresh_loop()
    first, second = (_built_from_two_seeds(evidence, number) for number in (1, 2))
    return {d.leaf.path for d in differences(first, second)}, [order for order, _ in orders]


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


ORDERS = {"numpy.random": ("permutation", "shuffle", "choice"), "random": ("shuffle", "sample")}
"""What draws an order, with ``torch.randperm``."""


@contextlib.contextmanager
def orders_drawn(into: list[tuple[Any, str]], instead: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Note the orders that are drawn in the block, each with its line; ``instead`` are others that take the places of
    some, by their numbers."""

    def taken(out: Any, order: Any) -> Any:
        if not _is_order(order):
            return out
        number = len(into)
        into.append((copy.copy(order), str(here()[0]) if user_frames(1) else ""))
        other = (instead or {}).get(number)
        if other is None or len(other) != len(order):
            return out
        if out is not None:
            return copy.copy(other)
        order[:] = other
        return None

    class Permutations(FunctionMode):
        def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = super().call(name, func, args, kwargs)
            return taken(out, out) if name == "randperm" else out

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            return taken(out, args[0] if out is None and args else out)

        return draw

    with Permutations(), Patches() as patches:
        for module, names in ORDERS.items():
            for name in names if module in sys.modules else ():
                patches.put(sys.modules[module], name, noted)
        yield


def _is_order(value: Any) -> bool:
    """Whether these are several whole numbers or names."""
    entries = value.tolist() if isinstance(value, torch.Tensor) or hasattr(value, "tobytes") else value
    return isinstance(entries, list) and len(entries) > 1 and all(type(entry) in (int, str) for entry in entries)


def split_drawn_again(a: Uninterrupted, b: Resumed, other: Resumed) -> Iterator[Finding]:
    """``other`` is resumed in a loop built under another seed."""
    if "evaluate" not in a.evidence.offers or not any(map(of_data, differences(b.built, other.built))):
        return
    own: list[tuple[Any, str]] = []
    others: list[tuple[Any, str]] = []
    with orders_drawn(others):
        a.evidence.fresh_loop(other_seed=1)
    with orders_drawn(own):
        first = a.evidence.fresh_loop()
    pairs = enumerate(zip(own, others, strict=False))
    redrawn = {n: order for n, ((before, _), (order, _)) in pairs if not same_value(before, order)}
    facts: dict[str, Any] = {}
    checkpoint = Checkpoint()
    try:
        with project_may_raise(), preserved():
            checkpoint.take(first)
            trained, held = rows_given(first), _evaluated(first, a.seed)
            # the orders alone are others, or all that is drawn, where the data set is not
            builds: list[tuple[int, dict[int, Any]]] = [*([(0, redrawn)] if redrawn else []), (1, {})]
            for seed, instead in builds if held and not trained & held else ():
                again = rows_given(_loaded(a.evidence, checkpoint, instead, seed))
                if again & held and again <= trained | held:
                    alone = ((own[n][1], _loaded(a.evidence, checkpoint, {n: redrawn[n]}, 0)) for n in instead)
                    line = next((line for line, loop in alone if rows_given(loop) & held), "")
                    facts = {"leaked": len(again & held), "held": len(held), "level": "advice", "change": line}
                    break
    except UserCodeError:  # of the project's data
        pass
    finally:
        checkpoint.remove()
    if facts:
        yield found("split_drawn_again", a.lines["load"], ("evaluate()",), **facts)


def _loaded(evidence: Evidence, checkpoint: Checkpoint, instead: Mapping[int, Any], seed: int) -> TrainLoop:
    with orders_drawn([], instead):
        loop = evidence.fresh_loop(other_seed=seed)
    checkpoint.give(loop)
    return loop


def _evaluated(loop: TrainLoop, seed: int) -> set[int]:
    """The rows that ``evaluate`` gives to modules."""
    rows: set[int] = set()
    depth = 0

    def called(_module: Any, args: Any) -> None:
        nonlocal depth
        if not depth:
            rows.update(row for tensor in list(nested.tensors(args))[:1] for row in rows_in(tensor))
        depth += 1

    def left(*_call: Any) -> None:
        nonlocal depth
        depth -= 1

    seed_all(seed)
    with hooked(before_modules(called), after_modules(left, always_call=True)):
        loop.evaluate()  # type: ignore[misc]
    return rows
