"""What a record says of which weights decay."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.learning.weight_decay_groups.groups import kind_of
from tests.helpers.records import parameter


@pytest.mark.parametrize(
    ("name", "module", "shape", "kind"),
    [
        ("ln.weight", "LayerNorm", (4,), "norm"),
        ("ln.bias", "LayerNorm", (4,), "bias"),
        ("ln.beta", "MyNorm", (4,), "bias"),
        ("ln.gain", "RMSNorm", (4,), "norm"),
        ("fc.weight", "Linear", (4, 4), "matrix"),
        ("fc.bias", "Linear", (4,), "bias"),
        ("rnn.bias_hh_l0", "LSTM", (4,), "bias"),
        ("wte.weight", "Embedding", (4, 4), "embedding"),
        ("wte.weight", "VocabParallelEmbedding", (4, 4), "embedding"),
        ("fc.weight", "NormedLinear", (4, 4), "matrix"),
        ("scale", "Model", (), "vector"),
        ("cls_token", "Model", (1, 1, 4), "matrix"),
    ],
)
def test_what_a_weight_is(name, module, shape, kind):
    assert kind_of(parameter(0, name, module=module, shape=shape)) == kind
