"""Model, optimizer and what else a loop declares: what cannot be judged is refused once, in one sentence with its
line."""

from __future__ import annotations

import re

import pytest

from tests.helpers.refusals import judged

NEEDS_A_MODEL = "a torch.nn.Module is needed, or a list or dict of modules"
NEEDS_AN_OPTIMIZER = "an optimizer with step() is needed, or a list of them"
NEEDS_A_SCHEDULER = (
    "a scheduler with step() is needed, or another object that writes the optimizer's learning rates, or a list of them"
)
NEEDS_A_SCALER = "a gradient scaler is needed, as in torch.amp.GradScaler()"
NEEDS_PATHS = "paths of modules or parameters are needed, as in ('backbone.',)"
SHARED = (
    "build the model and the optimizer inside the function, so that every call gives a fresh loop (a model from a "
    "fixture or a module-level variable would be trained by every check)"
)

MODEL = {
    "model-none": ("TrainLoop(model=None, batch=rows(), fit=print)", f"TrainLoop.model is None; {NEEDS_A_MODEL}"),
    "model-class": (
        "TrainLoop(model=nn.Linear, batch=rows(), fit=print)",
        f"TrainLoop.model is the class Linear; {NEEDS_A_MODEL}",
    ),
    "model-function": (
        "TrainLoop(model=mlp, batch=rows(), fit=print)",
        f"TrainLoop.model is a function; {NEEDS_A_MODEL}",
    ),
    "model-path": ("TrainLoop(model='m.pt', batch=rows(), fit=print)", f"TrainLoop.model is a str; {NEEDS_A_MODEL}"),
    "model-tensor": (
        "TrainLoop(model=torch.ones(3), batch=rows(), fit=print)",
        f"TrainLoop.model is a Tensor; {NEEDS_A_MODEL}",
    ),
    "model-state-dict": (
        "TrainLoop(model=mlp().state_dict(), batch=rows(), fit=print)",
        "TrainLoop.model[0.weight] is a Tensor; a torch.nn.Module is needed",
    ),
    "model-parameters": (
        "TrainLoop(model=list(mlp().parameters()), batch=rows(), fit=print)",
        "TrainLoop.model[0] is a Parameter; a torch.nn.Module is needed",
    ),
    "model-list-with-a-number": (
        "TrainLoop(model=[mlp(), 3], batch=rows(), fit=print)",
        "TrainLoop.model[1] is an int; a torch.nn.Module is needed",
    ),
    "model-empty-list": (
        "TrainLoop(model=[], batch=rows(), fit=print)",
        "TrainLoop.model is empty; at least one torch.nn.Module is needed",
    ),
    "model-optimizer": (
        "TrainLoop(model=torch.optim.SGD(mlp().parameters(), lr=0.1), batch=rows(), fit=print)",
        f"TrainLoop.model is a SGD; {NEEDS_A_MODEL}",
    ),
    "model-without-parameters": (
        "TrainLoop(model=nn.Tanh(), batch=rows(), fit=print)",
        "TrainLoop.model (Tanh) has no parameters; a model that can be trained is needed",
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
    "optimizer-generator": (
        "loop(optimizer=mlp().parameters())",
        f"TrainLoop.optimizer is a generator; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-number-in-a-list": ("loop(optimizer=[0.1])", f"TrainLoop.optimizer is a float; {NEEDS_AN_OPTIMIZER}"),
    "optimizer-name": ("loop(optimizer='adam')", f"TrainLoop.optimizer is a str; {NEEDS_AN_OPTIMIZER}"),
    "optimizer-class": (
        "loop(optimizer=torch.optim.SGD)",
        f"TrainLoop.optimizer is the class SGD; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-function": (
        "loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))",
        f"TrainLoop.optimizer is a function; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-state-dict": (
        "loop(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1).state_dict())",
        f"TrainLoop.optimizer is a dict; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-scheduler": (
        "o = torch.optim.SGD(mlp().parameters(), lr=0.1)\nreturn loop(optimizer=torch.optim.lr_scheduler.StepLR(o, 3))",
        f"TrainLoop.optimizer is a StepLR; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-scaler": (
        "loop(optimizer=torch.amp.GradScaler('cpu'))",
        f"TrainLoop.optimizer is a GradScaler; {NEEDS_AN_OPTIMIZER}",
    ),
    "optimizer-twice": (
        "m = mlp()\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "return loop(lambda m, o, b: train(m, o[0], b), model=m, optimizer=[o, o])",
        "TrainLoop.optimizer names the same SGD twice; each optimizer is needed once",
    ),
}

SCHEDULER = {
    "scheduler-number": ("loop(scheduler=0.1)", f"TrainLoop.scheduler is a float; {NEEDS_A_SCHEDULER}"),
    "scheduler-name": ("loop(scheduler='cosine')", f"TrainLoop.scheduler is a str; {NEEDS_A_SCHEDULER}"),
    "scheduler-class": (
        "loop(scheduler=torch.optim.lr_scheduler.StepLR)",
        f"TrainLoop.scheduler is the class StepLR; {NEEDS_A_SCHEDULER}",
    ),
    "scheduler-optimizer": (
        "loop(scheduler=torch.optim.SGD(mlp().parameters(), lr=0.1))",
        f"TrainLoop.scheduler is a SGD; {NEEDS_A_SCHEDULER}",
    ),
    "scheduler-numbers": ("loop(scheduler=[0.1, 0.01])", f"TrainLoop.scheduler is a float; {NEEDS_A_SCHEDULER}"),
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
    "scaler-true": ("loop(scaler=True)", f"TrainLoop.scaler is True; {NEEDS_A_SCALER}"),
    "scaler-name": ("loop(scaler='dynamic')", f"TrainLoop.scaler is 'dynamic'; {NEEDS_A_SCALER}"),
    "scaler-number": ("loop(scaler=1024.0)", f"TrainLoop.scaler is 1024.0; {NEEDS_A_SCALER}"),
    "scaler-class": (
        "loop(scaler=torch.amp.GradScaler)",
        f"TrainLoop.scaler is the class GradScaler; {NEEDS_A_SCALER}",
    ),
    "scaler-function": ("loop(scaler=lambda x: x)", f"TrainLoop.scaler is a function; {NEEDS_A_SCALER}"),
    "scaler-in-a-list": ("loop(scaler=[None])", f"TrainLoop.scaler is None; {NEEDS_A_SCALER}"),
    "frozen-matches-nothing": (
        "loop(frozen=('backbone.',))",
        "TrainLoop.frozen: no parameter is 'backbone.' or lies below it; the first names are "
        "0.weight, 0.bias, 2.weight, 2.bias",
    ),
    "frozen-pattern": (
        "loop(frozen=['*.bias'])",
        "TrainLoop.frozen: no parameter is '*.bias' or lies below it; the first names are "
        "0.weight, 0.bias, 2.weight, 2.bias",
    ),
    "frozen-string": (
        "loop(frozen='0.')",
        "TrainLoop.frozen is the string '0.'; a tuple of paths is needed: ('0.',)",
    ),
    "frozen-number": ("loop(frozen=(0,))", f"TrainLoop.frozen names an int; {NEEDS_PATHS}"),
    "frozen-true": ("loop(frozen=True)", f"TrainLoop.frozen names a bool; {NEEDS_PATHS}"),
    "frozen-module": ("loop(frozen=[nn.Linear(2, 2)])", f"TrainLoop.frozen names a Linear; {NEEDS_PATHS}"),
    "pretrained-string": (
        "loop(pretrained='0.')",
        "TrainLoop.pretrained is the string '0.'; a tuple of paths is needed: ('0.',)",
    ),
    "padding-number": ("loop(padding=0)", "TrainLoop.padding is 0; Padding(pad_id=0) is needed"),
    "padding-name": ("loop(padding='right')", "TrainLoop.padding is 'right'; Padding(pad_id=0) is needed"),
    "padding-dict": ("loop(padding={'pad_id': 3})", "TrainLoop.padding is a dict; Padding(pad_id=0) is needed"),
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
    "first-loss-string": (
        "loop(expected_init_loss='1.38')",
        "TrainLoop.expected_init_loss is '1.38'; a finite number is needed, as in math.log(10)",
    ),
    "first-loss-nan": (
        "loop(expected_init_loss=float('nan'))",
        "TrainLoop.expected_init_loss is nan; a finite number is needed, as in math.log(10)",
    ),
    "first-loss-true": (
        "loop(expected_init_loss=True)",
        "TrainLoop.expected_init_loss is True; a finite number is needed, as in math.log(10)",
    ),
    "steps-zero": (
        "loop(steps=0)",
        "TrainLoop.steps is 0; the number of optimizer steps of the whole training is needed, a whole number from 1 "
        "on, as in steps=len(loader) * epochs // accumulate",
    ),
    "steps-divided": (
        "loop(steps=250.0)",
        "TrainLoop.steps is 250.0; the number of optimizer steps of the whole training is needed, a whole number from "
        "1 on, as in steps=len(loader) * epochs // accumulate",
    ),
    "steps-true": (
        "loop(steps=True)",
        "TrainLoop.steps is True; the number of optimizer steps of the whole training is needed, a whole number from "
        "1 on, as in steps=len(loader) * epochs // accumulate",
    ),
    "epochs-string": (
        "loop(epochs='90')",
        "TrainLoop.epochs is '90'; the number of passes over the data of the whole training is needed, a whole number "
        "from 1 on, as in epochs=90",
    ),
    "rows-interact-no": (
        "loop(rows_interact='no')",
        "TrainLoop.rows_interact is 'no'; True or False is needed, or leave it out",
    ),
    "ordered-zero": (
        "loop(ordered=0)",
        "TrainLoop.ordered is 0; True or False is needed, or leave it out",
    ),
    "nondeterministic-one": (
        "loop(nondeterministic=1)",
        "TrainLoop.nondeterministic is 1; True or False is needed, or leave it out",
    ),
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
