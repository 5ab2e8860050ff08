"""What a record says of which weights decay."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups, kind_of
from pytest_trainloop.recording.record import Optimizer
from tests.helpers.records import ONE, parameter, record


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


def decays(*groups, kind="AdamW", **options):
    """Groups of (decay, rate, [kinds])."""
    shapes = {"norm": ("LayerNorm", (4,)), "bias": ("Linear", (4,)), "matrix": ("Linear", (4, 4))}
    parameters, group_of = [], []
    for number, (_, _, kinds) in enumerate(groups):
        for name in kinds:
            module, shape = shapes[name]
            leaf = "bias" if name == "bias" else "weight"
            index = len(parameters)
            parameters.append(parameter(index, f"m{index}.{leaf}", module=module, shape=shape))
            group_of.append(number)
    held = list(range(len(parameters)))
    made = record(parameters, held=held, gradients=dict.fromkeys(held, ONE))
    made.optimizers[0] = Optimizer(
        0,
        kind,
        declared=True,
        parameters=tuple(held),
        groups=tuple(group_of),
        weight_decays=tuple(decay for decay, _, _ in groups),
        momenta=(0.0,) * len(groups),
        decoupled=(options.get("decoupled"),) * len(groups),
        from_torch=True,
        steps=3,
    )
    for step in made.innermost_steps():
        step.lrs = tuple(rate for _, rate, _ in groups)
    return DecayGroups.in_record(made)


def test_a_split_by_dimension_is_none_of_the_faults():
    groups = decays((0.1, 1e-3, ["matrix"]), (0.0, 1e-3, ["norm", "bias"]))
    assert groups.splits
    assert groups.swapped is None
    assert groups.divided is None
    assert groups.names("norm", decayed=True) == ()


def test_swapped_and_divided_groups():
    assert decays((0.0, 1e-3, ["matrix"]), (0.1, 1e-3, ["norm", "bias"])).swapped is not None
    assert decays((0.0, 1e-3, ["matrix"]), (0.1, 1e-3, ["norm"])).swapped is None
    assert decays((0.0, 1e-3, ["matrix"]), (0.1, 1e-3, ["bias", "matrix"])).swapped is None
    assert decays((0.1, 1e-3, ["matrix", "matrix"]), (0.1, 1e-3, ["bias"])).divided is not None
    assert decays((0.1, 1e-3, ["matrix", "matrix"]), (0.1, 1e-2, ["bias"])).divided is None
    assert decays((0.1, 1e-3, ["matrix"]), (0.1, 1e-3, ["bias"])).divided is None


def test_the_decay_of_adam_goes_into_the_gradient_unless_it_is_decoupled():
    assert decays((0.1, 1e-3, ["matrix"]), kind="Adam").groups[0].into_gradient
    assert not decays((0.1, 1e-3, ["matrix"]), kind="Adam", decoupled=True).groups[0].into_gradient
    assert not decays((0.1, 1e-3, ["matrix"]), kind="AdamW").groups[0].into_gradient
    assert not decays((0.1, 1e-3, ["matrix"]), kind="SGD").groups[0].into_gradient
