"""Whether a stop-gradient stands on the wrong side of a comparison: SimSiam with the predictor's output detached, a
student detached in place of its teacher.

The loop is run again with the operation left out and the other side of each comparison detached in its place. Only
where a gradient then reaches every parameter that lacked one, and still every one that had one, is the stop-gradient
moved: two towers that both must train (CLIP) lose one of them by it, and there the operation is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.gradients.dependence import until_stepped
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, MULTIPLICATIONS, PRODUCTS
from pytest_trainloop.tracing.cut_candidates import Tracer
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.cut_candidates import Candidate

_COMPARISONS = DISTANCE_LOSSES | {
    "cosine_similarity",
    "cosine_embedding_loss",
    "pairwise_distance",
    "kl_div",
    "cross_entropy",
}
MOST_KEPT = 256
"""Tensors that are followed."""


class OtherSide(NamedTuple):
    """A comparison whose other side takes the stop-gradient."""

    op: str
    place: Place


class _Moved(Tracer):
    """Leaves operations out, and detaches what their results are compared with."""

    def __init__(self, left_out: Sequence[Candidate]) -> None:
        super().__init__(left_out)
        self._mine: list[torch.Tensor] = []
        self.met: list[OtherSide] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [t for t in tensors_in(args, kwargs) if t.requires_grad]
        mine = [t for t in given if any(t is kept for kept in self._mine)]
        others = [t for t in given if not any(t is m for m in mine)]
        if mine and others and self._compares(name_of(func), [*mine, *others], others):
            self.met.append(OtherSide(name_of(func), here()[0]))
            stopped = {id(t): t.detach() for t in others}
            return func(
                *(stopped.get(id(a), a) for a in args), **{key: stopped.get(id(v), v) for key, v in kwargs.items()}
            )
        out = super().call(name, func, args, kwargs)
        if mine and not others:
            self._keep(out)
        return out

    def _changed(self, *given: Any) -> Any:
        out = super()._changed(*given)
        self._keep(out)
        return out

    def _keep(self, out: Any) -> None:
        self._mine = [*self._mine, *tensors_in(out)][-MOST_KEPT:]

    def _compares(self, name: str, given: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
        """A comparison by name, or a product of vectors of length 1 outside of layers; with no parameter itself."""
        if any(t.is_leaf for t in others):
            return False
        products = MULTIPLICATIONS | (PRODUCTS - {"linear"})
        return name in _COMPARISONS or (
            name in products and not self.watch.inside_parameters() and all(_of_length_one(t) for t in given)
        )


def other_side(
    evidence: Evidence, names: Sequence[str], left_out: Sequence[Candidate], reached: frozenset[str]
) -> OtherSide | None:
    """The first comparison with a history on its other side, where the stop-gradient there leaves no parameter without
    a gradient. ``reached``: those of the names that get one with these operations left out."""
    moved = _Moved(left_out)
    record = evidence.rerun(enough=until_stepped(evidence, names), contexts=moved.contexts, may_raise=True)
    before = {n for n in _arriving(evidence.run()) if n not in names}
    return moved.met[0] if moved.met and {*before, *reached} <= _arriving(record) else None


def _arriving(record: Record) -> set[str]:
    """The names of the parameters that some optimizer holds and some gradient reaches that is not zero."""
    return {p.name for p in record.parameters if p.index in record.held and record.reached(p.index)}


def _of_length_one(tensor: torch.Tensor) -> bool:
    """Whether the vectors along the last or the one before the last axis have length 1, but for rounding."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
        return False
    values, eps = tensor.detach().double(), torch.finfo(tensor.dtype).eps
    return any(
        bool(((values.norm(dim=axis) - 1).abs() <= 16 * eps * tensor.shape[axis] ** 0.5).all()) for axis in (-1, -2)
    )
