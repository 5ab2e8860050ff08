"""Re-entrant activation checkpointing over inputs that do not require grad."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.lora import inject
from tests.loops.nets import GPT, lm_loss
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def train(loss, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()


# A language model with adapters on a frozen base. Checkpointing was switched on first.


class CheckpointedGPT(GPT):
    def __init__(self, *, use_reentrant=False, inputs_require_grad=False):
        super().__init__(depth=2)
        self.use_reentrant = use_reentrant
        if inputs_require_grad:
            self.token.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))


def adapt(model, *, head):
    model.requires_grad_(False)
    inject(model.blocks, ("qkv", "mlp.0", "mlp.2"))
    model.head.requires_grad_(head)


def adapted(*, head, **how):
    def make():
        model = CheckpointedGPT(**how)
        adapt(model, head=head)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(lambda batch: lm_loss(model, batch), optimizer, batches),
        )

    return make


pair(
    "adapters_behind_checkpoint",
    CHECK,
    "checkpoint_cut",
    culprits=("blocks.0.qkv.lora_A", "blocks.0.qkv.lora_B", "blocks.1.mlp.2.lora_B"),
    where="checkpoint(block, x, use_reentrant=self.use_reentrant)",
    faulty=adapted(head=True, use_reentrant=True),
    fixed=adapted(head=True, use_reentrant=False),
)
pair(
    "only_adapters_behind_checkpoint",
    CHECK,
    "checkpoint_cut",
    culprits=("blocks.0.qkv.lora_A", "blocks.0.qkv.lora_B"),
    raises="does not require grad",
    faulty=adapted(head=False, use_reentrant=True),
    fixed=adapted(head=False, use_reentrant=True, inputs_require_grad=True),
)


# A sequence of layers, cut into segments; the last one runs outside of the checkpoint.


def segmented(**how):
    def make():
        layers = [nn.Sequential(nn.Linear(width, 24), nn.Tanh()) for width in (6, 24, 24)]
        model = nn.Sequential(*layers, nn.Linear(24, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def loss(batch):
            return F.mse_loss(checkpoint_sequential(model, 2, batch[0], **how), batch[1])

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train(loss, optimizer, batches),
        )

    return make


pair(
    "first_segment_checkpointed",
    CHECK,
    "checkpoint_cut",
    culprits=("0.0.weight", "1.0.weight"),
    where="checkpoint_sequential(",
    faulty=segmented(use_reentrant=True),
    fixed=segmented(use_reentrant=False),
    quick=True,
)
