"""The four ways to hand over the same data: what is named does not depend on them.

A batch, a list, a generator that draws as the loop asks, and a loop that draws for itself inside ``fit`` and counts the
batches that it is given. The pairs of the corpus give theirs mostly as a batch; here they give them otherwise. Where a
check has to compose batches it skips the last way, and says what to hand over.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from pytest_trainloop.core import registry
from pytest_trainloop.frontends.api import check_loop
from tests.checks.batch.causality.faults import LENGTH, VOCAB, Attention, Decoder, causal, unmasked
from tests.helpers.findings import described, named
from tests.loops.corpus import ODD, PAIRS
from tests.loops.handed_over import WAYS, handed_over

OTHER_WAYS = WAYS[1:]

QUICK = (
    "attention_pooling_over_the_rows",
    "attention_sees_all_positions",
    "ids_that_a_cast_turns_into_zeros",
)

NAMES = (
    *QUICK,
    "answers_by_an_inverted_mask",
    "first_layer_listed_twice",
    "code_clamped_to_a_step",
    "autoencoder_grads_dropped_by_hand",
    "decoder_not_switched_back",
    "proximal_gradient_from_the_weights_themselves",
    "bfloat16_gains_by_closures",
    "gradient_left_when_freezing",
    "column_of_scores_against_a_row_of_labels",
    "generator_aims_at_the_label_of_made_pictures",
    "both_sides_over_the_rows",
    "first_loss_is_not_the_declared_one",
    "log_of_a_probability_of_zero",
    "averaged_model_in_bfloat16",
    "adam_stepped_past_the_scaler",
    "backward_inside_autocast",
    "betas_the_wrong_way_round",
    "batch_norm_under_a_checkpoint_moves_twice",
    "momentum_of_keras_as_eps",
    "last_row_cut_off",
    "a_batch_divided_by_its_norm",
    "transformer_attends_to_other_rows",
    "packed_documents_declared_apart_see_those_before",
    "a_gate_by_the_mean_of_the_sequence",
    "a_condition_that_is_handed_over_and_not_embedded",
    "generator_at_module_level",
    "rate_in_another_key",
    "group_with_a_learning_rate",
    "step_outside_the_if",
    "backward_within_the_if",
    "additive_mask_inverted",
    "batchmean_of_one_row_divides_by_the_classes",
    "eps_of_1e8",
    "list_of_another_model",
    "bias_far_below_zero",
    "every_parameter_at_a_tenth",
    "prior_bias_set_before_the_initialisation",
    "clip_far_below_the_gradient",
    "average_swapped_in_for_good",
    "moments_not_saved",
    "total_loss_with_graph",
    "weights_that_cancel",
    "objectness_logged_and_not_added",
    "argmax_over_a_column_of_labels",
    "requires_grad_compared",
    "dice_of_raw_scores",
    "penalty_that_nothing_reads",
    "decoder_tied_by_data",
    "result_of_compile_not_kept",
    "gradients_summed_by_all_reduce",
)

COMPOSED = (
    "answers_by_an_inverted_mask",
    "last_row_cut_off",
    "backward_within_the_if",
    "additive_mask_inverted",
    "batchmean_of_one_row_divides_by_the_classes",
    "gradients_summed_by_all_reduce",
    "weights_that_cancel",
)
"""Pairs whose check has to compose batches, which it cannot do for a loop that draws for itself."""

TERMS = ("objectness_logged_and_not_added",)
"""Pairs whose terms are computed from the batch handed over, which is no data where the loop draws for itself."""

LONG = ("overfit_one_batch", "update_ratio")

SHARE = 12
"""Every how manieth odd loop is handed over otherwise."""


def ways_of(names):
    """Each pair in each way; by default each in one of them, in turn, and all else with the marker ``corpus``."""
    for number, name in enumerate(names):
        for turn, way in enumerate(OTHER_WAYS):
            if way == "inside" and name in TERMS:
                continue
            rare = PAIRS[name].check in LONG or number % len(OTHER_WAYS) != turn
            marks = [pytest.mark.quick] if name in QUICK else [pytest.mark.corpus] * rare
            yield pytest.param(PAIRS[name], way, id=f"{PAIRS[name].check}-{name}-{way}", marks=marks)


def judged(make, check, way):
    report = check_loop(handed_over(make, way), only=[check], raises=False)
    return report, next(r for r in report.results if r.check == check)


def needs_data(result):
    return (result.outcome, result.needs) == ("skipped", "batches=") and "fit makes its own data" in result.reason


@pytest.mark.parametrize(("pair", "way"), list(ways_of(NAMES)))
def test_the_fault_is_named_and_the_repaired_loop_passes_whichever_way_data_come(pair, way):
    report, result = judged(pair.faulty, pair.check, way)
    if way == "inside" and pair.name in COMPOSED:
        assert needs_data(result)
    else:
        assert named(report, pair.check, pair.cause, pair.level)
    report, result = judged(pair.fixed, pair.check, way)
    if way == "inside" and pair.check in {PAIRS[name].check for name in COMPOSED}:
        assert needs_data(result)
    else:
        assert result.outcome == "passed" or not result.applies, described(report)


def test_every_check_is_there_but_those_that_judge_how_data_are_handed_over_and_what_was_recorded():
    missing = set(registry.of("loop")) - {"data_order", "baseline"} - {PAIRS[name].check for name in NAMES}
    assert not missing, "add the name of one pair of each to NAMES"


def language_model(weigh, draw, way):
    """A decoder on texts that are drawn from torch's generator, by the usual ``get_batch()``."""

    def make():
        model = Decoder(Attention(weigh))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

        def step(ids, after):
            loss = F.cross_entropy(model(ids).flatten(0, 1), after.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def fit(batches):
            for batch in batches:
                step(*(draw() if way == "inside" else batch))

        data = {
            "batch": lambda: {"batch": draw()},
            "list": lambda: {"batches": [draw() for _ in range(4)]},
            "generator": lambda: {"batches": lambda n: (draw() for _ in range(n))},
            "inside": lambda: {"batch": torch.zeros(1)},
        }
        return TrainLoop(model=model, optimizer=optimizer, fit=fit, **data[way]())

    return make


def from_a_corpus():
    corpus = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1))
    starts = torch.randint(len(corpus) - LENGTH - 1, (4,)).tolist()
    texts = torch.stack([corpus[start : start + LENGTH + 1] for start in starts])
    return texts[:, :-1], texts[:, 1:]


def text_by_text():
    texts = torch.stack([torch.randint(VOCAB, (LENGTH + 1,)) for _ in range(4)])
    return texts[:, :-1], texts[:, 1:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", [from_a_corpus, text_by_text])
def test_a_leak_is_found_in_texts_that_are_drawn(draw, way):
    faulty, _ = judged(language_model(unmasked, draw, way), "causality", "batch")
    assert named(faulty, "causality", "causal_mask_missing", "fault")
    report, fixed = judged(language_model(causal, draw, way), "causality", "batch")
    assert fixed.outcome == "passed", described(report)


@pytest.mark.corpus
@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize("name", sorted(ODD)[::SHARE])
def test_an_odd_but_correct_loop_is_silent_whichever_way_data_come(name, way):
    skip = {} if ODD[name].fixed_seed_ok else {"determinism": ODD[name].why}
    report = check_loop(handed_over(ODD[name].make, way), skip=skip, raises=False)
    assert report.ok, f"{ODD[name].why}\n{described(report)}"
