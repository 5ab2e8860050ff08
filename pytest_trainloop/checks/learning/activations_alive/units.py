"""What each unit behind an activation gives, over different batches: one number only, or values at its ends only."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.instruments.batches.own_data import HAND_OVER, makes_own_data
from pytest_trainloop.instruments.tracing.arguments import floats
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import shape_of
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CONVOLUTIONS, DROPOUTS, NORMALISATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

ROUNDS = 25
"""Steps of the run."""

WINDOW = 6
"""Steps over which a unit is looked at as training begins; twice as many as the run ends."""

QUIET = 0.3
"""The share of silent units in each layer below which the run ends after two windows: half of what is reported. Units
die by and by."""

NO_UNITS = 3
"""Steps after which the run ends where no activation was called whose units can be dead or saturated."""

DIFFERENT = 4
"""Different batches in these, at least."""

FEWEST = 16
"""Units of a layer below which shares say little, unless it is all of them."""

MOST_OUTPUTS = 0.9
"""The share of a saturated unit's outputs that lie at the ends."""

_LINEAR = frozenset("linear bilinear layer_norm rms_norm matmul __matmul__ __rmatmul__ mm addmm bmm baddbmm".split())
_CHANNELS = CONVOLUTIONS | (NORMALISATIONS - _LINEAR)
_SAME_UNITS = DROPOUTS | frozenset(
    "add add_ __add__ __iadd__ __radd__ sub __sub__ mul mul_ __mul__ __imul__ __rmul__ div __truediv__ contiguous to "
    "float half bfloat16 clone".split()
)
_ONE_SIDED = frozenset("relu relu_ relu6 threshold threshold_ clamp_min clamp_min_ hardswish hardsigmoid".split())
_TWO_SIDED = {"tanh": (0.0, 0.99), "sigmoid": (0.5, 0.495), "hardtanh": (0.0, 0.99)}
"""Centre, and the distance from it beyond which an output is saturated."""


@dataclass(slots=True)
class Outputs:
    """The lowest and the highest output of each unit, and how many of its outputs lie at an end of the activation."""

    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    at_ends: torch.Tensor | None = None
    outputs: int = 0
    """Of each unit."""
    batches: set[int] = field(default_factory=set)

    def add(self, values: torch.Tensor, centre: float, beyond: float, batch: int) -> None:
        """``values`` of shape ``(units, everything else)``."""
        low, high = values.amin(1), values.amax(1)
        at_ends = ((values - centre).abs() > beyond).sum(1)
        self.batches.add(batch)
        if self.low is None or self.high is None or self.at_ends is None:
            self.low, self.high, self.at_ends = low, high, at_ends
        elif self.low.shape == low.shape:
            self.low = torch.minimum(self.low, low)
            self.high = torch.maximum(self.high, high)
            self.at_ends = self.at_ends + at_ends
        else:
            return
        self.outputs += values.shape[1]

    @property
    def dead(self) -> int:
        """Units that gave one number only."""
        return 0 if self.low is None or self.high is None else int((self.low == self.high).sum())

    @property
    def quiet(self) -> bool:
        """Whether most units gave different numbers, away from the ends, for as many batches as are judged by."""
        if self.low is None or len(self.batches) < DIFFERENT:
            return False
        return max(self.dead, self.saturated) < QUIET * len(self.low)

    @property
    def saturated(self) -> int:
        """Units most of whose outputs lie at the ends."""
        return 0 if self.at_ends is None else int((self.at_ends >= MOST_OUTPUTS * self.outputs).sum())


@dataclass(frozen=True, slots=True)
class Layer:
    """The units of one layer behind one activation."""

    path: str
    """The module that gives the activation its input."""
    kind: str
    """The activation."""
    place: str
    units: int
    dead_at_start: int
    dead: int
    saturated_at_start: int
    saturated: int
    batches: int
    """Different batches at the end."""
    inputs: tuple[float, float] = (math.nan, math.nan)
    """The lowest and the highest input of the layer."""


class Units:
    """The layers of a run over different batches."""

    def __init__(self, layers: tuple[Layer, ...], steps: int, lrs: tuple[float, ...]) -> None:
        self.layers, self.steps, self.lrs = layers, steps, lrs

    @classmethod
    def of(cls, evidence: Evidence) -> Units:
        """Raises ``CannotDecide`` where too few different batches are given, or no activation is called."""
        seen = evidence.run()
        if not evidence.repeatable:
            raise CannotDecide("this takes further runs of the loop: return a TrainLoop from a marked test")
        own_data = "batches" not in evidence.offers and evidence.shared(makes_own_data)
        if "batches" not in evidence.offers and not own_data:
            raise CannotDecide(
                "one fixed batch cannot tell a dead unit from one that is not needed for it: give batches=",
                needs=HAND_OVER,
            )
        mode = _Activations(own_data=own_data)
        per_round = math.ceil(seen.items / max(seen.rounds, 1))
        record = evidence.rerun(
            contexts=mode.contexts,
            before_item=mode.note_item,
            count=ROUNDS * max(per_round, 1),
            enough=mode.enough,
            may_raise=True,
        )
        if not mode.called:
            raise DoesNotApply("ReLU, tanh or sigmoid is called on no output of a layer that trains")
        if not own_data and len(mode.different) < DIFFERENT:
            few = f"{len(mode.different)} different batches are too few to call a unit dead"
            if record.items <= len(mode.different):
                raise CannotDecide(f"{few}, and {record.rounds} steps of fit take no more")
            raise CannotDecide(f"{few}: give {DIFFERENT} or more in batches=", needs=HAND_OVER)
        steps = record.innermost_steps()
        lrs = tuple(max(step.lrs, default=math.nan) for step in steps)
        return cls(tuple(mode.layers(record)), record.rounds, lrs)


class _Activations(WatchingMode):
    def __init__(self, *, own_data: bool) -> None:
        super().__init__()
        self._own_data = own_data
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        self._seen: dict[tuple[str, str], tuple[str, Outputs, Outputs, Outputs]] = {}
        self._batch = 0
        self._parameters: dict[str, int] = {}
        self._inputs: dict[str, tuple[float, float]] = {}
        self.different: dict[tuple[float, ...], int] = {}
        """The batches that were taken, each once, with a number."""

    @property
    def called(self) -> bool:
        """Whether an activation was called on what a layer gave."""
        return bool(self._seen)

    def enough(self, record: Record) -> bool:
        """Whether the run ends: early where there is nothing to look at, or few units of any layer are silent."""
        if not self.called or record.rounds >= ROUNDS:
            return record.rounds >= NO_UNITS
        return record.rounds >= 2 * WINDOW and all(second.quiet for _, _, second, _ in self._seen.values())

    def note_item(self, number: int, item: Any) -> None:
        # The same rows in another order are no other batch; squares, since standardized rows all have the sum 0.
        real = [t.detach().double() for t in tensors_in(item) if t.numel() and not t.is_complex()]
        sums = [total for t in real for total in (t.sum(), t.square().sum(), t.pow(3).sum(), t.pow(4).sum())]
        mark = tuple(float(f"{float(total):.6g}") for total in sums)
        self._batch = number if self._own_data else self.different.setdefault(mark, len(self.different))

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        known = None if source is None else self._known(source)
        out = super().call(name, func, args, kwargs)
        if not isinstance(out, torch.Tensor) or not out.requires_grad:
            return out
        if name in _LINEAR or name in _CHANNELS:
            axis = out.dim() - 1 if name in _LINEAR else 1 if out.dim() > 1 else 0
            owner = self._owner(*args[1:], *kwargs.values(), *args[:1])
            if owner is not None:
                self._note(out, axis, owner)
                self._note_inputs(owner, source)
        elif known is None or source is None or shape_of(source) != shape_of(out):
            pass
        elif name in _SAME_UNITS:
            self._note(out, *known)
        elif name in _ONE_SIDED or name.rstrip("_") in _TWO_SIDED:
            with self.watch.suspended(), torch.no_grad():
                self._look(name.rstrip("_"), out.detach(), *known)
            self._note(out, *known)
        return out

    def _owner(self, *given: Any) -> str | None:
        """The first of these tensors that is a parameter: torch's layer that holds it, else its own name."""
        table = self.watch.table
        indices = (table.index(value) for value in given if isinstance(value, torch.Tensor))
        found = next((table.entries[i] for i in indices if i is not None), None)
        if found is None:
            return None
        path = found.owner if found.layer else found.name
        self._parameters[path] = found.index
        return path

    def _note(self, out: torch.Tensor, axis: int, path: str) -> None:
        if len(self._made) > 4096:
            self._made = {key: made for key, made in self._made.items() if made[0]() is not None}
        self._made[id(out)] = (weakref.ref(out), axis, path)

    def _note_inputs(self, path: str, given: torch.Tensor | None) -> None:
        with self.watch.suspended(), torch.no_grad():
            if given is None or not floats([given]):
                return
            low, high = (float(v) for v in given.detach().aminmax())
        before = self._inputs.get(path, (low, high))
        self._inputs[path] = (min(low, before[0]), max(high, before[1]))

    def _known(self, tensor: torch.Tensor) -> tuple[int, str] | None:
        reference, axis, path = self._made.get(id(tensor), (None, 0, ""))
        return (axis, path) if reference is not None and reference() is tensor else None

    def _look(self, kind: str, out: torch.Tensor, axis: int, path: str) -> None:
        if not floats([out]) or not out.numel():
            return
        units = out.movedim(axis, 0)
        units = units.reshape(len(units), -1)  # one example without an axis of rows has one value for each unit
        centre, beyond = _TWO_SIDED.get(kind, (0.0, math.inf))
        if (path, kind) not in self._seen:
            self._seen[path, kind] = (str(here()[0]), Outputs(), Outputs(), Outputs())
        _, start, second, end = self._seen[path, kind]
        rounds = self.watch.record.rounds
        if rounds < 2 * WINDOW:
            (start if rounds < WINDOW else second).add(units, centre, beyond, self._batch)
        elif rounds >= ROUNDS - 2 * WINDOW:
            end.add(units, centre, beyond, self._batch)

    def layers(self, record: Record) -> list[Layer]:
        """Those that were looked at over enough batches, behind modules that train."""
        held = {p.index for p in record.parameters if p.trainable and p.index in record.held}
        trained = {path for path, index in self._parameters.items() if index in held}
        return [
            Layer(
                path=path,
                kind=kind,
                place=place,
                units=0 if end.low is None else len(end.low),
                dead_at_start=start.dead,
                dead=end.dead,
                saturated_at_start=start.saturated,
                saturated=end.saturated,
                batches=len(end.batches),
                inputs=self._inputs.get(path, (math.nan, math.nan)),
            )
            for (path, kind), (place, start, second, last) in self._seen.items()
            for end in [last if last.outputs else second]
            if path in trained and len(end.batches) >= DIFFERENT
        ]
