"""The names that note what is asked of them behave as the strings that they are."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from pytest_trainloop.checks.learning.weight_decay_groups.answers import NORMS, ClaimedClass
from pytest_trainloop.instruments.tracing.asked_names import AskedNames, Question
from pytest_trainloop.instruments.tracing.unmatched_names import nearly


@pytest.fixture
def handed():
    names = AskedNames()
    with names.watching():
        yield names


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))


PLAIN = [name for name, _ in model().named_parameters()]


def test_all_methods_give_what_a_string_gives(handed):
    for name, plain in zip((n for n, _ in model().named_parameters()), PLAIN, strict=True):
        assert name.lower() == plain.lower()
        assert name.split(".") == plain.split(".")
        assert name.partition(".") == plain.partition(".")
        assert name.replace("0", "x") + "!" == plain.replace("0", "x") + "!"
        assert "model." + name == f"model.{plain}"
        assert name[2:] == plain[2:]
        assert [name.find("w"), name.find("q")] == [plain.find("w"), plain.find("q")]
        assert name.startswith(("1", "0")) is plain.startswith(("1", "0"))
        assert (name != plain) is False
        assert (name == 3) is False


def test_questions_are_noted_with_their_line_and_parts_of_names_ask_for_the_whole(handed):
    for name, _ in model().named_parameters():
        any(part in name.lower() for part in ("norm", "bias"))
        name.rpartition(".")[2].endswith(("gain", "weight"))
    assert {q.pattern: q.ever for q in handed.questions.values()} == {
        "norm": False,
        "bias": True,
        "gain": False,
        "weight": True,
    }
    assert handed.questions["norm"].asked == {0, 1, 2, 3}
    assert "any(part in name.lower()" in handed.questions["norm"].place


def test_functions_in_which_a_pattern_was_true_are_known(handed):
    def none_of(names):
        return [name for name in names if any(name.startswith(prefix) for prefix in ("stem", "neck"))]

    def one_of(names):
        return [name for name in names if name.endswith("bias") or name == "gain"]

    names = [name for name, _ in model().named_parameters()]
    none_of(names), one_of(names)
    functions = {q.pattern: q.within for q in handed.questions.values()}
    assert functions == {
        "stem": none_of.__code__,
        "neck": none_of.__code__,
        "bias": one_of.__code__,
        "gain": one_of.__code__,
    }
    assert handed.matched == {one_of.__code__}
    assert {q.pattern: q.how for q in handed.questions.values()} == {
        "stem": "start",
        "neck": "start",
        "bias": "end",
        "gain": "is",
    }


def test_names_of_modules_are_asked_apart_and_a_module_may_be_replaced_by_such_a_name(handed):
    net = model()
    for name, _ in net.named_children():
        setattr(net, name, nn.Linear(2, 2))
    assert [name for name, _ in net.named_modules() if name.startswith("0")] == ["0"]
    assert [name.endswith("weight") for name, _ in net.named_parameters()] == [True, False, True, False]
    assert list(handed.questions) == ["weight"]
    assert handed.given == ["0", "1", "", "0", "1", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert {type(name) for name in handed.given} == {str}


@pytest.mark.parametrize(
    ("pattern", "how", "name", "written"),
    [
        ("embeddings.", "start", "bert.embeddings.word.weight", "bert.embeddings."),
        ("embeddings", "is", "bert.embeddings.word.weight", "bert.embeddings"),
        ("module.layer1.", "start", "layer1.0.weight", "layer1."),
        ("text_model.model.norm.weight", "in", "vlm.text_model.norm.weight", "text_model.norm.weight"),
        ("LayerNorm", "in", "blocks.0.layernorm1.weight", "layernorm1"),
        ("layer.7.", "in", "encoder.layer.1.weight", ""),
        ("vision.encoder.", "start", "text.encoder.0.weight", ""),
        ("bias", "in", "head.weight", ""),
        ("ln", "in", "decoder.aln.weight", ""),
        ("rel_pos_bias", "in", "blocks.0.norm.bias", ""),
    ],
)
def test_a_pattern_is_near_a_name_where_what_stands_before_it_or_its_spelling_differs(pattern, how, name, written):
    assert nearly(Question(pattern, "", how=how), name) == written


def test_a_question_is_answered_otherwise_for_the_numbers_given_only():
    names = AskedNames(yes=("norm", frozenset({2})), renamed={0: "first.weight"})
    with names.watching():
        given = [name for name, _ in model().named_parameters()]
    assert ["norm" in name for name in given] == [False, False, True, False]
    assert given[0] == "first.weight"


def test_nothing_is_left_behind():
    before = nn.Module.named_parameters, nn.Module.__getattribute__, inspect.signature(nn.Module.named_parameters)
    names, claimed = AskedNames(), ClaimedClass(frozenset({"Own"}), NORMS)
    with names.watching(), claimed.watching():
        assert inspect.signature(nn.Module.named_parameters) == before[2]
    assert (nn.Module.named_parameters, nn.Module.__getattribute__) == before[:2]
    assert type(next(iter(model().named_parameters()))[0]) is str


def test_torch_itself_gets_plain_names(handed):
    list(model().parameters())
    torch.nn.utils.parameters_to_vector(model().parameters())
    assert handed.given == []


class Own(nn.Module):
    pass


def test_a_module_passes_for_another_class_and_stays_what_it_is():
    claimed = ClaimedClass(frozenset({"Own"}), (nn.LayerNorm,))
    own, linear = Own(), nn.Linear(2, 2)
    with claimed.watching():
        assert isinstance(own, nn.LayerNorm)
        assert isinstance(own, (nn.LayerNorm, nn.Embedding))
        assert not isinstance(own, nn.Embedding)
        assert not isinstance(linear, nn.LayerNorm)
        assert type(own) is Own
        assert isinstance(own, Own)
    assert not isinstance(own, nn.LayerNorm)
    assert any("isinstance(own, nn.LayerNorm)" in place for place in claimed.places)
