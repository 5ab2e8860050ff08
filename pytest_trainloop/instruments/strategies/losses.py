"""Calls of a loss: outputs and targets, as its contract describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from pytest_trainloop.instruments.strategies.loss_cases import Case, Trait, inputs_of, target_shape, traits
from pytest_trainloop.instruments.strategies.seeds import seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.declare.losscontract import LossContract

MOST_ROWS = 6
"""Rows of a drawn call at most, by default."""


@st.composite
def cases(
    draw: st.DrawFn,
    contract: LossContract,
    *,
    only: Sequence[Trait] | None = None,
    least_rows: int = 1,
    most_rows: int = MOST_ROWS,
) -> Case:
    """Calls of a loss function as data, without tensors; ``calls``, ``outputs`` and ``targets`` draw the tensors.

    Parameters
    ----------
    contract
        what the loss function takes
    only
        the special properties that may be drawn, at most one per call: "ordinary", "one_row", "one_class",
        "no_partner", "tied", "zero", "right", "large", "saturated", "some_ignored", "all_ignored"
    least_rows, most_rows
        bounds of the number of rows; where a property needs more rows than ``most_rows``, it gets them

    Raises
    ------
    hypothesis.errors.InvalidArgument
        when drawn from: no property in ``only`` is one that this contract can have
    """
    known = traits(contract)
    trait = draw(st.sampled_from([t for t in known if only is None or t in only]))
    least = max(least_rows, contract.min_rows, _fewest(contract, trait))
    rows = 1 if trait == "one_row" else draw(st.integers(least, max(least, most_rows)))
    entries = torch.Size(target_shape(contract, rows)).numel()
    ignored: tuple[int, ...] = ()
    if trait == "all_ignored":
        ignored = tuple(range(entries))
    elif trait == "some_ignored":
        most = max(1, entries - 1)
        ignored = tuple(sorted(draw(st.sets(st.integers(0, entries - 1), min_size=1, max_size=most))))
    return Case(rows, trait, ignored, draw(seeds()))


def calls(
    contract: LossContract, *, only: Sequence[Trait] | None = None, dtype: torch.dtype = torch.float32
) -> st.SearchStrategy[tuple[torch.Tensor, ...]]:
    """The arguments of one call of the contract's criterion: its outputs, then its target. Shapes and dtypes are as in
    ``LossContract``; with ``target="pair"`` there is no separate target.

    Parameters
    ----------
    contract
        what the loss function takes
    only
        the special properties that may be drawn, as for ``cases``
    dtype
        of the floating-point tensors

    Raises
    ------
    hypothesis.errors.InvalidArgument
        when drawn from: no property in ``only`` is one that this contract can have
    """

    def tensors(case: Case) -> tuple[torch.Tensor, ...]:
        inputs = inputs_of(contract, case).to(dtype)
        return inputs.outputs if inputs.target is None else (*inputs.outputs, inputs.target)

    return cases(contract, only=only).map(tensors)


def outputs(
    contract: LossContract, *, only: Sequence[Trait] | None = None, dtype: torch.dtype = torch.float32
) -> st.SearchStrategy[torch.Tensor]:
    """Outputs of a model as the contract's ``expects`` describes them: ordinary, tied, large, zero, saturated. The
    first one where a call takes several.

    Arguments as for ``calls``.
    """
    return calls(contract, only=only, dtype=dtype).map(lambda call: call[0])


def targets(
    contract: LossContract, *, only: Sequence[Trait] | None = None, dtype: torch.dtype = torch.float32
) -> st.SearchStrategy[torch.Tensor]:
    """Targets as the contract describes them: mixed, of one class only, without a partner, partly or all ignored.

    Arguments as for ``calls``.
    """
    return calls(contract, only=only, dtype=dtype).map(lambda call: call[-1])


def _fewest(contract: LossContract, trait: Trait) -> int:
    """The rows below which a case would be special in another way, too."""
    if contract.expects == "embeddings" and contract.target == "index":
        return 5 if trait == "no_partner" else 4
    return 1 if trait == "one_row" else 2
