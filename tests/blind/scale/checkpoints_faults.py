"""Who writes a checkpoint, and who reads it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 14), nn.GELU(), nn.Linear(14, 3))


class Run:
    def __init__(self, ranks: int, lr: float = 1e-2) -> None:
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.net = network()
        self.model = DDP(self.net) if ranks > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)

    def fit(self, batches) -> None:
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def state(self) -> dict:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@fault(
    "checkpoints",
    "all ranks write to one path",
    thread="NVIDIA/apex#886",
    check="distributed_equivalence",
    place="torch.save(run.state(), path)",
)
def saved_by_all(ranks=1):
    run = Run(ranks)

    def save_checkpoint(path):
        torch.save(run.state(), path)

    def load_checkpoint(path):
        run.restore(torch.load(path))

    return TrainLoop(
        model=run.net,
        optimizer=run.optimizer,
        batch=(torch.randn(8, 7), torch.randint(3, (8,))),
        fit=run.fit,
        save=save_checkpoint,
        load=load_checkpoint,
    )


@fault(
    "checkpoints",
    "rank 0 alone loads into a model that is wrapped already; the others go on from their own weights",
    thread="vllm-project/speculators#926",
    check="distributed_equivalence",
    place="if run.rank == 0:",
)
def loaded_on_main(ranks=1):
    run = Run(ranks, lr=3e-3)

    def save(path):
        if run.rank == 0:
            torch.save(run.state(), path)
        if ranks > 1:
            dist.barrier()

    def load(path):
        if run.rank == 0:
            run.restore(torch.load(path, map_location="cpu"))

    return TrainLoop(
        model=run.net,
        optimizer=run.optimizer,
        batch=(torch.randn(8, 7), torch.randint(3, (8,))),
        fit=run.fit,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "rank 0 puts pretrained weights in after wrapping; the ranks begin apart",
    thread="Hzfinfdu/Diffusion-BERT#30",
    check="distributed_equivalence",
    place="run.net.load_state_dict(pretrained)",
)
def pretrained_on_main(ranks=1):
    pretrained = {k: v * 0.5 + 0.01 for k, v in network().state_dict().items()}
    run = Run(ranks)
    if run.rank == 0:
        run.net.load_state_dict(pretrained)
    return TrainLoop(
        model=run.net, optimizer=run.optimizer, batch=(torch.randn(8, 7), torch.randint(3, (8,))), fit=run.fit
    )
