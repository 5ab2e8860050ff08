"""What is drawn of a fault beside what ought to be: which rows meet, where two runs part, which gradients differ."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from pytest_trainloop.core import registry
from pytest_trainloop.declare.baseline_file import BaselineFile
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.instruments.gradients.reached import MOST_PARTS, Reached
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.views.loop_facts.make import facts_of
from pytest_trainloop.views.loop_facts.measured import Measured
from pytest_trainloop.views.pictures import compared, dependence
from pytest_trainloop.views.pictures.make import KINDS
from pytest_trainloop.views.pictures.report_inputs import ReportInputs

KINDS_OF_FAULTS = [kind for kind in KINDS if kind.__module__ in (compared.__name__, dependence.__name__)]


def taken(make, check, *, knobs=None, baseline=None):
    """The pictures of what this check found of a loop, by their keys."""
    subject = Subject("test", make, settings=Settings(), knobs=knobs, baseline=baseline)
    result = subject.run_check(check)
    facts = facts_of(subject, {check: result}, measured=lambda evidence: Measured())
    found = {picture.key: picture for kind in KINDS_OF_FAULTS for picture in kind(facts, ReportInputs())}
    known = registry.registered()
    for picture in found.values():
        assert picture.look.endswith(".")
        assert picture.title
        assert picture.of
        assert picture.checks == (check,)
        assert check in known
        json.dumps(picture.to_json(), allow_nan=False)
    return found, result


class Net(nn.Module):
    """Two layers; ``between`` is given what lies between them."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.body, self.head, self.between = nn.Linear(4, 6), nn.Linear(6, 2), between

    def forward(self, x):
        return self.head(self.between(self.body(x)))


def batch():
    return torch.randn(6, 4), torch.randint(0, 2, (6,))


def trained(model=None, optimizer=None, loss=F.cross_entropy, **given):
    model = model or Net()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(**{"model": model, "optimizer": optimizer, "batch": batch(), "fit": fit, **given})


# rows and positions


def test_the_rows_that_meet_lie_beside_the_diagonal():
    found, result = taken(lambda: trained(Net(lambda x: x.softmax(0))), "batch_independence")
    table = found["rows_reached"]
    assert result.faults
    assert table.kind == "map"
    assert len(table.labels) == len(table.columns) == len(table.cells)
    assert all(value > 0 for row in table.cells for value in row)
    assert table.where


def test_no_table_where_rows_keep_apart():
    found, result = taken(trained, "batch_independence")
    assert not result.findings
    assert not found


class Language(nn.Module):
    """``sees`` is the diagonal from which on a position is hidden: 1 hides all later ones."""

    def __init__(self, sees):
        super().__init__()
        self.table, self.head, self.sees = nn.Embedding(20, 8), nn.Linear(8, 20), sees

    def forward(self, ids):
        x = self.table(ids)
        scores = x @ x.transpose(1, 2)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(self.sees)
        return self.head(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ x)


def language(sees):
    text = torch.randint(0, 20, (5, 10))
    return trained(
        Language(sees), batch=(text[:, :-1], text[:, 1:]), loss=lambda out, y: F.cross_entropy(out.transpose(1, 2), y)
    )


def test_the_position_ahead_lies_right_of_the_diagonal():
    found, result = taken(lambda: language(2), "causality")
    table = found["positions_reached"]
    assert [finding.cause for finding in result.faults] == ["mask_off_by_one"]
    cells = {(out, at): value for out, row in enumerate(table.cells) for at, value in enumerate(row)}
    assert all(cells[out, out + 1] for out in range(len(table.labels) - 1))
    assert not any(value for (out, at), value in cells.items() if at > out + 1)
    assert "right of the diagonal" in table.look


def test_a_table_keeps_the_first_parts_and_says_how_many_there_are():
    reached = Reached()
    reached.note(40, lambda part: [torch.eye(40)[:, part, None]])
    assert reached.parts == 40
    assert len(reached.sizes) == len(reached.sizes[0]) == MOST_PARTS
    assert reached.sizes[3][3] == 1.0
    assert sum(reached.sizes[3]) == 1.0


def test_a_table_that_torch_refuses_is_none():
    def refused(part):
        raise RuntimeError("a re-entrant checkpoint")

    reached = Reached()
    reached.note(4, refused)
    assert reached == Reached()


# two runs


def saving(state):
    """A loop that saves what ``state`` names."""

    def make():
        loop = trained()
        parts = {"model": loop.model, "optimizer": loop.optimizer}

        def save(path):
            torch.save({name: parts[name].state_dict() for name in state}, path)

        def load(path):
            for name, saved in torch.load(path).items():
                parts[name].load_state_dict(saved)

        return replace(loop, save=save, load=load)

    return make


def test_the_resumed_run_begins_at_the_cut_and_its_updates_differ():
    found, result = taken(saving(["model"]), "resume_equivalence")
    assert result.faults
    updates = found["resumed_updates"]
    assert updates.labels == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert updates.columns == (4, 5, 6)
    assert all(row[0] > 1e-3 for row in updates.cells), "momentum is gone with the first update"
    reference, own = found["resumed"].curves
    assert (reference.name, own.name) == ("uninterrupted", "resumed")
    assert (reference.x, own.x) == ((1, 2, 3, 4, 5, 6), (4, 5, 6))
    assert reference.y[3] == own.y[0], "the weights are there"
    assert found["resumed"].marks[0].at == 3.5


def test_what_is_saved_whole_is_not_drawn():
    found, result = taken(saving(["model", "optimizer"]), "resume_equivalence")
    assert result.outcome == "passed"
    assert not found


def test_training_parts_where_evaluation_leaves_its_weights():
    def make():
        loop = trained()
        first = copy.deepcopy(loop.model.state_dict())
        return replace(loop, evaluate=lambda: loop.model.load_state_dict(first) and 0.0)

    found, result = taken(make, "evaluation_is_pure")
    assert result.faults
    reference, own = found["evaluated"].curves
    assert own.y[:3] == reference.y[:3]
    assert own.y[3] != reference.y[3]
    assert found["evaluated"].marks[0].text == "evaluate()"
    assert not any(value for row in found["evaluated_updates"].cells for value in row[:3])
    assert any(row[3] for row in found["evaluated_updates"].cells)


def test_graphs_that_are_kept_are_one_more_with_each_step():
    def make():
        model, total = Net(), [0.0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total[0] = total[0] + loss

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)

    found, result = taken(make, "memory_growth")
    assert result.faults
    (alive,) = found["graphs"].curves
    assert alive.y[:9] == tuple(range(1, 10))
    assert "first 12 steps" in found["graphs"].note


def test_the_baseline_is_marked_where_training_first_differs(tmp_path):
    file = tmp_path / "loop.json"

    def make(power=1.0):
        return trained(loss=lambda out, y: F.cross_entropy(out, y) * power)

    check_loop(make, only=["baseline"], baseline=file, update=True)
    found, result = taken(lambda: make(power=1.2), "baseline", baseline=BaselineFile(path=file, shown="loop.json"))
    assert result.faults
    assert found["baseline"].marks[0].at == 1
    assert found["baseline"].marks[0].text == "first difference: loss"
    old, now = found["baseline"].curves
    assert now.y[0] == pytest.approx(1.2 * old.y[0], rel=1e-3)
    assert all(row[0] > 0.1 for row in found["baseline_gradients"].cells)
    assert {"baseline", "baseline_norm", "baseline_gradients"} == found.keys()


# gradients of single tensors


def test_a_loss_that_is_not_divided_is_one_factor_for_all_tensors():
    def make(accumulate=1):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for n, (x, y) in enumerate(batches, 1):
                F.cross_entropy(model(x), y).backward()
                if n % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)

    found, result = taken(make, "accumulation_equivalence", knobs={"accumulate": "accumulate"})
    assert [finding.cause for finding in result.faults] == ["loss_not_divided"]
    length, difference = found["accumulated"].bars
    assert found["accumulated"].labels == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert length.values == pytest.approx([2.0] * 4, rel=1e-3)
    assert difference.values == pytest.approx([0.5] * 4, rel=1e-3)


def test_gradients_differ_below_a_checkpoint_that_draws_anew():
    class Dropped(Net):
        def forward(self, x):
            hidden = checkpoint(self.drawn, self.body(x), use_reentrant=False)
            return self.head(hidden)

        def drawn(self, x):
            return x * torch.full_like(x, random.random())

    found, result = taken(lambda: trained(Dropped()), "checkpointing_equivalence")
    assert result.faults
    length, difference = found["checkpointed"].bars
    by_name = dict(zip(found["checkpointed"].labels, difference.values, strict=True))
    assert by_name["head.weight"] == 0.0
    assert by_name["body.weight"] > 0.0
    assert length.name == "length"


@pytest.mark.corpus
def test_the_error_in_low_precision_stands_beside_what_rounding_explains():
    def make():
        model = Net(lambda x: ((x + 300) ** 2 - (x + 299) ** 2).tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(x / 100).float(), y)
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)

    found, result = taken(make, "precision_parity")
    assert result.faults
    measured, explained = found["parity"].bars
    assert max(m / e for m, e in zip(measured.values, explained.values, strict=True)) > 2


@pytest.mark.corpus
def test_gradients_with_padding_beside_those_without():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(16, 6, padding_idx=0), nn.Linear(6, 2)

        def forward(self, ids, attention_mask):
            return self.head(self.table(ids).mean(1))

    def make():
        mask = (torch.arange(6) < torch.tensor([[6], [3], [4], [2]])).long()
        texts = {"ids": torch.randint(1, 16, (4, 6)) * mask, "attention_mask": mask, "y": torch.tensor([0, 1, 1, 0])}
        model = Mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for each in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(each["ids"], each["attention_mask"]), each["y"]).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=texts, fit=fit)

    found, result = taken(make, "padding_invariance")
    assert [finding.cause for finding in result.findings] == ["padding_pooled"]
    assert found["trimmed"].labels == ("table.weight", "head.weight", "head.bias")
    assert max(found["trimmed"].bars[1].values) > 0
