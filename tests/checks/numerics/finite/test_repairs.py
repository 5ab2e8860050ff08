"""The repair of an operation that is not finite depends on where its input comes from."""

import pytest

from pytest_trainloop.instruments.records.nonfinite_repairs import repair_of


@pytest.mark.parametrize(
    ("code", "written"),
    [
        ("loss = -torch.log(torch.softmax(z, dim=1))[i].mean()", "loss = -F.log_softmax(z, dim=1)[i].mean()"),
        ("p = torch.log(F.softmax(z, -1))", "p = F.log_softmax(z, -1)"),
        ("p = softly(z).log()", "F.log_softmax(scores, dim=-1)"),
    ],
)
def test_zeros_of_a_softmax_are_not_clamped(code, written):
    repair = repair_of("log", "softmax", 0.0, code)
    assert repair.text.startswith(written)
    assert "clamp" in repair.do_not
    assert "clamp" not in repair.text


def test_a_difference_is_made_positive_and_a_negative_number_too():
    assert "softplus" in repair_of("log", "sub", 0.0, "").text
    assert "no negative numbers" in repair_of("log", "sub", -0.5, "").text
    assert "no negative numbers" in repair_of("sqrt", "", -1e-9, "").text


def test_other_operations_by_name_and_the_rest():
    assert "(x + eps).sqrt()" in repair_of("sqrt", "sum", 0.0, "").text
    assert "within bounds" in repair_of("unknown", "", 0.0, "").text
