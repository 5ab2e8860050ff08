"""A project that declares all that the battery asks for: a small GPT with accumulation, autocast, checkpointing,
evaluation, saving and a schedule, of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from loops import GPT, VOCABULARY, GPTConfig
from torch.utils.checkpoint import checkpoint as checkpointed

from pytest_trainloop import TrainLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

SIZES: dict[str, dict[str, int]] = {
    "1 ms": {"layers": 1, "width": 16, "context": 8, "rows": 4},
    "5 ms": {"layers": 2, "width": 48, "context": 24, "rows": 8},
    "20 ms": {"layers": 2, "width": 128, "context": 64, "rows": 8},
    "200 ms": {"layers": 4, "width": 256, "context": 96, "rows": 16},
    "2 s": {"layers": 6, "width": 512, "context": 128, "rows": 24},
}
"""By the time of a bare step, about, on one core."""


def project(size: str) -> Callable[..., TrainLoop]:
    """The function that a test would be."""
    shape = SIZES[size]

    def make(accumulate: int = 1, precision: str = "fp32", checkpoint: bool = False) -> TrainLoop:
        config = GPTConfig(
            vocab_size=VOCABULARY,
            context=shape["context"],
            layers=shape["layers"],
            heads=4,
            width=shape["width"],
            dropout=0.0,
        )
        model = GPT(config)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))
        draw = torch.Generator().manual_seed(0)
        batch = torch.randint(VOCABULARY, (shape["rows"], shape["context"] + 1), generator=draw)

        def features(tokens: Tensor) -> Tensor:
            x = model.embed(tokens)
            for block in model.blocks:
                x = checkpointed(block, x, use_reentrant=False) if checkpoint else block(x)
            return model.norm(x)

        def loss_of(tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model.head(features(tokens[:, :-1]))
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        def fit(batches: Iterable[Tensor]) -> None:
            model.train()
            for number, tokens in enumerate(batches, start=1):
                (loss_of(tokens) / accumulate).backward()
                if number % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        @torch.no_grad()
        def evaluate() -> float:
            model.eval()
            loss = float(loss_of(batch))
            model.train()
            return loss

        def save(path: Path) -> None:
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "rng": torch.get_rng_state()}, path)

        def load(path: Path) -> None:
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            torch.set_rng_state(state["rng"])

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            batch=batch,
            fit=fit,
            evaluate=evaluate,
            save=save,
            load=load,
        )

    return make
