"""``CallContract``, ``register_contract`` and ``check_loss``: what cannot be judged is refused in one sentence with its
line."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch
from torch import nn

from pytest_trainloop import CallContract, LossContract, UsageError, check_loss, register_contract
from pytest_trainloop.declare.callcontract import HOLDS
from pytest_trainloop.instruments.losses.table.registered import forget

A_DICT = "a dict from parameters to what they hold is needed, as in {'scores': 'logits', 'mask': 'binary'}"
ONE_OF = f"one of {', '.join(HOLDS)} is needed"
FLAGS = "a dict from flags to their values, as in when={'from_logits': False}, is needed"
A_PAIR = "a tuple of two numbers, the smaller one first,"

ARGUMENTS = {
    "list": (["logits"], f"CallContract.arguments is ['logits']; {A_DICT}"),
    "word": ("logits", f"CallContract.arguments is 'logits'; {A_DICT}"),
    "none": (None, f"CallContract.arguments is None; {A_DICT}"),
    "empty": ({}, f"CallContract.arguments is empty; {A_DICT}"),
    "number for a name": ({3: "logits"}, "CallContract.arguments names 3; the name of a parameter is needed"),
    "no kind": ({"scores": None}, f"CallContract.arguments['scores'] is None; {ONE_OF}"),
    "misspelt kind": (
        {"scores": "logit"},
        f"CallContract.arguments['scores'] is 'logit'; {ONE_OF}; the nearest name is 'logits'",
    ),
    "tensor for a kind": ({"scores": torch.ones(3)}, f"CallContract.arguments['scores'] is a Tensor; {ONE_OF}"),
}

FIELDS = {
    "when": [
        ("x", f"is 'x'; {FLAGS}"),
        (["a"], f"is ['a']; {FLAGS}"),
        (None, f"is None; {FLAGS}"),
        ({1: True}, "names 1; the name of a parameter or an attribute is needed"),
    ],
    "class_dim": [("1", "is '1'; the number of the class axis is needed")],
    "ignore_index": [
        (1.5, "is 1.5; a whole number, or the name of the parameter or attribute that holds it, is needed")
    ],
    "labels": [((1,), f"is (1,); {A_PAIR} is needed"), ("01", f"is '01'; {A_PAIR} is needed")],
    "value_range": [
        (given, f"is {given}; {A_PAIR} or the name of the parameter that holds the upper one, is needed")
        for given in (3, (1, 0))
    ],
    "pairwise": [("no", "is 'no'; True or False is needed")],
    "page": [(3, "is 3; the address of a page, a string, is needed")],
    "gives": [
        ("los", "is 'los'; one of loss, similarity is needed; the nearest name is 'loss'"),
        (None, "is None; one of loss, similarity is needed"),
    ],
    "clas_dim": [(2, "has no field 'clas_dim'; the nearest name is 'class_dim'")],
}


def dice(scores, mask, from_logits=True):
    return (scores * mask).mean()


def other(scores, mask):
    return (scores - mask).mean()


class Dice(nn.Module):
    def __init__(self, from_logits=True, ignore=None):
        super().__init__()
        self.takes_logits = from_logits
        self.register_buffer("ignored", torch.tensor(ignore or -1))

    def forward(self, scores, mask):
        return dice(scores, mask, self.takes_logits)


class Loose(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.__dict__.update(options)

    def forward(self, scores, mask):
        return dice(scores, mask)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    for function in (dice, Dice, Loose):
        forget(function)


def refused(call):
    """The sentence of a refusal; its place must be in the lambda that calls."""
    with pytest.raises(UsageError) as raised:
        call()
    sentence, line = re.fullmatch(r"(.*) \(tests/bad_input/test_contracts\.py:(\d+)\)", str(raised.value)).groups()
    source, first = inspect.getsourcelines(call)
    assert first <= int(line) < first + len(source)
    return sentence


def test_arguments_that_say_nothing():
    for given, sentence in ARGUMENTS.values():
        assert refused(lambda given=given: CallContract(arguments=given)) == sentence


def test_fields_of_another_kind():
    for field, cases in FIELDS.items():
        for given, said in cases:
            dot = " " if said.startswith("has no field") else f".{field} "
            wrong = {field: given}
            sentence = refused(lambda wrong=wrong: CallContract(arguments={"scores": "logits"}, **wrong))
            assert sentence == f"CallContract{dot}{said}"


def test_a_contract_without_its_arguments():
    assert refused(lambda: CallContract(page="x")) == f"CallContract.arguments is not given; {A_DICT}"
    assert refused(lambda: CallContract({"scores": "logits"})).startswith("CallContract takes its fields by keyword")
    assert refused(lambda: LossContract(criterion=dice, expect="logits")) == (
        "LossContract has no field 'expect'; the nearest name is 'expects'"
    )


def test_the_line_is_that_of_the_field():
    with pytest.raises(UsageError) as raised:
        CallContract(
            arguments={"scores": "logits"},
            labels=(1, 0),
        )
    line = inspect.getsource(inspect.getmodule(dice)).splitlines()[int(str(raised.value)[:-1].rpartition(":")[2]) - 1]
    assert line.strip() == "labels=(1, 0),"


SCORES = {"scores": "logits"}

REGISTERED = {
    "misspelt flag": (
        lambda: register_contract(dice, CallContract(arguments=SCORES, when={"from_logit": False})),
        "CallContract.when names 'from_logit', which is no parameter of dice; the nearest name is 'from_logits'",
    ),
    "flag under another name": (
        lambda: register_contract(Dice, CallContract(arguments=SCORES, when={"takes_logit": False})),
        "CallContract.when names 'takes_logit', which is no parameter or attribute of Dice; the nearest name is "
        "'takes_logits'",
    ),
    "flag of an instance": (
        lambda: register_contract(Dice(), CallContract(arguments=SCORES, when={"from_logits": False})),
        "CallContract.when names 'from_logits', which is no parameter or attribute of Dice; the nearest name is "
        "'takes_logits'",
    ),
    "ignored by a name": (
        lambda: register_contract(dice, CallContract(arguments=SCORES, ignore_index="from_logit")),
        "CallContract.ignore_index names 'from_logit', which is no parameter of dice; the nearest name is "
        "'from_logits'",
    ),
    "misspelt argument": (
        lambda: register_contract(Dice, CallContract(arguments={"score": "logits"})),
        "CallContract.arguments names 'score'; Dice takes scores, mask; the nearest name is 'scores'",
    ),
    "number": (
        lambda: register_contract(3, CallContract(arguments=SCORES)),
        "register_contract got 3; a function or a class of modules is needed",
    ),
    "function in C": (
        lambda: register_contract(torch.relu, CallContract(arguments=SCORES)),
        "register_contract got relu, which has no Python code; a function or a class of modules is needed",
    ),
    "swapped": (
        lambda: register_contract(CallContract(arguments=SCORES), dice),
        "register_contract got the CallContract first; the function is needed first, then the contract",
    ),
    "dict": (
        lambda: register_contract(dice, SCORES),
        "register_contract got a dict for dice; a LossContract or CallContract is needed",
    ),
    "another criterion": (
        lambda: register_contract(dice, LossContract(criterion=other, expects="logits", target="binary")),
        "register_contract got dice with a LossContract of another criterion, other; a contract of dice itself is "
        "needed, or a CallContract",
    ),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_what_cannot_be_registered(name):
    call, sentence = REGISTERED[name]
    assert refused(call) == sentence


@pytest.mark.parametrize(
    ("function", "flags"),
    [
        (dice, {"from_logits": False}),
        (Dice, {"takes_logits": False, "ignored": None}),
        (Dice(), {"takes_logits": True}),
        (Loose, {"from_logits": False}),
        (functools.partial(dice, from_logits=False), {"from_logits": False}),
    ],
)
def test_flags_that_a_function_or_its_module_has(function, flags):
    register_contract(function, CallContract(arguments=SCORES, when=flags))


def test_a_contract_of_the_function_with_other_settings_or_of_an_instance():
    partial = functools.partial(dice, from_logits=False)
    register_contract(dice, LossContract(criterion=partial, expects="probabilities", target="binary"))
    register_contract(Dice, LossContract(criterion=Dice(), expects="logits", target="binary"))


@pytest.mark.parametrize(
    ("given", "what"), [(None, "None"), (3, "an int"), (LossContract, "the class LossContract"), (Dice(), "a Dice")]
)
def test_check_loss_is_given_no_contract(given, what):
    with pytest.raises(UsageError, match=f"^check_loss got {what}; a LossContract, or a function that returns one, is"):
        check_loss(given)
