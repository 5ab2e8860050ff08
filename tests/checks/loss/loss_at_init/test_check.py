"""What ``loss_at_init`` says of the losses before the first step."""

import math

import pytest

from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLoss, InitialRuns
from pytest_trainloop.checks.loss.loss_at_init.check import loss_at_init
from pytest_trainloop.checks.loss.loss_at_init.first_loss import FirstLoss, FirstLosses, OverSeeds
from pytest_trainloop.checks.loss.loss_at_init.inverted_prior import inverted_prior
from pytest_trainloop.checks.loss.loss_at_init.wide_weights import WideWeights
from pytest_trainloop.checks.loss.loss_at_init.written_losses import written_losses
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.weight_origins import pretrained
from tests.helpers.records import ONE, FakeEvidence, parameter, record


def loss(times, *, outputs=4.0, where="train.py:7", chance=1.0, below=0.0, value=None):
    value = times * chance if value is None else value
    return InitialLoss("cross_entropy", where, value, chance, outputs=outputs, below=below, entropy=1.0)


class Runs:
    """The losses of each run by what was changed in it."""

    def __init__(self, plain, *, halved=None, tables=None, unit=None, seeds=()):
        self._made = {(1.0, "all", 0): plain, (0.5, "all", 0): halved or plain, (0.5, "embeddings", 0): tables or plain}
        self._made |= {(1.0, "all", n + 1): other for n, other in enumerate(seeds)}
        self._unit = unit or plain

    def losses(self, scale=1.0, of="all", other_seed=0):
        return self._made[scale, of, other_seed]

    def losses_of_unit_inputs(self):
        return self._unit, 128.0


class NoneWide:
    def causing(self, loss, most):
        return None


def found(*plain, are_pretrained=False, **changed):
    shared = {
        InitialRuns: Runs(list(plain), **changed),
        pretrained: are_pretrained,
        WideWeights: NoneWide(),
        written_losses: [],
        inverted_prior: None,
    }
    evidence = FakeEvidence(None, shared=shared)
    return [(f.cause, f.level) for f in loss_at_init(evidence)]


HALVED = {"halved": [loss(6, outputs=2.0)]}


def test_a_loss_near_chance_passes():
    assert found(loss(2.9)) == []


def test_ten_times_chance_is_a_fault_where_the_outputs_shrink_with_the_weights():
    assert found(loss(11), **HALVED) == [("too_high", "fault")]
    assert found(loss(9), **HALVED) == [("above_chance", "advice")]


def test_a_scale_that_no_weight_sets_is_advice():
    assert found(loss(11), halved=[loss(11, outputs=3.9)]) == [("above_chance", "advice")]


def test_outputs_of_unit_size_are_advice():
    assert found(loss(11, outputs=0.9), halved=[loss(6, outputs=0.4)]) == [("above_chance", "advice")]


def test_pretrained_weights_and_tables_of_embeddings_are_advice():
    assert found(loss(11), **HALVED, are_pretrained=True) == [("above_chance", "advice")]
    assert found(loss(11), **HALVED, tables=[loss(6, outputs=2.0)]) == [("above_chance", "advice")]


def test_inputs_are_named_where_inputs_of_unit_size_give_chance():
    assert found(loss(11), **HALVED, unit=[loss(1.5)]) == [("inputs_too_large", "advice")]


def test_targets_that_change_with_the_weights_are_not_judged():
    assert found(loss(11), halved=[loss(6, outputs=2.0, chance=0.5)]) == []


def test_a_loss_below_the_entropy_of_the_labels_is_advice_where_every_seed_gives_it():
    low = [[loss(0.1, below=6, value=0.1 + n / 100)] for n in range(1, 5)]
    assert found(loss(0.1, below=6), seeds=low) == [("below_chance", "advice")]
    assert found(loss(0.1, below=6), seeds=[*low[:3], [loss(0.9)]]) == []
    assert found(loss(0.1, below=6), seeds=[[loss(0.1, below=6)]] * 4) == []


def test_without_a_known_chance_level_nothing_is_decided():
    with pytest.raises(CannotDecide, match="chance level is not known for cross_entropy"):
        found(loss(1, chance=math.nan))
    with pytest.raises(CannotDecide, match="expected_init_loss"):
        found()


class Firsts:
    """What is known of the first loss: its values before constant factors, and its mean over seeds."""

    def __init__(self, *values, over=None):
        self.found, self.over = FirstLoss((1.0, *values), 1e-4), over

    def under(self):
        return self.found

    def over_seeds(self):
        return self.over


def declared(expected, firsts):
    evidence = FakeEvidence(
        record([parameter(0, "head.weight")], held=[0], gradients={0: ONE}), shared={FirstLosses: firsts}
    )
    evidence.declared = lambda name: expected
    return list(loss_at_init(evidence))


@pytest.mark.parametrize(
    ("expected", "causes"),
    [(1.2, []), (0.6, ["not_as_declared"]), (1.6, ["not_as_declared"]), (-1.0, ["not_as_declared"])],
)
def test_the_first_loss_is_compared_with_what_is_declared(expected, causes):
    assert [f.cause for f in declared(expected, Firsts())] == causes


def test_the_first_loss_is_as_declared_before_its_constant_factors():
    assert declared(4.0, Firsts(2.0, 4.1)) == []
    (finding,) = declared(4.0, Firsts(2.0))
    assert finding.summary == "the first loss is 2 (before a factor of 0.5), and expected_init_loss says 4"
    assert finding.measured == "0.50 times what is declared"


def test_a_loss_of_zero_is_judged_over_seeds():
    assert declared(0.0, Firsts(over=OverSeeds(0.3, 0.1, 1e-4))) == []
    assert declared(0.0, Firsts(over=OverSeeds(9e-5, 0.0, 1e-4))) == []
    (finding,) = declared(0.0, Firsts(over=OverSeeds(1.0, 0.01, 1e-4)))
    assert finding.measured == "under eight seeds 1 in the mean, with a standard error of 0.01"
