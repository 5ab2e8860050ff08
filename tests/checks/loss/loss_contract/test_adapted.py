"""The user's line with the repair in it."""

import pytest

from pytest_trainloop.checks.loss.loss_contract.adapted import adapted


@pytest.mark.parametrize(
    ("cause", "code", "repair", "written"),
    [
        ("not_there", "return F.nll_loss(a, b)", "do it", None),
        (
            "logits_as_log_probabilities",
            "loss = F.nll_loss(f(a, b), y) / 2",
            "use cross_entropy, or log_softmax",
            "loss = F.cross_entropy(f(a, b), y) / 2",
        ),
        (
            "class_axis",
            "F.cross_entropy(net(x), tags)",
            "transpose(1, 2) (or permute)",
            "F.cross_entropy(net(x).transpose(1, 2), tags)",
        ),
        ("logits_as_log_probabilities", "F.ctc_loss(a, b, c, d)", "give log_softmax of the scores", None),
        ("class_axis", "F.cross_entropy(net(x).reshape(2, 3), tags)", "transpose(1, 2) (or permute)", None),
        ("arguments_swapped", "F.kl_div(q, p, reduction='sum')", "r", "F.kl_div(p, q, reduction='sum')"),
        (
            "mean_over_elements",
            "F.kl_div(p, q, reduction='mean')",
            "reduction='batchmean' is",
            "F.kl_div(p, q, reduction='batchmean')",
        ),
        ("rate_scale", "F.poisson_nll_loss(p, y)", "pass log_input=False", "F.poisson_nll_loss(p, y, log_input=False)"),
        ("ignore_index_mismatch", "F.cross_entropy(", "ignore_index=0, or", None),
        ("log_target_mismatch", "F.kl_div(p, q, **kwargs)", "pass log_target=True, or", None),
        ("log_target_mismatch", "criterion(p, q)", "pass log_target=True, or", None),
    ],
)
def test_the_line_is_edited_where_it_holds_the_whole_call(cause, code, repair, written):
    assert adapted(cause, code, repair) == (repair if written is None else f"{written}\n{repair}")
