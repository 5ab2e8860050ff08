"""What the check says of loops that cannot be compared, and what it costs."""

from __future__ import annotations

import itertools
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.runs.reachable_state import stored
from tests.loops import data

GREEN = 9
"""Optimizer steps of a loop that is right."""


class Regression:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def fit(self, batches):
        for x, y in batches:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    def save(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def made(trainer=Regression, **changes):
    def make():
        own = trainer()
        given = {name: value(own) for name, value in changes.items()}
        fields = {"fit": own.fit, "save": own.save, "load": own.load, **given}
        return TrainLoop(model=own.model, optimizer=own.optimizer, batch=data.table(), **fields)

    return make


def judged(make):
    (result,) = check_loop(make, only=["resume_equivalence"], raises=False).results
    return result


def test_a_right_loop_costs_nine_steps_beside_the_watched_run():
    make = made()
    alone = check_loop(make, only=["step_order"], raises=False).results[0].steps
    result = judged(make)
    assert result.outcome == "passed"
    assert not result.findings
    assert result.steps - alone == GREEN


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("optimiser", "optimizer"), ("model.3", "model.2"), ("shedule", "scheduler")],
)
def test_a_name_in_renews_that_nothing_has_is_refused(name, nearest):
    with pytest.raises(UsageError, match=f"renews names '{name}', which nothing has; the nearest name is '{nearest}"):
        judged(made(renews=lambda own: (name,)))


@pytest.mark.parametrize("names", [("model.0", "optimizer"), ("0.", "rng"), ("model.0.weight",)])
def test_names_in_renews_are_paths_with_all_below_them(names):
    assert judged(made(renews=lambda own: names)).outcome == "passed"


def loads(own):
    return lambda path: own.load(torch.load(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"load": lambda own: lambda state: torch.load("/nowhere/checkpoint.pt")}, "save(path) and load(path)"),
        (
            {"save": lambda own: lambda path: None, "load": loads},
            "save wrote nothing into the folder that it is given",
        ),
        (
            {"save": lambda own: lambda path: torch.save(own.save(), f"{path}.pth"), "load": loads},
            "save wrote checkpoint.pt.pth where it was given checkpoint.pt",
        ),
        ({"save": lambda own: lambda: {"generator": (n for n in range(3))}}, "neither copied nor pickled"),
    ],
    ids=["no such file", "save writes elsewhere", "save adds an ending", "a state that cannot be copied"],
)
def test_what_is_not_the_loops_fault_is_a_skip_that_says_why(changes, reason):
    result = judged(made(**changes))
    assert result.outcome == "skipped"
    assert reason in result.reason


def test_a_load_that_opens_another_file_than_save_wrote_is_at_fault():
    def save(own):
        return lambda path: torch.save(own.save(), path.with_suffix(".pth"))

    def load(own):
        return lambda path: own.load(torch.load(path.with_suffix(".pt")))

    (finding,) = judged(made(save=save, load=load)).findings
    assert (finding.cause, finding.level) == ("load_raises", "fault")
    assert finding.summary == "save wrote checkpoint.pth, load opens checkpoint.pt"


@pytest.mark.parametrize("ending", [lambda path: path + ".pt", lambda path: path.removesuffix(".pt") + ".pt"])
def test_paths_that_are_strings_with_an_ending_to_add_are_no_fault(ending):
    def save(own):
        return lambda path: torch.save(own.save(), path + ".pt")

    def load(own):
        return lambda path: own.load(torch.load(ending(path)))

    result = judged(made(save=save, load=load))
    assert result.outcome == "passed"
    assert not result.findings


class Normalized(Regression):
    """With running statistics, and keys that are written under other names."""

    def __init__(self, renamed=str):
        super().__init__()
        self.model.insert(1, nn.BatchNorm1d(8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.renamed = renamed

    def save(self):
        state = super().save()
        return {**state, "model": {self.renamed(key): value for key, value in state["model"].items()}}

    def load(self, state):
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.fixture(params=["in memory", "in a file"])
def copies(request, monkeypatch):
    """Copies of the state lie there, as those of large tensors do."""
    if request.param == "in a file":
        monkeypatch.setattr(stored, "LARGE", 1)


@pytest.mark.usefixtures("copies")
def test_keys_under_a_prefix_are_one_finding_whose_repair_names_the_entry():
    (finding,) = judged(made(lambda: Normalized(lambda key: f"module.{key}"))).findings
    assert (finding.cause, finding.level) == ("weights_not_loaded", "fault")
    assert "{k.removeprefix('module.'): v for k, v in state['model'].items()}" in finding.repair


def test_a_layer_under_another_name_is_named():
    (finding,) = judged(made(lambda: Normalized(lambda key: key.replace("3.", "head.")))).findings
    assert finding.cause == "weights_not_loaded"
    assert "the checkpoint has 3.weight as head.weight: use one name" in finding.repair


def test_a_load_into_another_model_is_named():
    result = judged(made(load=lambda own: lambda state: Regression().load(state)))
    (finding,) = [f for f in result.findings if f.cause == "weights_not_loaded"]
    assert "load_state_dict was called on another Sequential, which is not TrainLoop.model" in finding.measured


def test_a_run_that_does_not_repeat_is_unreliable():
    class Drifting(Regression):
        draws = itertools.count()

        def fit(self, batches):
            for x, y in batches:
                super().fit([(x + 0.01 * next(self.draws), y)])

    assert judged(made(Drifting)).outcome in ("unreliable", "skipped")


def test_a_loop_that_raises_in_float64_is_judged_in_its_own_precision():
    class Narrow(Regression):
        def fit(self, batches):
            super().fit((x, y) for x, y in batches if x.dtype is torch.float32 or self.refuse())

        def refuse(self):
            raise TypeError("float32 is needed")

    assert judged(made(Narrow)).outcome == "passed"
    forgetful = made(Narrow, load=lambda own: lambda state: own.model.load_state_dict(state["model"]))
    assert [f.cause for f in judged(forgetful).faults] == ["optimizer_state_lost"]


@pytest.mark.usefixtures("copies")
def test_several_losses_are_named_side_by_side():
    class Both(Regression):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def fit(self, batches):
            for x, y in batches:
                super().fit([(x * self.scale, y)])
                self.scale *= 0.9

        def load(self, state):
            self.model.load_state_dict(state["model"])

    faults = judged(made(Both)).faults
    assert {f.cause for f in faults} == {"optimizer_state_lost", "counter_lost"}
    assert all(f.where.endswith("def load(self, state):") for f in faults)


def test_fit_that_raises_after_load_is_a_fault_of_its_own():
    class Prepared(Regression):
        ready = None

        def fit(self, batches):
            if self.ready is None and self.optimizer.state:
                raise RuntimeError("call prepare() first")
            self.ready = object()
            super().fit(batches)

    (fault,) = judged(made(Prepared)).faults
    assert fault.cause == "load_raises"
    assert "call prepare() first" in fault.summary


def test_temporary_folders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert judged(made(save=lambda own: lambda path: torch.save(own.save(), path), load=loads)).outcome == "passed"
    assert list(tmp_path.iterdir()) == []


class Averaged(Regression):
    def __init__(self):
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def fit(self, batches):
        for batch in batches:
            super().fit([batch])
            for name, p in self.model.named_parameters():
                self.shadow[name].lerp_(p.detach(), 0.1)

    def evaluate(self):
        """The share of outputs below a bound that all of them are below."""
        x, _ = data.table()
        return (torch.func.functional_call(self.model, self.shadow, (x,)) < 1e6).float().mean().item()


def test_a_result_that_happens_to_be_equal_clears_no_average():
    result = judged(made(Averaged, evaluate=lambda own: own.evaluate))
    assert result.outcome == "passed"
    (finding,) = result.findings
    assert (finding.cause, finding.level) == ("average_lost", "advice")
    assert "evaluate() gives 1 with and without it" in finding.measured
    assert "an accuracy is often equal" in finding.shown_by


def test_an_average_that_is_saved_and_not_put_back_is_a_fault_whoever_reads_it():
    result = judged(made(Averaged, save=lambda own: lambda: {**own.save(), "shadow": own.shadow}))
    assert [(f.cause, f.level, f.repair) for f in result.findings] == [
        ("average_lost", "fault", "put back what the file holds, after whatever makes own.shadow in load")
    ]


def test_a_trainer_whose_counted_epochs_are_over_is_told_which_counter_ended_it():
    from tests.checks.state.resume_equivalence.unusual_counters import epochs_are_counted_and_over as over

    (result,) = check_loop(over, only=["resume_equivalence"]).results
    assert result.reason == (
        "fit makes no optimizer step when it is called a second time: trainer.epoch is 3 by then, and so is "
        "trainer.config.epochs, where fit may stop. Let the test's fit train on: set trainer.config.epochs = "
        "trainer.epoch + 3 before it calls the trainer"
    )
