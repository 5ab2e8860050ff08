"""The causes of ``loss_contract``: those of inputs and losses, those of targets and positions. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.checks.loss.loss_contract.causes_of_inputs import OF_INPUTS
from pytest_trainloop.checks.loss.loss_contract.causes_of_targets import OF_TARGETS
from pytest_trainloop.registry import finding_maker

CAUSES = OF_INPUTS | OF_TARGETS
found = finding_maker(CAUSES)

OF_EVERY_CALL = frozenset("call input var shape loss error flags numbers source".split())
"""Facts that ``LossCall.finds`` adds to those of the rule: any text may name them."""

IN_EVERY_CALL = frozenset(
    """target_not_distribution index_list_expected signs_expected log_target_mismatch arguments_swapped
    class_without_weight deviation_for_variance no_pairs value_range head_too_wide classes_imbalanced sign_flipped
    logits_as_log_probabilities probabilities_as_log_probabilities temperature_inverted""".split()
)
"""Causes that count only where they are found in every call from the same line."""
