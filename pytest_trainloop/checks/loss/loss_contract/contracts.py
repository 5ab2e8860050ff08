"""Which contracts a call is held against, by the name of the function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract import (
    binary,
    broadcasting,
    class_targets,
    hand_written,
    kl_div,
    likelihoods,
    loss_terms,
    scores,
    token_labels,
)
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, LOSSES, SIGN_LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import Breach, Call

BY_HAND = frozenset("log_softmax logsumexp log_sigmoid log log1p softplus gather sub rsub __sub__ mul".split())
"""Operations that losses are written with."""

_OWN: dict[str, tuple[Callable[[Call], Iterator[Breach]], ...]] = {
    **dict.fromkeys(LOSSES, ()),
    "cross_entropy": (
        scores.classes,
        scores.over_the_batch,
        class_targets.axis_of_classes,
        class_targets.indices,
        class_targets.distributions,
        token_labels.padding,
        token_labels.shift,
    ),
    "nll_loss": (
        class_targets.log_probabilities,
        class_targets.axis_of_classes,
        class_targets.indices,
        token_labels.padding,
        token_labels.shift,
    ),
    "binary_cross_entropy": (binary.probabilities, scores.twice, binary.targets, broadcasting.weights),
    "binary_cross_entropy_with_logits": (
        scores.binary,
        binary.targets,
        broadcasting.weights,
        token_labels.padded_entries,
    ),
    "multilabel_soft_margin_loss": (scores.binary, binary.targets, broadcasting.weights),
    "multilabel_margin_loss": (binary.hot_lists,),
    "kl_div": (kl_div.divergence, broadcasting.broadcast),
    "gaussian_nll_loss": (likelihoods.variance, broadcasting.broadcast),
    "poisson_nll_loss": (likelihoods.rate, broadcasting.broadcast),
    "ctc_loss": (likelihoods.alignment,),
    **dict.fromkeys(DISTANCE_LOSSES, (broadcasting.broadcast, token_labels.padded_entries)),
    **dict.fromkeys(SIGN_LOSSES, (binary.signs, broadcasting.broadcast)),
    "log_softmax": (scores.classes, scores.over_the_batch),
    "logsumexp": (scores.normaliser, scores.over_the_batch),
    "log_sigmoid": (scores.binary,),
    "log": (scores.twice, scores.hand_written, binary.logarithm),
    "softplus": (scores.softplus,),
    "log1p": (scores.written_out,),
    "product": (hand_written.products,),
    "gather": (hand_written.gathered, loss_terms.turned_pick),
    "difference": (hand_written.differences,),
}
READERS = {name: (*own, loss_terms.turned) if name in LOSSES else own for name, own in _OWN.items()}
