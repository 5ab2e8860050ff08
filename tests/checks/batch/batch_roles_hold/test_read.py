"""A tensor that cannot have the role that is declared is refused in one sentence."""

from __future__ import annotations

import pytest

from pytest_trainloop import Padding, Roles, UsageError
from pytest_trainloop.frontends.api import check_loop
from tests.checks.batch.batch_roles_hold.faults import PAD, Causal, answer_loss, answers, loop
from tests.checks.batch.batch_roles_hold.unusual import Attending, next_token, texts

LOSS = answer_loss(slice(1, None))


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            Roles(mask="input_ids"),
            "mask names input_ids, a int64 tensor of shape (6, 10) with 16 values; a mask of two values (0 and 1, True "
            "and False, 0 and -inf) is needed",
        ),
        (
            Roles(lengths="loss_mask"),
            "lengths names loss_mask, a float32 tensor of shape (6, 10) with 6 rows in the batch; whole numbers, one "
            "for each row, are needed",
        ),
        (
            Roles(graph="input_ids"),
            "graph names input_ids, a int64 tensor of shape (6, 10) with 6 rows in the batch; edges as whole numbers "
            "of shape (2, edges), or an adjacency (nodes, nodes), are needed",
        ),
    ],
)
def test_a_role_that_a_tensor_cannot_have_is_refused(roles, said):
    with pytest.raises(UsageError) as refused:
        check_loop(lambda: loop(Causal(), answers(), LOSS, roles=roles), only=["batch_roles_hold"])
    assert str(refused.value).partition("TrainLoop.roles: ")[2] == said


def test_a_mask_without_effect_is_advice_where_the_loop_tells_padding_by_its_id():
    def loss_of(model, batch):
        ids = batch["input_ids"]
        return next_token(ids, model(ids, ids != PAD), ids != PAD)

    declared = {"roles": Roles(mask="attention_mask"), "padding": Padding(pad_id=PAD)}
    (result,) = check_loop(
        lambda: loop(Attending(), texts(), loss_of, **declared), only=["batch_roles_hold"], raises=False
    ).results
    assert [(f.level, f.cause) for f in result.findings] == [("advice", "role_without_effect")]
