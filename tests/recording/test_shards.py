"""Weights in shards (FSDP2) and on a mesh (tensor parallelism) are seen as far as this process holds them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.recording.events import Backward, ClipCall, Step
from pytest_trainloop.recording.shards import is_distributed, is_whole, local
from pytest_trainloop.runs.evidence import Evidence
from tests.helpers.findings import described
from tests.helpers.group_of_one import group_of_one  # noqa: F401
from tests.loops import data, nets

pytestmark = pytest.mark.usefixtures("group_of_one")
NO_SHARDS_ON_CPUS = not hasattr(torch.cpu.Stream, "record_event")
WHY = "torch 2.6 shards on GPUs only"


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def sharded():
    from torch.distributed.fsdp import fully_shard

    model, own = nets.mlp(6, 24, 1), mesh()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=own)
    return fully_shard(model, mesh=own)


def loop(*, zeroed=True, clipped_late=False):
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            if not clipped_late:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if clipped_late:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if zeroed:
                optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            return float(F.mse_loss(model(data.table()[0]), data.table()[1]))

    def save(folder):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")

    def load(folder):
        kept = torch.load(folder / "last.pt", weights_only=False)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    return TrainLoop(
        model=model, optimizer=optimizer, batch=data.table(), fit=fit, evaluate=evaluate, save=save, load=load
    )


def test_a_shard_is_read_without_communication():
    weight = sharded()[0].weight
    assert is_distributed(weight)
    assert is_whole(weight)  # of one process
    assert type(local(weight)) is torch.Tensor
    plain = torch.ones(2)
    assert local(plain) is plain
    assert not is_distributed(plain)


@pytest.mark.skipif(NO_SHARDS_ON_CPUS, reason=WHY)
def test_gradients_that_are_written_to_shards_are_recorded_as_those_of_the_backward_pass():
    record = Evidence(loop).run()
    first = record.of(Backward)[0]
    assert set(first.arrivals) == {0, 1, 2, 3}
    step = record.of(Step)[0]
    assert all(sample.peak > 0 for sample in step.reads[0].grads.values())
    assert all(entry.start.raw for entry in record.parameters)
    assert len(record.moves) == record.steps
    clip = record.of(ClipCall)[0]
    assert clip.totals[0] == pytest.approx(sum(n**2 for n in clip.norms.values()) ** 0.5, rel=1e-5)


@pytest.mark.skipif(NO_SHARDS_ON_CPUS, reason=WHY)
def test_what_comes_on_top_of_a_gradient_is_told_from_what_was_there():
    record = Evidence(lambda: loop(zeroed=False)).run()
    second = record.of(Backward)[1]
    assert all(arrival.residual is not None for arrived in second.arrivals.values() for arrival in arrived)


@pytest.mark.parametrize(
    ("fault", "cause"), [({"zeroed": False}, "not_zeroed"), ({"clipped_late": True}, "clip_after_step")]
)
@pytest.mark.skipif(NO_SHARDS_ON_CPUS, reason=WHY)
def test_faults_of_sharded_loops_are_named(fault, cause):
    report = check_loop(lambda: loop(**fault), only=["step_order"], raises=False)
    assert [f.cause for r in report.results for f in r.faults] == [cause]


@pytest.mark.integration
def test_a_sharded_loop_passes_every_check():
    report = check_loop(loop, raises=False)
    assert report.ok, described(report)
    assert [(r.check, r.reason) for r in report.results if "please report" in (r.reason or "")] == []


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.integration
def test_a_loop_over_split_layers_passes_every_check():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make():
        model = parallelize_module(Wide(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)

    report = check_loop(make, raises=False)
    assert report.ok, described(report)
    assert [(r.check, r.reason) for r in report.results if "please report" in (r.reason or "")] == []
