"""What a key of a group is meant for, by its name."""

from __future__ import annotations

import pytest

from pytest_trainloop.instruments.records.option_names import Meaning, distance, meaning

ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach")


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("learning_rate", "lr"),
        ("lr_", "lr"),
        ("LR", "lr"),
        ("lr_value", "lr"),
        ("weight_decay_rate", "weight_decay"),
        ("weightDecay", "weight_decay"),
        ("weight_deacy", "weight_decay"),
        ("wd", "weight_decay"),
        ("decay", "weight_decay"),
        ("betas_", "betas"),
        ("epsilon", "eps"),
        ("maximise", "maximize"),
    ],
)
def test_a_key_that_is_meant_as_an_option(key, option):
    assert meaning(key, ADAMW) == Meaning(option)


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("lr_scale", "lr"),
        ("lr_mult", "lr"),
        ("lr_multiplier", "lr"),
        ("learning_rate_factor", "lr"),
        ("decay_mult", "weight_decay"),
        ("wd_mult", "weight_decay"),
        ("weight_decay_scale", "weight_decay"),
    ],
)
def test_a_key_that_is_a_multiple_of_an_option(key, option):
    assert meaning(key, ADAMW) == Meaning(option, multiplies=True)


@pytest.mark.parametrize(
    "key",
    "params lr weight_decay name id initial_lr max_lr target_lr lr_final base_lr swa_lr warmup_lr lr_decay decay_rate "
    "decay_factor layer_decay no_decay apply_decay lars_exclude momentum_decay scale eps2 rate drop_rate".split(),
)
def test_a_key_that_is_none(key):
    assert meaning(key, ADAMW) is None


def test_an_option_that_the_optimizer_lacks_is_not_meant():
    assert meaning("momentun", ADAMW) is None
    assert meaning("momentun", (*ADAMW, "momentum")) == Meaning("momentum")


def test_neighbours_that_change_places_are_one_change():
    assert distance("deacy", "decay") == 1
    assert distance("decay", "decay") == 0
    assert distance("dcy", "decay") == 2
