"""A real batch, padded in other ways."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop import Padding, UsageError
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.repadding import Repadding
from pytest_trainloop.instruments.batches.roles import read
from pytest_trainloop.instruments.strategies import paddings
from tests.helpers.hypothesis_draws import drawn, smallest
from tests.helpers.padded_batches import FEATURES, IDS, KINDS, LABELS, LENGTHS, PADDED, additive, text, text_on_the_left

EVERY = ["as_is", "more", "other_values", "one_left", "no_padding", "empty_row"]


@pytest.mark.parametrize("kind", KINDS)
def test_types_dtypes_and_real_tokens_stay(kind):
    given, roles = KINDS[kind], read(KINDS[kind])
    changes = set()
    for padded in drawn(paddings(given, only=EVERY), 60):
        changes.add(padded.change)
        assert type(padded.batch) is type(given)
        there = dict(nested.paths(padded.batch))
        assert [(path, t.dtype, t.dim()) for path, t in there.items()] == [
            (path, t.dtype, t.dim()) for path, t in nested.paths(given)
        ]
        for part in roles.parts:
            new = there[part.path]
            if part.role == "lengths":
                assert new.tolist() == list(padded.lengths)
            elif part.time is None:
                assert torch.equal(new, part.tensor)
            elif padded.same_tokens:
                cells = new.movedim((part.row, part.time), (0, 1))[:, padded.left :][:, : roles.length]
                assert torch.equal(cells[~roles.padded], part.cells[~roles.padded])
                assert cells.shape[1] == roles.length
    assert changes == set(EVERY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_is_read_as_it_was_made(kind):
    for padded in drawn(paddings(KINDS[kind], only=["as_is", "more", "one_left"]), 40):
        assert read(padded.batch).lengths == padded.lengths


@pytest.mark.parametrize(
    ("condition", "shown"),
    [
        (lambda p: True, "padding: the batch as it is; lengths [3, 5, 2]"),
        (lambda p: p.change == "more", "padding: 1 more on the right; lengths [3, 5, 2]"),
        (lambda p: p.right > 2, "padding: 3 more on the right; lengths [3, 5, 2]"),
        (lambda p: p.left, "padding: 1 more on the left; lengths [3, 5, 2]"),
        (lambda p: p.change == "other_values", "padding: other values at padded positions; lengths [3, 5, 2]"),
        (lambda p: 1 in p.lengths, "padding: one real token left in row 0; lengths [1, 5, 2]"),
        (lambda p: p.lengths[1] == 1, "padding: one real token left in row 1; lengths [3, 1, 2]"),
        (lambda p: p.change == "no_padding", "padding: no padding at all; lengths [2, 2, 2]"),
        (lambda p: 0 in p.lengths, "padding: row 0 all padding; lengths [0, 5, 2]"),
        (lambda p: p.mask == "float", "padding: the batch as it is, mask as float; lengths [3, 5, 2]"),
    ],
)
def test_each_change_is_found_and_shrinks_alone(condition, shown):
    strategy = paddings(text(), sides=["right", "left"], masks=["bool", "int", "float", "additive"])
    assert repr(smallest(strategy, condition)) == shown


def test_what_is_added_is_padding():
    more = smallest(paddings(text()), lambda p: p.right == 2).batch
    assert more["input_ids"][:, 5:].eq(0).all()
    assert more["labels"][:, 5:].eq(-100).all()
    assert more["attention_mask"][:, 5:].eq(0).all()


def test_padding_stands_on_the_left_where_it_stood_there():
    strategy = paddings(text_on_the_left())
    assert smallest(strategy, lambda p: p.change == "more").left == 1
    one = smallest(strategy, lambda p: p.change == "one_left").batch
    assert one["input_ids"][0].tolist() == [0, 0, 0, 0, 7]


def test_other_values_are_ids_that_occur_and_labels_stay():
    seen = set(IDS[~PADDED].tolist())
    others = set()
    for padded in drawn(paddings(text(), only=["other_values"]), 30):
        values = padded.batch["input_ids"][PADDED].tolist()
        others.add(tuple(values))
        assert set(values) <= seen
        assert torch.equal(padded.batch["labels"], LABELS)
    assert len(others) > 5


@pytest.mark.parametrize(
    ("kind", "dtype", "real", "hidden"),
    [
        ("bool", torch.bool, 1, 0),
        ("int", torch.int64, 1, 0),
        ("float", torch.float32, 1, 0),
        ("additive", torch.float32, 0, float("-inf")),
    ],
)
def test_masks_of_another_kind(kind, dtype, real, hidden):
    mask = smallest(paddings(text(), masks=[kind]), lambda p: p.mask == kind).batch["attention_mask"]
    assert mask.dtype is dtype
    assert set(mask[~PADDED].tolist()) == {real}
    assert set(mask[PADDED].tolist()) == {hidden}


def test_a_mask_that_says_what_is_padding_keeps_its_meaning():
    given = {"x": FEATURES, "key_padding_mask": PADDED}
    mask = smallest(paddings(given, masks=["int"]), lambda p: p.mask == "int").batch["key_padding_mask"]
    assert torch.equal(mask, PADDED.long())


def test_the_declared_padding_is_enough():
    strategy = paddings((IDS, LABELS), Padding(pad_id=0, ignore_index=-100))
    assert smallest(strategy, lambda p: p.lengths[0] == 0).batch[0][0].eq(0).all()
    assert {p.change for p in drawn(strategy)} == {*EVERY} - {"other_values"}


def test_a_row_of_length_0_is_drawn_only_if_asked_for_where_lengths_are_given():
    given = (FEATURES, LENGTHS)
    assert {p.change for p in drawn(paddings(given))} == {*EVERY} - {"empty_row"}
    assert smallest(paddings(given, only=["empty_row"])).batch[1].tolist() == [0, 5, 2]


def test_the_batch_itself_is_left_alone():
    given = text()
    for padded in drawn(paddings(given, only=EVERY), 20):
        for _, tensor in nested.paths(padded.batch):
            tensor.fill_(1)
    assert all(torch.equal(given[key], value) for key, value in text().items())


def test_the_same_paddings_each_time():
    again = [[repr(padded) for padded in drawn(paddings(text()), 30)] for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ((IDS, LABELS), {}, r"pass padding=Padding\(pad_id=, ignore_index=, dim=\)"),
        ([torch.ones(2), torch.ones(3)], {}, r"nothing says which positions are padding in a list"),
        (text(), {"only": ["shorter"]}, "no change 'shorter': there are as_is, more"),
        (text(), {"masks": ["byte"]}, "a mask has no kind 'byte'"),
        (additive(), {"masks": ["bool"]}, "mask is added to scores"),
        ((FEATURES, LENGTHS), {"only": ["more"], "sides": ["left"]}, "are counted from the left"),
        ((IDS, LABELS), {"padding": 0}, r"^paddings: padding is 0; Padding\(pad_id=0\) is needed$"),
        ((IDS, LABELS), {"padding": []}, "^paddings: padding is an empty list; at least one Padding is needed"),
        (
            {"ids": IDS, "labels": LABELS},
            {"padding": Padding(of=("ids", "lables"))},
            "^the batch has no tensor lables: there are ids, labels$",
        ),
        ((IDS, LABELS), {"padding": Padding(pad_id=0), "only": ["other_values"]}, "none of other_values can be made"),
    ],
)
def test_what_cannot_be_padded_says_why(given, options, reason):
    with pytest.raises(UsageError, match=reason):
        drawn(paddings(given, **options), 40)


@pytest.mark.integration
def test_mappings_and_outputs_of_transformers_stay_what_they_are():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    for made in (transformers.BatchEncoding(text()), BaseModelOutput(last_hidden_state=FEATURES, attentions=(PADDED,))):
        for padded in drawn(paddings(made), 10):
            assert type(padded.batch) is type(made)
            assert list(padded.batch.keys()) == list(made.keys())


def pairs_of_texts():
    """Two groups: chosen and rejected, of other lengths."""
    chosen, rejected = text(), {name: tensor.flip(0) for name, tensor in text().items()}
    return {
        **{f"chosen_{name}": tensor for name, tensor in chosen.items()},
        **{f"rejected_{name}": tensor for name, tensor in rejected.items()},
    }


def test_of_several_groups_one_is_changed():
    batch = pairs_of_texts()
    changed = set()
    for padded in drawn(paddings(batch, only=["more"]), 20):
        wider = {name for name in batch if padded.batch[name].shape != batch[name].shape}
        assert wider == set(padded.of)
        assert len({name.split("_")[0] for name in wider}) == 1
        assert f"padding of {padded.of[0]}: " in repr(padded)
        changed |= wider
    assert changed == set(batch)


def test_the_group_that_is_declared_is_changed():
    batch = pairs_of_texts()
    of = tuple(name for name in batch if name.startswith("rejected"))
    for padded in drawn(
        paddings(batch, Padding(pad_id=0, ignore_index=-100, of=of), only=["more", "other_values"]), 10
    ):
        assert padded.of == of
        assert all(torch.equal(padded.batch[name], batch[name]) for name in batch if name not in of)


def test_one_change_is_a_value_of_its_own():
    batch = pairs_of_texts()
    change = Repadding("more", left=2, of=tuple(n for n in batch if n.startswith("chosen")))
    assert str(change).startswith("2 more padded positions on the left in chosen_")
    assert change == Repadding("more", left=2, of=change.of)
    assert hash(change) == hash(Repadding("more", left=2, of=change.of))
    made = change.apply(batch)
    assert made["chosen_input_ids"].shape[1] == batch["chosen_input_ids"].shape[1] + 2
    assert torch.equal(made["chosen_input_ids"][:, 2:], batch["chosen_input_ids"])
