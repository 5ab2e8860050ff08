"""Model, optimizer and what else a loop declares: what cannot be judged is refused once, in one sentence with its
line."""

from __future__ import annotations

import re

import pytest

from tests.helpers.refusals import judged, values_of

NEEDS_A_MODEL = "a torch.nn.Module is needed, or a list or dict of modules"
NEEDS_AN_OPTIMIZER = "an optimizer with step() is needed, or a list of them"
NEEDS_A_SCHEDULER = (
    "a scheduler with step() is needed, or another object that writes the optimizer's learning rates, or a list of them"
)
TRUE_OR_FALSE = "True or False is needed, or leave it out"
ONLY_A_MODEL = "TrainLoop({field}={value}, batch=rows(), fit=print)"
SHARED = (
    "build the model and the optimizer inside the function, so that every call gives a fresh loop (a model from a "
    "fixture or a module-level variable would be trained by every check)"
)

MODEL = {
    **values_of(
        "model",
        NEEDS_A_MODEL,
        {
            "None": "is None",
            "nn.Linear": "is the class Linear",
            "mlp": "is a function",
            "'m.pt'": "is a str",
            "torch.ones(3)": "is a Tensor",
            "torch.optim.SGD(mlp().parameters(), lr=0.1)": "is a SGD",
        },
        given=ONLY_A_MODEL,
    ),
    **values_of(
        "model",
        "a torch.nn.Module is needed",
        {
            "mlp().state_dict()": "[0.weight] is a Tensor",
            "list(mlp().parameters())": "[0] is a Parameter",
            "[mlp(), 3]": "[1] is an int",
        },
        given=ONLY_A_MODEL,
    ),
    **values_of("model", "at least one torch.nn.Module is needed", {"[]": "is empty"}, given=ONLY_A_MODEL),
    **values_of(
        "model",
        "a model that can be trained is needed",
        {"nn.Tanh()": "(Tanh) has no parameters"},
        given=ONLY_A_MODEL,
    ),
}

SHARING = {
    "model-from-outside": (
        "MODEL = mlp()\n\n@pytest.mark.trainloop  # here\ndef test_it():\n    return loop(model=MODEL)",
        f"two calls of the function share the parameter 0.weight; {SHARED}",
    ),
    "model-from-a-fixture": (
        "@pytest.fixture(scope='module')\ndef model():\n    return mlp()\n\n"
        "@pytest.mark.trainloop  # here\ndef test_it(model):\n    return loop(model=model)",
        f"two calls of the function share the parameter 0.weight; {SHARED}",
    ),
    "optimizer-from-outside": (
        "OPTIMIZER = torch.optim.SGD(mlp().parameters(), lr=0.1)\n\n"
        "@pytest.mark.trainloop  # here\ndef test_it():\n    return loop(optimizer=OPTIMIZER)",
        f"two calls of the function share the optimizer SGD; {SHARED}",
    ),
}

OPTIMIZER = {
    **values_of(
        "optimizer",
        NEEDS_AN_OPTIMIZER,
        {
            "mlp().parameters()": "is a generator",
            "[0.1]": "is a float",
            "'adam'": "is a str",
            "torch.optim.SGD": "is the class SGD",
            "lambda p: torch.optim.SGD(p, lr=0.1)": "is a function",
            "torch.optim.SGD(mlp().parameters(), lr=0.1).state_dict()": "is a dict",
            "torch.amp.GradScaler('cpu')": "is a GradScaler",
        },
    ),
    "optimizer-scheduler": (
        "o = torch.optim.SGD(mlp().parameters(), lr=0.1)\nreturn loop(optimizer=torch.optim.lr_scheduler.StepLR(o, 3))",
        f"TrainLoop.optimizer is a StepLR; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-twice": (
        "m = mlp()\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "return loop(lambda m, o, b: train(m, o[0], b), model=m, optimizer=[o, o])",
        "TrainLoop.optimizer names the same SGD twice; each optimizer is needed once",
    ),
}

SCHEDULER = {
    **values_of(
        "scheduler",
        NEEDS_A_SCHEDULER,
        {
            "0.1": "is a float",
            "'cosine'": "is a str",
            "torch.optim.lr_scheduler.StepLR": "is the class StepLR",
            "torch.optim.SGD(mlp().parameters(), lr=0.1)": "is a SGD",
            "[0.1, 0.01]": "is a float",
        },
    ),
    "scheduler-of-another-optimizer": (
        """
        m = mlp()
        first = torch.optim.SGD(m.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(first, 3)
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        fit = lambda batches: train(m, optimizer, batches)
        return TrainLoop(
            model=m, optimizer=optimizer, batch=rows(), fit=fit,
            scheduler=scheduler)  # here
        """,
        "TrainLoop.scheduler is a StepLR of another SGD than those of TrainLoop.optimizer, whose rates it never "
        "changes; build it on the optimizer that trains",
    ),
}

OTHERS = {
    **values_of(
        "scaler",
        "a gradient scaler is needed, as in torch.amp.GradScaler()",
        {
            "True": "is True",
            "'dynamic'": "is 'dynamic'",
            "1024.0": "is 1024.0",
            "torch.amp.GradScaler": "is the class GradScaler",
            "lambda x: x": "is a function",
            "[None]": "is None",
        },
    ),
    **values_of(
        "frozen",
        "the first names are 0.weight, 0.bias, 2.weight, 2.bias",
        {
            "('backbone.',)": ": no parameter is 'backbone.' or lies below it",
            "['*.bias']": ": no parameter is '*.bias' or lies below it",
        },
    ),
    **values_of("frozen", "a tuple of paths is needed: ('0.',)", {"'0.'": "is the string '0.'"}),
    **values_of(
        "frozen",
        "paths of modules or parameters are needed, as in ('backbone.',)",
        {"(0,)": "names an int", "True": "names a bool", "[nn.Linear(2, 2)]": "names a Linear"},
    ),
    **values_of("pretrained", "a tuple of paths is needed: ('0.',)", {"'0.'": "is the string '0.'"}),
    **values_of(
        "padding",
        "Padding(pad_id=0) is needed",
        {"0": "is 0", "'right'": "is 'right'", "{'pad_id': 3}": "is a dict"},
    ),
    "padding-empty-list": (
        "loop(padding=[])",
        "TrainLoop.padding is an empty list; at least one Padding is needed, or leave it out",
    ),
    "padding-list-with-a-name": (
        "from pytest_trainloop import Padding\nreturn loop(padding=[Padding(pad_id=0), 'rejected'])",
        "TrainLoop.padding[1] is 'rejected'; a Padding is needed",
    ),
    "padding-id-string": (
        "from pytest_trainloop import Padding\nreturn loop(padding=Padding(pad_id='<pad>'))  # here",
        "Padding.pad_id is '<pad>'; the token id at padded positions, a whole number, is needed",
    ),
    "padding-dim-none": (
        "from pytest_trainloop import Padding\nreturn loop(padding=Padding(pad_id=0, dim=None))  # here",
        "Padding.dim is None; the number of a dimension is needed",
    ),
    "padding-label-float": (
        "from pytest_trainloop import Padding\nreturn loop(padding=Padding(pad_id=0, ignore_index=-100.0))  # here",
        "Padding.ignore_index is -100.0; a label, a whole number, is needed",
    ),
    **values_of(
        "expected_init_loss",
        "a finite number is needed, as in math.log(10)",
        {"'1.38'": "is '1.38'", "float('nan')": "is nan", "True": "is True"},
    ),
    **values_of(
        "steps",
        "the number of optimizer steps of the whole training is needed, a whole number from 1 on, as in "
        "steps=len(loader) * epochs // accumulate",
        {"0": "is 0", "250.0": "is 250.0", "True": "is True"},
    ),
    **values_of(
        "epochs",
        "the number of passes over the data of the whole training is needed, a whole number from 1 on, as in epochs=90",
        {"'90'": "is '90'"},
    ),
    **values_of("roles", 'Roles(mask="key") is needed', {"'mask'": "is 'mask'", "{'mask': 'm'}": "is a dict"}),
    "roles-of-nothing": (
        "from pytest_trainloop import Roles\nreturn loop(roles=Roles())  # here",
        'Roles() names no tensor; at least one is needed, as in Roles(mask="attention_mask")',
    ),
    "keyword-of-the-marker": (
        "loop(skip={'step_order': 'why'})",
        "TrainLoop has no field 'skip'; give it to the marker: @pytest.mark.trainloop(skip=...)",
    ),
    "role-of-a-tensor": (
        "from pytest_trainloop import Roles\nreturn loop(roles=Roles(weights=torch.ones(3)))  # here",
        'Roles.weights is a Tensor; the name of a tensor of the batch is needed, or several: weights="key"',
    ),
    **values_of("rows_interact", TRUE_OR_FALSE, {"'no'": "is 'no'"}),
    **values_of("ordered", TRUE_OR_FALSE, {"0": "is 0"}),
    **values_of("nondeterministic", TRUE_OR_FALSE, {"1": "is 1"}),
    "save-without-load": (
        "loop(save=lambda: {})",
        "TrainLoop.save is given without load; both are needed: load(state)",
    ),
    "save-to-a-path-without-load": (
        "loop(save=lambda path: None)",
        "TrainLoop.save is given without load; both are needed: load(path)",
    ),
    "load-from-a-path-without-save": (
        "loop(load=lambda ckpt_path: None)",
        "TrainLoop.load is given without save; both are needed: save(path)",
    ),
    "load-without-save": (
        "loop(load=lambda checkpoint: None)",
        "TrainLoop.load is given without save; both are needed: save()",
    ),
    "renews-without-load": (
        "loop(renews=('optimizer',))",
        "TrainLoop.renews is given without load, which renews it; both are needed: load(state)",
    ),
    "renews-string": (
        "loop(renews='optimizer', save=dict, load=print)",
        "TrainLoop.renews is the string 'optimizer'; a tuple of paths is needed: ('optimizer',)",
    ),
    "renews-module": (
        "loop(renews=[mlp()], save=dict, load=print)",
        "TrainLoop.renews names a Sequential; 'optimizer', 'scheduler', 'scaler', 'rng' or paths are needed, as in "
        "('optimizer',)",
    ),
    "unknown-field": (
        "return TrainLoop(model=mlp(), optimisers=[], batch=rows())  # here",
        "TrainLoop has no field 'optimisers'; the nearest name is 'optimizer'",
    ),
    "by-position": (
        "return TrainLoop(mlp())  # here",
        "TrainLoop takes its fields by keyword only, as in TrainLoop(model=...)",
    ),
    "model-not-given": ("return TrainLoop(batch=rows())  # here", f"TrainLoop.model is not given; {NEEDS_A_MODEL}"),
}

REFUSED = {
    name: (source if "return" in source else f"return {source}", sentence)
    for name, (source, sentence) in (MODEL | SHARING | OPTIMIZER | SCHEDULER | OTHERS).items()
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("declarations"), {name: source for name, (source, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_once_in_one_sentence(said, name):
    sentence, found = REFUSED[name][1], said[name]
    (failure,) = found.failures
    assert re.sub(r" \(test_loops\.py:\d+\)$", "", failure) == sentence
    assert re.search(r" \(test_loops\.py:(\d+)\)$", failure)[1] == str(found.here) or not found.here
    assert len(found.skips) == 2
    assert all(reason.startswith(sentence) and " (see test_loops.py::" in reason for reason in found.skips)
