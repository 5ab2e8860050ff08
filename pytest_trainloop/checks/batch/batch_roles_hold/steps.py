"""The first step of a loop with one tensor of its batch changed at a time."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.batch_roles_hold.causes import found
from pytest_trainloop.checks.batch.batch_roles_hold.edits import elsewhere, must_count
from pytest_trainloop.checks.batch.batch_roles_hold.read import (
    LeftOut,
    RoleBatch,
    first_places,
)
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.wording import some
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.grids import Leaf
from pytest_trainloop.instruments.batches.own_data import require_given_data
from pytest_trainloop.instruments.batches.padding import padding_ids
from pytest_trainloop.instruments.batches.padding_hints import is_label
from pytest_trainloop.instruments.batches.values import constant, two_valued, whole
from pytest_trainloop.instruments.compositions.experiment import Experiment
from pytest_trainloop.instruments.tracing.call_log import Calls, lost_at
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import EQUALITIES, LOSSES, ORDER_COMPARISONS
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.same_start import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.compositions.experiment import Difference, Outcome
    from pytest_trainloop.instruments.tracing.call_log import Call
    from pytest_trainloop.runs.evidence import Evidence

    Edits = Mapping[Path, torch.Tensor]

IGNORED = -100
NONE: Edits = {}
CONTENTS = 4
"""Tensors behind one mask that are tried alone, at most."""
_TRUTH = frozenset("bool nonzero count_nonzero any all sign argwhere".split())
_TESTS = EQUALITIES | ORDER_COMPARISONS | _TRUTH | {"isin", "tolist", "numpy", "__array__"}
_TARGETS = LOSSES | {"gather", "take_along_dim", "one_hot"}
_GRAPHS = re.compile(r"adj|edge|graph|laplac", re.IGNORECASE)
_MAY_BE = {
    "weights": re.compile(r"weight|importance", re.IGNORECASE),
    "lengths": re.compile(r"len(gth)?s?$", re.IGNORECASE),
    "mask": re.compile(r"mask", re.IGNORECASE),
}
"""Names of what may have a role that is not declared."""


class RoleSteps:
    """The steps of one loop. Raises ``CannotDecide`` where it makes its own data or no step."""

    def __init__(self, evidence: Evidence) -> None:
        loop = evidence.fresh_loop()
        given = first_batches(loop, 2)
        first = loop.batch if loop.batch is not None or not given else given[0]
        if loop.roles is not None:
            require_given_data(evidence, "no tensor of it can be changed")
            loop.roles.require_in(first)
        self.given = RoleBatch(loop, nested.copy(first))
        self.second = RoleBatch(loop, nested.copy(given[1])) if loop.batches is not None and given else None
        self.loop, self.evidence = loop, evidence
        self.judged: set[str] = set()
        """The tensors of which something was compared."""
        self.refused = ""

    def findings(self) -> Iterator[Finding]:
        regions, graphs = self.given.left_out(), list(self._other_graphs())
        masked = [] if self.given.roles or regions else list(self.given.masked_numbers())
        if not (self.given.roles or regions or masked or graphs):
            raise self._nothing()
        require_given_data(self.evidence, "no tensor of it can be changed")
        self.experiment = Experiment(self.evidence, "a batch with other values in one tensor")
        self.tests = _Tests()
        self.base = self.experiment.arm(("base",), lambda: self.given.batch, self.tests)
        if self.base.refused or (why := self.experiment.not_finite(self.base)):
            raise CannotDecide(self.base.refused or why)
        faults = [*self._empty(), *itertools.chain.from_iterable(map(self._left_out, regions))]
        faults += itertools.chain.from_iterable(map(self._left_out_once, masked))
        faults += [] if faults else [*self._without_effect(), *self._kept(graphs)]
        if faults:
            self.experiment.require_repeatable(
                ("base",), lambda: self.given.batch, self.experiment.arm(("again",), lambda: self.given.batch)
            )
        yield from faults
        if not faults and not self.judged:
            raise self._nothing()

    def _changed(self, key: tuple[Any, ...], edits: Edits) -> Difference | None:
        """How far the gradient moves with these edits; None where the loop refuses them or gives none."""
        outcome = self.experiment.arm(key, lambda: self.given.with_(edits))
        self.refused = outcome.refused or self.refused
        return None if outcome.refused else self.experiment.difference(self.base, outcome)

    def _empty(self) -> Iterator[Finding]:
        for path, role in self.given.roles.items():
            batches = [b for b in (self.given, self.second) if b is not None and path in b.tensors]
            tensor, name = self.given.tensors[path], nested.shown(path)
            # a mask that is added to scores is 0 where nothing is left out
            judged = role in ("weights", "padding_mask") or (role == "mask" and not tensor.is_floating_point())
            left_out = [bool(((b.tensors[path] != 0) == (role == "padding_mask")).all()) for b in batches]
            if judged and all(left_out):
                facts = {"tensor": name, "role": role, "entries": str(tensor.numel())}
                value, shape = f"{float(tensor.flatten()[0]):g}", str(tuple(tensor.shape))
                yield found("nothing_counts", "", (name,), kinds=("input",), value=value, shape=shape, **facts)

    # What must not count

    def _left_out(self, out: LeftOut) -> Iterator[Finding]:
        first, ended = first_places(out, [self.given.tensors[path] for path in out.contents])
        for at_first in (False, True) if ended else (False,):
            where = first if at_first else ~first
            edits = {path: edit for path in out.contents if (edit := self._edit(path, out, where)) is not None}
            self.judged |= {out.teller, *out.also} if edits else set()
            if not edits or not self._counts((out, at_first), edits):
                continue
            floating = {path: self.given.tensors[path].is_floating_point() for path in edits}
            for path in sorted(edits, key=lambda p: (not self._is_label(p), floating[p]))[:CONTENTS]:
                differs = self._counts((out, at_first, path), {path: edits[path]})
                if not differs or (at_first and not self._by_targets((out, path), {path: edits[path]})):
                    continue
                tensor, name = self.given.tensors[path], nested.shown(path)
                # a convolution pads with zeros as well (odd: convolution_over_padded_frames)
                zeros = floating[path] and not bool(tensor[edits[path] != tensor].any())
                variant = "labels" if self._is_label(path) else "inverted" if self._only_there(path, out) else ""
                yield found(
                    "left_out_places_count",
                    self.base.backward,
                    (name, out.teller),
                    variant,
                    level="advice" if zeros or not self._by_place(path, out) else "fault",
                    kinds=("input", "input"),
                    tensor=name,
                    teller=out.teller,
                    places=int((edits[path] != tensor).sum()),
                    known=out.known,
                    difference=differs,
                )
                return

    def _left_out_once(self, out: LeftOut) -> Iterator[Finding]:
        """Numbers that count where the loop itself leaves out others: a term of the loss that a mask was forgotten
        in."""
        first, _ = first_places(out, [])
        made = {path: self._edit(path, out, ~first) for path in out.contents[:CONTENTS]}
        edits = {path: edit for path, edit in made.items() if edit is not None}
        counted = {path: self._counts((out, path), {path: edit}) for path, edit in edits.items()}
        left_out = [p for p, differs in counted.items() if not differs and not self._only_there(p, out)]
        for path in [p for p, differs in counted.items() if differs and left_out][:1]:
            name, other = nested.shown(path), nested.shown(left_out[0])
            facts = {"tensor": name, "teller": out.teller, "difference": counted[path], "other": other}
            facts |= {"places": int((edits[path] != self.given.tensors[path]).sum()), "kinds": ("input", "input")}
            facts["level"] = "advice"
            yield found("left_out_places_count", self.base.backward, (name, out.teller), "in one term", **facts)

    def _counts(self, key: tuple[Any, ...], edits: Edits) -> float:
        """The relative difference that these edits make, beyond the rounding of float32; else 0."""
        differs = self._changed(key, edits)
        return 0.0 if differs is None or differs.within_float32 else differs.agreement.difference

    def _by_targets(self, key: tuple[Any, ...], edits: Edits) -> bool:
        """Whether the edit counts as a target alone: a convolution reads the first place behind the end, too (odd:
        convolution_over_padded_ids)."""
        mode = _Tests(self.tests.targets)
        outcome = self.experiment.arm(("targets", *key), lambda: self.given.with_(edits), mode)
        differs = self._difference(self.base, outcome)
        return differs is not None and differs.equal

    def _is_label(self, path: Path) -> bool:
        tensor = self.given.tensors[path]
        return tensor.dim() == 2 and is_label(Leaf(path, tensor, 0, 1), self.loop.padding)

    def _by_place(self, path: Path, out: LeftOut) -> bool:
        """Whether a tensor surely has an entry for each place, and is not of this shape by chance (odd:
        translation_in_one_pass, where the mask is of the source)."""
        tensor = self.given.tensors[path]
        if tensor.dim() > out.cells.dim():
            return True
        counted = self._counted(path) if self._is_label(path) else torch.ones_like(out.region)
        places = (out.cells if not self._is_label(path) else out.region) & counted
        fill = constant(tensor[places])
        return fill is not None and (fill == out.pad or not bool((tensor[~out.region & counted] == fill).any()))

    def _counted(self, path: Path) -> torch.Tensor:
        """Where labels are not ignored."""
        tensor, paddings = self.given.tensors[path], self.loop.padding.all if self.loop.padding else ()
        ignored = {IGNORED, *(p.ignore_index for p in paddings if p.ignore_index is not None)}
        return (tensor >= 0) & torch.stack([tensor != i for i in ignored]).all(0)

    def _edit(self, path: Path, out: LeftOut, where: torch.Tensor) -> torch.Tensor | None:
        """Other values at some of these places; None where there are none, or where the loop may tell the places by
        their values."""
        tensor, test_values = self.given.tensors[path], self.tests.values
        other, cells, sources = tensor.clone(), out.cells & where, ~out.region
        if out.pad is not None and not self._by_place(path, out):
            return None
        if self._is_label(path):  # of several values they are those of other rows (data_order)
            cells, sources = out.region & where & self._counted(path), sources & self._counted(path)
        elif whole(tensor):
            test_values = test_values | set(padding_ids(self.loop.modules.values()))
        values = set(torch.unique(tensor[cells])[:64].tolist())
        if self.tests.python or values & test_values:
            return None
        elsewhere(other, cells, sources)
        return None if torch.equal(other, tensor) else other

    def _only_there(self, path: Path, out: LeftOut) -> bool:
        """Whether the real places do not count."""
        other = self.given.tensors[path].clone()
        elsewhere(other, ~out.cells, ~out.cells)
        differs = self._changed((out, path, "real"), {path: other})
        return differs is not None and differs.equal and not torch.equal(other, self.given.tensors[path])

    # What must count

    def _without_effect(self) -> Iterator[Finding]:
        for path, role in self.given.roles.items():
            name, tried = nested.shown(path), ""
            # causal models padded on the right need no mask, nor do those that know the id of the padding (odd:
            # a_mask_that_a_causal_model_does_not_need)
            redundant = role in ("mask", "padding_mask", "lengths")
            if redundant and name in self.judged:
                continue  # what it leaves out does not count
            edits: Edits = NONE
            for number, (words, other) in enumerate(must_count(role, self.given.tensors[path])):
                differs = self._changed(("must", path, number), {path: other})
                if differs is None:
                    continue
                self.judged.add(name)
                if not differs.equal:
                    break
                edits = {path: other}
                tried = tried if words in tried else f"{tried} or {words}" if tried else words
            else:
                if edits and self._unread_as_drawn(path, edits):
                    facts = {"tensor": name, "role": role, "edit": tried, "level": "advice" if redundant else "fault"}
                    _, other = next(must_count(role, self.given.tensors[path]))  # a sum is the same in another order
                    facts["change"] = lost_at(self._calls(NONE), self._calls({path: other}))
                    yield found("role_without_effect", "", (name,), "mask" * redundant, kinds=("input",), **facts)

    def _calls(self, edits: Edits) -> list[Call]:
        """The calls of torch in the first step, with these edits."""
        seen = Calls()
        self.evidence.rerun(
            stream=lambda _loop: itertools.repeat(self.given.with_(edits)),
            contexts=seen.contexts,
            enough=lambda record: record.rounds >= 1,
            may_raise=True,
        )
        return [call for call in seen.calls if call.outputs]

    def _unread_as_drawn(self, path: Path, edits: Edits) -> bool:
        """Whether two steps with random numbers as they are do not depend on a tensor either (odd:
        a_condition_that_is_dropped, weights_from_the_second_step_on)."""
        arms = []
        for key, made in (("drawn", NONE), (("drawn", path), edits)):
            batch = functools.partial(self.given.with_, made)
            arms.append(self.experiment.arm((key,), batch, _AsDrawn(), then=batch))
        differs = self._difference(*arms)
        return differs is not None and differs.equal

    # What must be read again

    def _other_graphs(self) -> Iterator[Path]:
        """Graphs, and declared masks, that differ between the loop's own first batches."""
        if self.second is None:
            return
        others = self.second.tensors
        for path, tensor in self.given.tensors.items():
            other, role = others.get(path), self.given.roles.get(path, "")
            name = nested.last_name(path)
            edges = whole(tensor) and tensor.dim() == 2 and len(tensor) == 2
            graph = _GRAPHS.search(name) is not None and (
                edges or (tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] and bool((tensor >= 0).all()))
            )
            if other is None or torch.equal(other, tensor):
                continue
            nodes = min(self.given.rows, self.second.rows)
            fits = other.shape == tensor.shape or (edges and all(bool((t < nodes).all()) for t in (tensor, other)))
            if fits and (graph or role in ("mask", "padding_mask", "graph")):
                yield path

    def _kept(self, paths: list[Path]) -> Iterator[Finding]:
        if (second := self.second) is None:
            return
        for path in paths:
            mine, theirs = {path: self.given.tensors[path]}, {path: second.tensors[path]}
            own = self._second("own", second)
            same = self._difference(own, self._second(("kept", path), second, then=mine))
            self.judged |= {nested.shown(path)} if same is not None else set()
            if same is None or not same.equal:
                continue
            alone = self.experiment.arm(("alone",), lambda: second.batch)
            other = self.experiment.arm(("alone", path), functools.partial(second.with_, mine))
            kept = self._difference(own, self._second(("begun", path), second, begin=theirs))
            read = self._difference(alone, other)
            # of a loop that steps twice on each batch the second step is still on the first (odd: two_steps_on_a_batch)
            first = self._difference(own, self._second("first again", self.given))
            if read is None or kept is None or first is None:
                continue
            if read.within_float32 or kept.within_float32 or first.within_float32:
                continue
            if kept.agreement.cosine < 1 - kept.bound:  # else the loss of the first step scales that of the second
                name, difference = nested.shown(path), kept.agreement.difference
                facts = {"tensor": name, "difference": difference, "change": self._kept_at(name)}
                yield found("first_value_kept", self.base.backward, (name,), kinds=("input",), **facts)

    def _kept_at(self, name: str) -> str:
        """The only line that made, of this tensor of the first batch, what the second step reads; where it reads the
        tensor itself, the line that does."""
        seen, lines = Calls(steps=2), set[str]()
        self.evidence.rerun(
            contexts=seen.contexts, before_item=seen.take, enough=lambda r: r.rounds > 1, may_raise=True
        )
        for call in (c for c in seen.calls if c.step == 1):
            for value in call.inputs:
                made = value.made_by
                of_first = any(v.of_batch == name and not v.number for v in value.origins())
                if of_first and (made is None or made.step == 0):
                    lines.add(str((made or call).place))
        return lines.pop() if len(lines) == 1 else ""

    def _second(self, key: Hashable, second: RoleBatch, begin: Edits = NONE, then: Edits = NONE) -> Outcome:
        """The second of two steps, with the weights put back after the first one."""
        mode = _PutBack(self.experiment.window)
        return self.experiment.arm((key,), lambda: self.given.with_(begin), mode, then=lambda: second.with_(then))

    def _difference(self, one: Outcome, other: Outcome) -> Difference | None:
        return None if one.refused or other.refused else self.experiment.difference(one, other)

    def _nothing(self) -> CannotDecide:
        """Why nothing was judged, and what to declare."""
        if self.refused:
            return CannotDecide(self.refused)
        if self.given.roles:
            listed = some([nested.shown(path) for path in self.given.roles])
            return CannotDecide(
                f"nothing of {listed} can be changed in this batch: give one with rows of unequal lengths, or values "
                "that differ",
                needs="a batch with rows of unequal lengths",
            )
        for role, names in _MAY_BE.items():
            for path, tensor in self.given.tensors.items():
                key = nested.last_name(path)
                by_row = 0 < tensor.dim() < 3 and len(tensor) == self.given.rows and path not in self.given.roles
                if names.search(key) and by_row and (role != "mask" or (two_valued(tensor) and tensor.dim() == 2)):
                    name = nested.shown(path)
                    declare = f'declare it to have it tested, roles=Roles({role}="{name}")'
                    return CannotDecide(f"{name} may be {role} by its name: {declare}", needs="roles=")
        return DoesNotApply("no tensor of the batch is declared or named as a mask, lengths, weights or a graph")


class _Tests(WatchingMode, NoRandomness):
    """Notes the values that a loop compares tensors without a gradient with: it may tell padding by them. Notes the
    whole numbers that outputs meet as targets, or puts those of another step in their place."""

    def __init__(self, targets: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.values: set[float] = set()
        self.python = False
        """Whether whole tensors leave torch."""
        self.targets: list[torch.Tensor] = []
        self._instead = list(targets)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = name_of(func)
        with self.watch.suspended():
            if known in _TESTS:
                self._note(known, args, kwargs)
            elif known in _TARGETS:
                args, kwargs = (nested.mapped(given, self._target, _is_target) for given in (args, kwargs))
        return NoRandomness.call(self, name, func, args, kwargs)

    def _target(self, _path: Path, tensor: torch.Tensor) -> torch.Tensor:
        self.targets.append(tensor.clone())
        number = len(self.targets) - 1
        same = number < len(self._instead) and self._instead[number].shape == tensor.shape
        return self._instead[number] if same else tensor

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = list(tensors_in(args, kwargs))
        many = [t for t in given if t.numel() > 1 and not t.requires_grad and t.dtype is not torch.bool]
        many = [t for t in many if not two_valued(t)]
        if not many:
            return
        numbers = [float(a) for a in (*args, *kwargs.values()) if isinstance(a, (int, float))]
        numbers += [float(t) for t in given if t.numel() == 1]
        if name == "isin":
            numbers += [float(v) for t in given if t.numel() <= 64 for v in t.flatten()]
        self.python |= name in ("tolist", "numpy", "__array__") and any(t.dim() > 1 for t in many)
        self.values |= set(numbers) if name in EQUALITIES | ORDER_COMPARISONS | {"isin"} else {0.0}
        if name in ORDER_COMPARISONS and numbers:
            self.values |= {float(t.min()) for t in many} | {float(t.max()) for t in many}


def _is_target(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and whole(value) and value.dim() > 0


class _AsDrawn(WatchingMode, NoRandomness):
    """Leaves random numbers as they are drawn, each under the same seed."""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return NoRandomness.call(self, name, func, args, kwargs)

    def replaced(self, name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return out


class _PutBack(WatchingMode, NoRandomness):
    """Gives the second step the weights and buffers of the first."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._window = window
        self._first: dict[str, torch.Tensor] = {}

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return NoRandomness.call(self, name, func, args, kwargs)

    def before_item(self, number: int, _item: Any) -> None:
        with self.watch.suspended(), torch.no_grad():
            tensors = dict(state_of(self.watch))
            if number == 0:
                self._first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            elif number == self._window:
                for name in self._first.keys() & tensors.keys():
                    tensors[name].copy_(self._first[name])
