"""The functions that a loop is made of, and its knobs: what cannot be judged is refused once, in one sentence."""

from __future__ import annotations

import re

import pytest

from tests.helpers.refusals import judged

FIT_IS_NEEDED = (
    "TrainLoop got neither fit nor step nor loss; give the project's own loop as a function: "
    "fit=lambda batches: train(model, batches) (fit=train(...) would call it, and give what it returns: None)"
)
NO_LOOP = "test_it returned {}; it must return a TrainLoop"
KNOB = "@pytest.mark.trainloop  # here\ndef test_it({}):\n    return loop()"
WHOLE = "a whole number from 1 on, as in {}=1,"
DTYPES = '"fp32", "bf16" or "fp16"'
DEFAULTS = {
    "accumulate='two'": WHOLE.format("accumulate"),
    "accumulate=0": WHOLE.format("accumulate"),
    "accumulate=True": WHOLE.format("accumulate"),
    "precision=32": DTYPES,
    "precision='bf16-mixed'": DTYPES,
    "precision=torch.float32": DTYPES,
    "checkpoint='no'": "True or False",
    "compile='off'": "True or False",
    "device=0": 'the name of a device, as in device="cpu",',
    "ranks='all'": WHOLE.format("ranks"),
}
"""What is needed in place of each default of a knob."""

FUNCTIONS = {
    "returns-none": ("@pytest.mark.trainloop  # here\ndef test_it():\n    loop()", NO_LOOP.format("None")),
    "returns-tuple": ("return mlp(), 1", NO_LOOP.format("a tuple of 2")),
    "returns-model": ("return mlp()", NO_LOOP.format("a model (Sequential)")),
    "returns-class": ("return TrainLoop", NO_LOOP.format("the class TrainLoop")),
    "returns-contract": (
        "from pytest_trainloop import LossContract\n"
        "return LossContract(criterion=F.cross_entropy, expects='logits', num_classes=3)",
        NO_LOOP.format("a LossContract without tensors") + " (for a loss the marker is trainloop_loss)",
    ),
    "fit-number": ("return TrainLoop(model=mlp(), fit=3)  # here", "TrainLoop.fit is an int; a function is needed"),
    "fit-string": (
        "return TrainLoop(model=mlp(), fit='train.py')  # here",
        "TrainLoop.fit is a str; a function is needed",
    ),
    "fit-called": (
        "model = mlp()\nreturn TrainLoop(model=model, batch=rows(), fit=train(model, None, []))",
        FIT_IS_NEEDED,
    ),
    "fit-and-step": (
        "return TrainLoop(model=mlp(), batch=rows(), fit=print, step=print)",
        "TrainLoop got both fit and step; give the whole loop as fit, or one batch's work as step",
    ),
    "fit-takes-nothing": (
        """
        def fit():  # here
            return None
        return TrainLoop(model=mlp(), batch=rows(), fit=fit)
        """,
        "TrainLoop.fit takes (), and is called as fit(batches)",
    ),
    "fit-takes-the-model-too": (
        "return TrainLoop(model=mlp(), batch=rows(), fit=lambda model, batches: None)  # here",
        "TrainLoop.fit takes (model, batches), and is called as fit(batches)",
    ),
    "parts-mapping": (
        "loop(parts={'ce': 1.0})",
        "TrainLoop.parts is a dict; a function is needed that gives each term by name, as in lambda model, batch: "
        '{"ce": ce(model, batch)}',
    ),
    "parts-takes-the-model": (
        "return loop(parts=lambda model: {})  # here",
        "TrainLoop.parts takes (model), and is called as parts(model, batch)",
    ),
    "fit-coroutine": (
        """
        async def fit(batches):  # here
            return None
        return TrainLoop(model=mlp(), batch=rows(), fit=fit)
        """,
        "TrainLoop.fit is a coroutine function, which only begins to run when it is awaited; a plain function is "
        "needed, as in lambda batches: asyncio.run(train(batches))",
    ),
    "fit-generator": (
        """
        def fit(batches):  # here
            yield from batches
        return TrainLoop(model=mlp(), batch=rows(), fit=fit)
        """,
        "TrainLoop.fit is a generator function, which runs only as far as it is iterated over; a function that does "
        "its work when it is called is needed",
    ),
    "fit-takes-no-batch": (
        """
        def fit(batches):  # here
            return None
        return TrainLoop(model=mlp(), batch=rows(), fit=fit)
        """,
        "fit came back without taking a batch; it must iterate over the batches it is given, or make len(batches) "
        "steps on data of its own",
    ),
    "fit-exits": (
        """
        def fit(batches):  # here
            sys.exit(3)
        return TrainLoop(model=mlp(), batch=rows(), fit=fit)
        """,
        "fit called sys.exit(3) after 0 steps; return from fit instead",
    ),
    "step-takes-two": (
        "return TrainLoop(model=mlp(), batch=rows(), step=lambda x, y: None)  # here",
        "TrainLoop.step takes (x, y), and is called as step(batch)",
    ),
    "loss-name": ("return loop(loss='mse')", "TrainLoop.loss is a str; a function is needed"),
    "loss-takes-the-model-only": (
        "return loop(loss=lambda model: model(rows()[0]).mean())  # here",
        "TrainLoop.loss takes (model), and is called as loss(model, batch)",
    ),
    "loss-criterion": (
        "return loop(loss=nn.MSELoss())",
        "TrainLoop.loss is a MSELoss, which takes outputs and targets; loss(model, batch) is needed, as in "
        "lambda model, batch: criterion(model(batch[0]), batch[1])",
    ),
    "loss-vector": (
        "return loop(fit=None, loss=lambda m, b: F.mse_loss(m(b[0]), b[1], reduction='none'))  # here",
        "TrainLoop.loss returned a float32 tensor of shape (8, 1); a scalar is needed: take its mean",
    ),
    "loss-float": (
        "return loop(fit=None, loss=lambda m, b: 1.5)  # here",
        "TrainLoop.loss returned 1.5; a scalar tensor with a history is needed",
    ),
    "loss-none": (
        "return loop(fit=None, loss=lambda m, b: None)  # here",
        "TrainLoop.loss returned None; a scalar tensor with a history is needed",
    ),
    "evaluate-number": ("return loop(evaluate=0.9)", "TrainLoop.evaluate is a float; a function is needed"),
    "evaluate-takes-the-model": (
        "return loop(evaluate=lambda model: model.eval())  # here",
        "TrainLoop.evaluate takes (model), and is called as evaluate()",
    ),
    "evaluate-takes-a-loader": (
        """
        class Trainer:
            @torch.no_grad()  # here
            def validate(self, loader, topk=1):
                return 0.0

        return loop(evaluate=Trainer().validate)
        """,
        "TrainLoop.evaluate takes (loader, topk=1), and is called as evaluate(): lambda: trainer.validate(loader)",
    ),
    "evaluate-takes-the-model-by-name": (
        """
        def score(model, *, loader):  # here
            return 0.0

        return loop(evaluate=score)
        """,
        "TrainLoop.evaluate takes (model, *, loader), and is called as evaluate(): lambda: score(model, loader=loader)",
    ),
    "save-takes-two": (
        "return loop(save=lambda path, step: None, load=print)  # here",
        "TrainLoop.save takes (path, step), and is called as save() or save(path)",
    ),
    "load-takes-nothing": (
        "return loop(save=dict, load=lambda: None)  # here",
        "TrainLoop.load takes (), and is called as load(state)",
    ),
}

KNOBS = {
    "knob-without-default": (
        KNOB.format("accumulate"),
        "test_it takes 'accumulate' without a default, and no fixture has that name; a knob needs a default, as in "
        "accumulate=1",
    ),
    "knob-without-default-mapped-away": (
        KNOB.format("*, device"),
        "test_it takes 'device' without a default, and no fixture has that name; a knob needs a default, as in "
        'device="cpu"',
    ),
    "accumulate-mapped": (
        "@pytest.mark.trainloop(knobs={'windows': 'accumulate'})  # here\ndef test_it(windows=2.5):\n    return loop()",
        f"the default of windows (the knob accumulate) in test_it is 2.5; {WHOLE.format('windows')} is needed",
    ),
    **{
        f"knob-{number}": (
            KNOB.format(knob),
            f"the default of {knob.replace('=', ' in test_it is ')}; {needed} is needed",
        )
        for number, (knob, needed) in enumerate(DEFAULTS.items())
    },
    **{
        f"misspelt-{knob}": (
            KNOB.format(f"{slip}={default}"),
            f"test_it has a parameter '{slip}', one letter from the knob '{knob}'; write {knob}=, or map it: "
            f"knobs={{'{slip}': '{knob}'}}",
        )
        for knob, slip, default in (
            ("accumulate", "acumulate", "1"),
            ("checkpoint", "chekcpoint", "False"),
            ("precision", "precission", "'fp32'"),
        )
    },
}

AT_COLLECTION = {
    "knobs-unknown": (
        "@pytest.mark.trainloop(knobs={'use_it': 'checkpiont'})\ndef test_it(use_it=False):\n    return loop()",
        "knobs maps 'use_it' to 'checkpiont', which is no knob; the nearest name is 'checkpoint'",
    ),
    "knobs-of-no-parameter": (
        "@pytest.mark.trainloop(knobs={'use_it': 'checkpoint'})\ndef test_it(use_ti=False):\n    return loop()",
        "knobs names 'use_it', which is no keyword default of test_it; the nearest name is 'use_ti'",
    ),
    "skip-unknown": (
        "@pytest.mark.trainloop(skip={'step_ordr': 'is meant'})\ndef test_it():\n    return loop()",
        "the trainloop marker: skip names 'step_ordr', which matches no check; the nearest name is 'step_order'",
    ),
    "skip-without-reason": (
        "@pytest.mark.trainloop(skip={'step_order': ''})\ndef test_it():\n    return loop()",
        "the trainloop marker: skip of 'step_order' has no reason (''); a sentence is needed that says why",
    ),
    "marker-by-position": (
        "@pytest.mark.trainloop('step_order')\ndef test_it():\n    return loop()",
        "the trainloop marker got 'step_order' by position; keywords are needed: only, skip, xfail, knobs, or a "
        "check's name",
    ),
}

REFUSED = FUNCTIONS | KNOBS | AT_COLLECTION


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("functions"), {name: source for name, (source, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_once_in_one_sentence(said, name):
    found = said[name]
    sentence = re.sub(r"\btest_it\b", re.sub("[^a-z0-9]+", "_", f"test_{name}"), REFUSED[name][1])
    (failure,) = found.failures
    plain = re.sub(r" \(test_loops\.py:\d+\)$", "", failure)
    if name in KNOBS or name in AT_COLLECTION:
        plain = re.sub(r"^test_loops\.py::\w+: ", "", plain)
    assert plain == sentence
    if name not in AT_COLLECTION:
        assert re.search(r" \(test_loops\.py:(\d+)\)$", failure)[1] == str(found.here) or not found.here
    if name not in ("loss-vector", "loss-float", "loss-none"):  # without fit the other checks have reasons of their own
        assert all(sentence in reason and " (see test_loops.py::" in reason for reason in found.skips)
    assert not found.passed


def test_a_knob_that_no_letter_separates_is_another_word(tmp_path):
    sources = {
        name: f"@pytest.mark.trainloop\ndef test_it({name}):\n    return loop()"
        for name in ("rank=8", "devices=1", "compiled=True", "checkpoints=3", "accumulated=0", "n=2")
    }
    said = judged(tmp_path, {**sources, "slip": KNOBS["misspelt-precision"][0]})
    assert all(not said[name].failures for name in sources)
