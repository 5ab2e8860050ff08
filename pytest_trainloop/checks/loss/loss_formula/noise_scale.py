"""Noise of a latent variable whose scale is another than the one that the KL divergence of the same loop reads.

The divergence says of which number the variance is the exponential. What fresh normal noise is multiplied by must be
the root of that variance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.loss_formula.causes import found
from pytest_trainloop.checks.loss.loss_formula.values import culprits_of
from pytest_trainloop.instruments.formulas.likelihoods import DIVERGENCE
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.recording.torch_names import CASTS, DIVISIONS, MULTIPLICATIONS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.formulas.cut import Cut
    from pytest_trainloop.instruments.formulas.search import Match
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.instruments.tracing.loss_slice import Value as Taped
    from pytest_trainloop.runs.evidence import Evidence

_NORMAL = frozenset({"randn", "randn_like", "normal", "normal_"})
_MOVES = VIEWS | CASTS


def other_scale(evidence: Evidence, matches: Sequence[Match]) -> Iterator[Finding]:
    """``matches``: right forms of the first steps."""
    given: dict[Cut, Any] = {m.cut: getattr(m.variant.basis, "keywords", {}) for m in matches if m.form is DIVERGENCE}
    divergences = {cut: float(how["times"]) for cut, how in given.items() if how.get("logs")}
    if not divergences:
        return
    seen = Calls()
    evidence.rerun(contexts=seen.contexts, double=True, enough=lambda record: record.rounds >= 1, may_raise=True)
    scales = [scale for call in seen.calls for scale in _scales(call)]
    for cut, times in divergences.items():
        spread = cut.slice.values[cut.arguments[1]]
        for call, power, logarithm in scales:
            if power == times / 2 or not any(_is_it(value, spread) for value in _moved(logarithm)):
                continue
            facts: dict[str, Any] = {"scale": _exp(power) if power else "x", "variance": _exp(times)}
            facts |= {"same": power == times, "right": _exp(times / 2), "count": cut.count, "change": str(call.place)}
            names = culprits_of(cut.slice, cut.arguments[1:]) or (call.name,)
            yield found("parameter_confused", call, names, "noise", form=DIVERGENCE.name, trained="", **facts)
            return


def _moved(value: Value) -> Iterator[Value]:
    """A value, and what it was moved from."""
    yield value
    while value.made_by is not None and value.made_by.name in _MOVES and value.made_by.inputs:
        value = value.made_by.inputs[0]
        yield value


def _is_it(value: Value, spread: Taped) -> bool:
    """Whether two runs in float64 made the same there: one line may make several values."""
    ends = (value.smallest, float(spread.tensor.min())), (value.largest, float(spread.tensor.max()))
    same = all(abs(one - other) <= 1e-9 * (1 + abs(other)) for one, other in ends)
    return same and value.made_by is not None and value.made_by.place == spread.place


def _exp(factor: float) -> str:
    return f"exp({'' if factor == 1 else f'{factor:g} * '}x)"


def _scales(call: Call) -> Iterator[tuple[Call, float, Value]]:
    """What multiplies fresh noise in a call: the exponential of a multiple of a value, or the value itself (0)."""
    if call.name not in MULTIPLICATIONS | {"addcmul"}:
        return
    for noise in call.inputs:
        made = noise.source(_MOVES).made_by
        if made is None or made.name not in _NORMAL:
            continue
        for scale in (value for value in call.inputs if value.history and value.shape == noise.shape):
            yield call, 0.0, scale
            made = scale.source(_MOVES).made_by
            if made is not None and made.name == "exp" and made.inputs:
                yield call, *_multiple(made.inputs[0])


def _multiple(value: Value) -> tuple[float, Value]:
    """By what a value was multiplied, and the value before."""
    factor, scaling = 1.0, MULTIPLICATIONS | DIVISIONS
    while (made := value.source(_MOVES).made_by) is not None and len(made.inputs) == 1 and made.name in scaling:
        numbers = [one for one in made.plain if isinstance(one, (int, float))]
        if len(numbers) != 1:
            break
        factor = factor / numbers[0] if made.name in DIVISIONS else factor * numbers[0]
        value = made.inputs[0]
    return factor, value
