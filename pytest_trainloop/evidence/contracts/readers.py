"""Which contracts a call is held against, by the name of the function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.evidence.contracts import (
    binary,
    classes,
    divergence,
    handmade,
    likelihoods,
    parts,
    scores,
    shapes,
    tokens,
)
from pytest_trainloop.observe.functions import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.evidence.contracts.call import Breach, Call

_DISTANCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_SIGNED = ("cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss", "soft_margin_loss")
BY_HAND = frozenset("log_softmax logsumexp log_sigmoid log log1p softplus gather sub rsub __sub__ mul".split())
"""Operations that losses are written with."""

_OWN: dict[str, tuple[Callable[[Call], Iterator[Breach]], ...]] = {
    **dict.fromkeys(LOSSES, ()),
    "cross_entropy": (
        scores.classes,
        scores.over_the_batch,
        classes.axis_of_classes,
        classes.indices,
        classes.distributions,
        tokens.padding,
        tokens.shift,
    ),
    "nll_loss": (
        classes.log_probabilities,
        classes.axis_of_classes,
        classes.indices,
        tokens.padding,
        tokens.shift,
    ),
    "binary_cross_entropy": (binary.probabilities, scores.twice, binary.targets, shapes.weights),
    "binary_cross_entropy_with_logits": (scores.binary, binary.targets, shapes.weights, tokens.padded_entries),
    "multilabel_soft_margin_loss": (scores.binary, binary.targets, shapes.weights),
    "multilabel_margin_loss": (binary.hot_lists,),
    "kl_div": (divergence.divergence, shapes.broadcast),
    "gaussian_nll_loss": (likelihoods.variance, shapes.broadcast),
    "poisson_nll_loss": (likelihoods.rate, shapes.broadcast),
    "ctc_loss": (likelihoods.alignment,),
    **dict.fromkeys(_DISTANCES, (shapes.broadcast, tokens.padded_entries)),
    **dict.fromkeys(_SIGNED, (binary.signs, shapes.broadcast)),
    "log_softmax": (scores.classes, scores.over_the_batch),
    "logsumexp": (scores.normaliser, scores.over_the_batch),
    "log_sigmoid": (scores.binary,),
    "log": (scores.twice, scores.hand_written, binary.logarithm),
    "softplus": (scores.softplus,),
    "log1p": (scores.written_out,),
    "product": (handmade.products,),
    "gather": (handmade.gathered, parts.turned_pick),
    "difference": (handmade.differences,),
}
READERS = {name: (*own, parts.turned) if name in LOSSES else own for name, own in _OWN.items()}
