"""The first operation, forward or backward, whose error is larger than rounding explains, and what happened there: in
the whole gradient, and in that of one tensor."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.checks.numerics.precision_parity.causes import (
    CAUSES,
    IN_LOW_PRECISION,
    UNDER_OUR_AUTOCAST,
    found,
)
from pytest_trainloop.checks.numerics.precision_parity.modes import LOW, InFloat32, ScaledLoss, unit_roundoff
from pytest_trainloop.checks.numerics.precision_parity.runs import (
    FAILS,
    NOISE,
    PASSES,
    Parity,
    distance,
    distances,
    finite,
    first_gradient,
    scale_at,
)
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.tracing.arguments import floats, in_place
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import NOWHERE, here, place_of
from pytest_trainloop.recording.torch_internals import apply_of, function_class, no_dispatch_modes
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    ATTRIBUTES,
    AUTOGRAD_CALLS,
    FINITENESS_TESTS,
    SIZES,
    SUBTRACTIONS,
    UNSET,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.gradients.vectors import Gradient
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

ENTRIES = 256
"""Entries of a tensor that are kept, always at the same places."""

MOST_OPERATIONS = 20_000
"""Operations that are logged."""

FAR = 10.0
"""Times the explained error from which one tensor is wrong: single tensors reach 3.5 on right loops
(docs/how-it-decides.md#expected-rounding-error)."""

CANCELS = 0.25
"""Size of a difference, relative to its operands, below which digits are lost: two bits and more."""

REPEATED = 16
"""Additions on one line from which they count as one sum."""

CANCELLED = 1e-9
"""Share of the whole gradient's length up to which a tensor's is what float64 leaves of 0."""

MEANINGFUL = 0.1
"""Relative error that rounding may explain of a single tensor's gradient that is judged."""

SEEDS = (*NOISE, 3, 4, 5, 6)
"""Of the roundings: a tensor of one entry lies ten times beyond the largest of seven normal errors once in 1e5."""

TRIED = 4
"""Tensors, and regions, that are tried."""

_DIFFERENCES = SUBTRACTIONS | {"sub_", "__isub__", "add", "__add__", "diff"}
_SUMS = (ADDITIONS - {"radd"}) | {"add_", "__iadd__", "iadd", "sum", "cumsum", "mean", "index_add_"}

_NO_WORK = (
    ATTRIBUTES
    | AUTOGRAD_CALLS
    | FINITENESS_TESTS
    | SIZES
    | UNSET
    | {"__deepcopy__", "detach", "detach_", "requires_grad_", "item", "tolist", "numpy", "is_floating_point"}
)
"""Functions that compute nothing that may be rounded."""


@dataclass(slots=True)
class Sample:
    """Some entries of a tensor, and what all of them have in common."""

    entries: torch.Tensor
    """In float64."""
    peak: float
    """Largest finite absolute value."""
    zeros: float
    """Share of entries that are zero."""
    lost: float
    """Share of entries that are not finite."""
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sample:
        flat = tensor.detach().reshape(-1)
        count, finite_ones = max(1, flat.numel()), torch.isfinite(flat)
        entries = flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].to(torch.float64).clone()
        kept = flat[finite_ones].to(torch.float64)
        peak, zeros = float(kept.abs().max()) if kept.numel() else 0.0, float((flat == 0).sum()) / count
        return cls(entries, peak, zeros, 1.0 - float(finite_ones.sum()) / count, tensor.dtype)

    def distance(self, other: Sample) -> float:
        """The length of the difference over the other's, where both are finite; infinite where more of this one's
        entries are not finite."""
        if self.entries.shape != other.entries.shape:
            return 0.0
        if self.lost > other.lost:
            return math.inf
        both = self.entries.isfinite() & other.entries.isfinite()
        length = float(torch.linalg.vector_norm(other.entries[both]))
        difference = float(torch.linalg.vector_norm((self.entries - other.entries)[both]))
        return difference / length if length else 0.0


@dataclass(slots=True)
class Operation:
    """One operation of the forward pass: the nth call of a function on a line."""

    number: int
    name: str
    place: Place
    nth: int
    module: str
    custom: bool
    """Whether it is an ``autograd.Function`` of the project."""
    inputs: list[Sample]
    made_by: tuple[int, ...]
    """The numbers of the operations that made its inputs."""
    output: Sample
    gradient: Sample | None = None
    """The gradient that arrived at its output."""

    @property
    def named(self) -> str:
        return f"{self.name} in {self.module}" if self.module else self.name


class OpLog(WatchingMode):
    """The operations of one run before its first step: inputs, outputs, and the gradients at the outputs.

    The same code makes the same calls in every precision, so that the logs of two runs are compared call by call. After
    the first backward pass only operations with a history are logged: others clip or count gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[tuple[str, Place, int], Operation] = {}
        self._calls: Counter[tuple[str, Place]] = Counter()
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self._nodes: dict[Any, int] = {}

    def unscale(self, factor: float) -> None:
        """Divide the gradients by a scaler's factor, as its unscale does."""
        for gradient in (o.gradient for o in self.operations.values() if o.gradient is not None):
            gradient.entries /= factor
            gradient.peak /= factor

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        # autograd.Function.apply is not a torch function: it goes through no function mode
        with super().watching(watch), patched(torch.autograd.Function, "apply", self._patched):
            yield
        self._made.clear()
        self._nodes.clear()

    def active(self) -> bool:
        return super().active() and not self.watch.record.steps and len(self.operations) < MOST_OPERATIONS

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "backward":
            with self._unobserved():
                self._log_unseen_functions(floats(tensors_in(args)))
        if name in _NO_WORK:
            return passed_on(func, args, kwargs)
        return self._logged(name, False, func, args, kwargs)

    def _patched(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls.__module__.startswith("torch.") or not self.active():
                return passed_on(apply_of(cls, original), args, kwargs)
            return self._logged(cls.__name__, True, apply_of(cls, original), args, kwargs)

        return classmethod(apply)

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        with self.watch.suspended(), torch.no_grad(), no_dispatch_modes():
            yield

    def _logged(self, name: str, custom: bool, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._unobserved():
            given = floats(tensors_in(args, kwargs))
            self._log_unseen_functions(given)
            inputs = [Sample.of(t) for t in given]
            made_by = tuple(self._made[id(t)][1] for t in given if id(t) in self._made)
        out = passed_on(func, args, kwargs)
        with self._unobserved():
            made = floats(tensors_in(args[0] if in_place(name) and args else out))
            if made and (any(t.requires_grad for t in made) or not self.watch.record.autograd_passes()):
                self._keep(name, here()[0], custom, inputs, made_by, made)
        return out

    def _keep(
        self,
        name: str,
        place: Place,
        custom: bool,
        inputs: list[Sample],
        made_by: tuple[int, ...],
        made: list[torch.Tensor],
    ) -> None:
        self._calls[name, place] += 1
        number, nth, module = len(self.operations), self._calls[name, place], self.watch.module_path()
        operation = Operation(number, name, place, nth, module, custom, inputs, made_by, Sample.of(made[0]))
        self.operations[name, place, nth] = operation
        for tensor in made:
            self._made[id(tensor)] = (tensor, number)
            if tensor.grad_fn is not None:
                self._nodes[tensor.grad_fn] = number

        def arrived(gradient: torch.Tensor | None) -> None:
            if gradient is not None and operation.gradient is None and self._watch is not None and floats([gradient]):
                with self._unobserved():
                    operation.gradient = Sample.of(gradient)

        if made[0].requires_grad:
            on_gradient(made[0], arrived)

    def _log_unseen_functions(self, given: list[torch.Tensor]) -> None:
        """Log the Functions of the project that made these tensors unobserved: ``f = MyFunction.apply`` goes through
        neither mode nor patch. Their place is the line on which backward is defined."""
        for tensor in given:
            node: Any = tensor.grad_fn
            function = function_class(node)
            if function is None or node in self._nodes or function.__module__.startswith("torch."):
                continue
            made_by = tuple(self._nodes[n] for n, _ in node.next_functions if n in self._nodes)
            code = getattr(function.backward, "__code__", None)
            place = NOWHERE if code is None else place_of(code.co_filename, code.co_firstlineno)
            self._keep(function.__name__, place, True, [], made_by, [tensor])


class Aligned(NamedTuple):
    """One operation in low precision, in float64, and in float64 with rounding."""

    low: Operation
    reference: Operation
    rounded: list[Operation]


class Wrong(NamedTuple):
    """An operation whose result (in backward: the gradient that it gives) is farther from float64 than rounding
    explains, while what it was given is not."""

    cause: str
    operation: Operation
    low: Sample
    reference: Sample
    backward: bool = False


def aligned_operations(runs: LowPrecisionRuns) -> list[Aligned]:
    """The operations that all runs have, in the order of the low one. Raises ``CannotDecide`` where one of these runs
    cannot be made."""
    low, reference, rounded = OpLog(), OpLog(), [OpLog(), OpLog()]
    record = runs.again(low.contexts)
    if backwards := record.backwards():
        low.unscale(scale_at(record, backwards[0]))
    runs.reference_inside(reference.contexts)
    for noise, log in zip((None, 1), rounded, strict=True):
        runs.rounded(noise, contexts=log.contexts)
    others = [log.operations for log in (reference, *rounded)]
    keys = [key for key in low.operations if all(key in other for other in others)]
    return [Aligned(low.operations[k], reference.operations[k], [log.operations[k] for log in rounded]) for k in keys]


def wrong_operations(aligned: Sequence[Aligned], unit: float) -> Iterator[Wrong]:
    """Those of the forward pass in order, then the one that gets the right gradient and is the first in backward to
    give a wrong one."""

    def is_wrong(low: Sample, reference: Sample, rounded: Sequence[Sample]) -> bool:
        return low.distance(reference) > FAR * max(unit, *(r.distance(reference) for r in rounded))

    for low, reference, rounded in aligned:
        if is_wrong(low.output, reference.output, [r.output for r in rounded]):
            yield Wrong(_cause(low, reference), low, low.output, reference.output)
    wrong: dict[int, tuple[Sample, Sample]] = {}
    for number, (low, reference, rounded) in enumerate(aligned):
        gradients = [r.gradient for r in rounded if r.gradient is not None]
        if low.gradient is None or reference.gradient is None or len(gradients) < len(rounded):
            continue
        if is_wrong(low.gradient, reference.gradient, gradients):
            wrong[number] = (low.gradient, reference.gradient)
    if not wrong:
        return
    source, (there, right) = aligned[max(wrong)].low, wrong[max(wrong)]
    users = [a for n, a in enumerate(aligned) if source.number in a.low.made_by and n not in wrong and a.low.gradient]
    user = next((a for a in users if a.low.custom), users[0] if users else None)
    if user is not None and user.low.custom:
        cause = "custom_backward"
    elif there.lost:
        cause = "underflow" if user is not None and _inputs_vanished(user.low, user.reference) else "overflow"
    else:
        cause = "underflow" if there.zeros > right.zeros else "precision_lost"
    yield Wrong(cause, source if user is None else user.low, there, right, backward=True)


def _inputs_vanished(low: Operation, reference: Operation) -> bool:
    """Whether some inputs of an operation are zero in low precision alone."""
    return any(i.zeros > j.zeros for i, j in zip(low.inputs, reference.inputs, strict=False))


def _cause(low: Operation, reference: Operation) -> str:
    """What happened in an operation whose inputs were right and whose output is not."""
    held = torch.finfo(low.output.dtype)
    if low.output.lost:
        return "underflow" if _inputs_vanished(low, reference) and reference.output.peak <= held.max else "overflow"
    if low.name in _SUMS and low.nth > REPEATED:
        return "accumulation"
    size = max((i.peak for i in reference.inputs), default=0.0)
    if low.name in _DIFFERENCES and reference.output.peak < CANCELS * size:
        return "cancellation"
    if low.output.zeros > reference.output.zeros and reference.output.peak < held.tiny:
        return "underflow"
    return "accumulation" if low.name in _SUMS and low.output.dtype in LOW else "precision_lost"


def whole_gradient(evidence: Evidence, runs: LowPrecisionRuns, parity: Parity) -> Finding:
    """Why the gradient is farther from float64 than rounding explains."""
    expected = first_gradient(runs.reference)
    scale = _helping_scale(runs, parity, expected)
    try:
        aligned = aligned_operations(runs)
    except CannotDecide:
        aligned = []
    wrong = next(wrong_operations(aligned, unit_roundoff(parity.dtype)), None)
    sure = parity.ratio >= FAILS
    record = runs.record
    first = next(iter(record.backwards() or record.autograd_passes()), "")  # a gradient may accumulate nowhere
    if scale is not None and (wrong is None or wrong.backward):
        gradient = first_gradient(record, runs.reference)
        both = {n: (gradient[n], g) for n, g in expected.items() if n in gradient and len(gradient[n]) == len(g)}
        lost = {n: int(((low == 0) & (g != 0)).sum()) for n, (low, g) in both.items()}
        last = next((a for a in reversed(aligned) if a.low.gradient and a.reference.gradient), None)
        facts = _facts(runs, parity, *((last.low.gradient, last.reference.gradient) if last else (None, None)))
        facts |= {"scale": scale, "zeros": sum(lost.values()) / max(1, sum(g.numel() for g in expected.values()))}
        calls, variant = record.scaler_calls(), "scale too low"
        if not calls:
            variant = "no scaler"
        elif not any(call.enabled for call in calls):
            variant = "scaler disabled"
        elif runs.scale is None and all(c.factor == 1.0 for c in calls if c.what == "scale" and c.enabled):
            variant = "scale of one"
        if variant in ("scaler disabled", "scale of one"):
            facts["change"] = evidence.shared(MadeAt.of).scaler()
        names = [n for n, count in lost.items() if count] or list(expected)
        finding = found("underflow", first, names, variant, **facts)
    elif wrong is None:
        facts = _facts(runs, parity, None, None)
        finding = found("precision_lost", first, first_gradient(record), "no operation", what="the gradient", **facts)
    else:
        left = _left_in_float32(runs, wrong.operation, expected).get("", math.inf)
        facts = _facts(runs, parity, wrong.low, wrong.reference)
        if left < max(2.0 * parity.explained, parity.measured / 4):
            sure |= left <= parity.measured / 2
            facts |= {"right": True, "left": left}
        finding = _of_operation(wrong, (), facts)
    if sure and not runs.imposed:
        return finding
    settled = UNDER_OUR_AUTOCAST if runs.imposed else IN_LOW_PRECISION
    repair = f"{finding.repair or CAUSES[finding.cause].repair}; {settled}"
    return replace(finding, level="advice", repair=repair)


def _helping_scale(runs: LowPrecisionRuns, parity: Parity, expected: Gradient) -> float | None:
    """A factor on the loss with which the gradient is right: it was too small for float16."""
    if parity.dtype is not torch.float16 or not parity.finite:
        return None
    peak = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    if not 0.0 < peak < 1.0:
        return None
    scale = 2.0 ** min(24, math.floor(math.log2(64.0 / peak)))
    record = runs.again(lambda watch: (ScaledLoss(scale),))
    gradient = {n: g / scale for n, g in first_gradient(record, runs.reference).items()}
    return scale if finite(gradient) and distance(expected, gradient) <= parity.measured / 2 else None


def one_tensor(runs: LowPrecisionRuns) -> Iterator[Finding]:
    """The first tensor whose gradient one operation loses, while the whole gradient is as far from float64 as rounding
    explains: a small layer counts little in its length.

    Single tensors scatter: those of few entries, and those whose gradient nearly cancels (a bias before a norm). So a
    tensor is judged only where roundings leave its gradient meaningful, and named only where one operation is wrong and
    the tensor right again once that is computed in float32.
    """
    if runs.low is None or runs.imposed:
        return
    unit, expected = unit_roundoff(runs.low), first_gradient(runs.reference)
    errors, whole = distances(expected, first_gradient(runs.record, runs.reference)), _length(expected)
    suspects = [n for n in errors if errors[n] > FAR * unit and _length({n: expected[n]}) > CANCELLED * whole]
    explained = dict.fromkeys(suspects, unit) if len(suspects) < len(expected) else {}
    for seed in SEEDS:
        if not explained:
            return
        rounded = distances(expected, first_gradient(runs.rounded(seed)))
        explained = {n: max(e, rounded.get(n, 0.0)) for n, e in explained.items()}
        explained = {n: e for n, e in explained.items() if e <= MEANINGFUL and errors[n] > FAR * e}
    again = distances(expected, first_gradient(runs.again(), runs.reference))
    names = [n for n in explained if again.get(n) == errors[n]][:TRIED]
    try:
        wrong = list(wrong_operations(aligned_operations(runs), unit)) if names else []
    except CannotDecide:
        return
    for name in sorted(names, key=lambda n: -errors[n] / explained[n]):
        parity, layer = (
            Parity(dtype=runs.low, measured=errors[name], explained=explained[name]),
            name.rpartition(".")[0],
        )
        tried: set[object] = set()
        for one in sorted(wrong, key=lambda w: not layer.startswith(w.operation.module or layer)):
            operation = one.operation
            region = operation.module or operation.place
            if region in tried or len(tried) >= TRIED:
                continue
            tried.add(region)
            left = _left_in_float32(runs, operation, expected).get(name, parity.measured)
            if left <= max(PASSES * parity.explained, parity.measured / FAR):
                facts = _facts(runs, parity, one.low, one.reference)
                facts |= {"tensor": name, "of": f" of {name}", "part": _length({name: expected[name]}) / whole}
                yield _of_operation(one, (name,), facts | {"right": True, "left": left})
                return


def _length(gradient: Gradient) -> float:
    return float(torch.linalg.vector_norm(torch.cat([g.double() for g in gradient.values()]))) if gradient else 0.0


def _left_in_float32(runs: LowPrecisionRuns, operation: Operation, expected: Gradient) -> dict[str, float]:
    """The error of the gradient with the region of an operation in float32: by parameter, and of the whole as "".
    Nothing where that cannot be computed."""
    region = InFloat32(operation.module, operation.place, operation.name if operation.custom else "")
    record = runs.again(region.contexts)
    if record.raised is not None or not region.met:
        return {}
    gradient = first_gradient(record, runs.reference)
    return {**distances(expected, gradient), "": distance(expected, gradient)}


def _of_operation(wrong: Wrong, names: tuple[str, ...], facts: dict[str, Any]) -> Finding:
    """The finding at an operation, with further names of what it loses."""
    operation = wrong.operation
    facts |= {"what": operation.named, "backward": wrong.backward}
    facts["where"] = f"module {operation.module!r}" if operation.module else "this line"
    culprits = (*filter(None, (operation.module, operation.name)), *names)
    return found(wrong.cause, operation, culprits, **facts)


def _facts(runs: LowPrecisionRuns, parity: Parity, low: Sample | None, reference: Sample | None) -> dict[str, Any]:
    """The numbers of a gradient, and of a value on the way to it in low precision and in float64."""
    dtype = low.dtype if low is not None and low.dtype in LOW else parity.dtype
    held, known = torch.finfo(dtype), low is not None and reference is not None
    facts: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "how": runs.how, "known": known}
    facts |= {"finite": parity.finite, "error": parity.measured, "explained": parity.explained, "ratio": parity.ratio}
    facts |= {"least": held.smallest_normal * held.eps, "most": held.max, "peak": 0.0, "lost": 0.0, "vanished": 0.0}
    if low is not None and reference is not None:
        facts |= {"peak": reference.peak, "lost": low.lost}
        vanished = low.zeros - reference.zeros
        facts["vanished"] = vanished if vanished > 0.005 and not low.lost else 0.0
    on_cuda = any(p.device.startswith("cuda") for p in runs.record.parameters)
    single = "float32" if torch.get_float32_matmul_precision() == "highest" else "TF32"
    before = f"{parity.measured:.2g}" if math.isfinite(parity.measured) else "infinitely far"
    facts |= {"products": single if on_cuda else "", "right": False, "left": math.inf, "before": before, "where": ""}
    return facts | {"of": "", "tensor": "", "part": 0.0}
