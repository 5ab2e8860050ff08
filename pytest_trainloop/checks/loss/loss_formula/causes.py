"""The causes of ``loss_formula``: one for each kind of wrong ingredient, whatever the form."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")


def _cause(proof: str, repair: str, *explains: str) -> Cause:
    return Cause(proof=proof, repair=repair, explains=(*LEARNING, *explains), change=("seen",))


CAUSES = {
    "scores_as_probabilities": _cause(
        "the loss equals a form that takes probabilities, and is given the output of a layer, below 0 or above 1",
        "take sigmoid (one class) or softmax along the class axis first",
    ),
    "probabilities_as_scores": _cause(
        "the loss equals a form that takes a sigmoid or softmax, and is given the result of one",
        "give the scores as they are: the loss takes the sigmoid or softmax itself",
    ),
    "labels_as_signs": _cause(
        "the loss equals a form that takes -1 and 1, and is given 0 and 1",
        "sign = 2 * y - 1",
        "every_row_teaches:class_costs_a_constant",
    ),
    "box_format": _cause(
        "the loss equals a form that reads boxes by their corners, and what the batch holds is no such box",
        "convert boxes from (centre, width, height) to corners before they are given to this function",
    ),
    "sign_flipped": _cause(
        "the loss holds a textbook form, or a distance from the target, and its gradient makes that worse",
        "turn the sign: minimise a cost (1 - dice, -log p), not a score",
    ),
    "factor_missing": _cause(
        "the loss equals a form without one constant factor, and not with it",
        "put the factor in",
    ),
    "term_missing": _cause(
        "the loss equals a form without one of its terms; no other part of the loss adds it back",
        "add the term",
    ),
    "term_sign": _cause(
        "the loss equals a form with the sign of one of its terms turned, and not the textbook form",
        "turn the sign of that term",
    ),
    "clamp_missing": _cause(
        "the loss equals a form without its clamp, and differs from it with the clamp",
        "clamp(min=0)",
    ),
    "wrong_axes": _cause(
        "the loss equals a form with sums, means or a softmax over other axes than its own",
        "reduce over the axes of the form",
    ),
    "entries_misaligned": _cause(
        "both sides are reshaped copies of tensors with the same axes, and entries of different places meet",
        "before both are reshaped, bring the axes into one order: one_hot(y, C).movedim(-1, 1) for (N, C, ...)",
    ),
    "errors_cancel": _cause(
        "with any errors of mean 0 added to the differences the loss is the same",
        "take the square or the absolute value of each difference before the mean: (p - t).square().mean()",
    ),
    "power_differs": _cause(
        "the loss equals a form with another power of one of its parts: squared for plain, or plain for squared",
        "take the power that the form has",
    ),
    "mean_taken_early": Cause(
        proof="the loss equals a form applied to a mean over the batch, and not row by row, or a minimum over "
        "permutations is taken for all rows, and some rows alone choose another",
        repair="apply the form to each entry or row, and take the mean last",
        explains=LEARNING,
        change=("seen",),
        settle="rows_interact=False makes one permutation for all rows a fault, rows_interact=True says that it is "
        "meant",
    ),
    "turned_round": _cause(
        "the loss equals a form with two arguments, labels or directions changed round, and not the textbook form",
        "change them back",
    ),
    "parameter_confused": _cause(
        "the loss equals a form with a function of one parameter in its place: a logarithm, a variance, a deviation",
        "convert it first: exp(log_variance), std ** 2",
    ),
    "pairs_with_itself": _cause(
        "the loss equals a form with the similarity of each row with itself among what it is compared with",
        "mask the diagonal out before the softmax",
    ),
    "extreme_turned": _cause(
        "the loss equals a form with a minimum in place of a maximum, or the reverse, and not the textbook form",
        "take the other extreme",
    ),
    "target_with_gradient": _cause(
        "the loss equals the textbook form, and a gradient flows through its target",
        "compute the target under no_grad(), or detach() it",
    ),
    "ingredient_differs": _cause(
        "the loss equals a form with one ingredient changed, and not the textbook form",
        "put the ingredient right",
    ),
}
