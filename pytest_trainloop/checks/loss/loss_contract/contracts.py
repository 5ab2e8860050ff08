"""Every contract of a loss function: importing these modules registers what judges its calls."""

from __future__ import annotations

from pytest_trainloop.checks.loss.loss_contract import (
    binary,
    broadcasting,
    class_targets,
    degenerate_weights,
    hand_written,
    kl_div,
    likelihoods,
    loss_terms,
    scores,
    token_labels,
)
from pytest_trainloop.checks.loss.loss_contract.call import JUDGES

__all__ = [
    "JUDGES",
    "binary",
    "broadcasting",
    "class_targets",
    "degenerate_weights",
    "hand_written",
    "kl_div",
    "likelihoods",
    "loss_terms",
    "scores",
    "token_labels",
]
