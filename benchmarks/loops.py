"""The loops that the benchmarks run: a small GPT trained as usual, of any size."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_gpt"))

from char_gpt.model import GPT, GPTConfig

VOCABULARY = 96


@dataclass
class Loop:
    """A model with its optimizer, one step of its training on one batch, and a loop over batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    step: Callable[..., Tensor]

    def fit(self, batches: Iterable[Tensor]) -> None:
        for tokens in batches:
            self.step(tokens)


def gpt(*, layers: int, width: int, context: int, rows: int) -> Loop:
    """AdamW, clipping, warm-up: what a step of a language model does, on one batch of random characters."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=VOCABULARY, context=context, layers=layers, heads=4, width=width, dropout=0.0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 100))
    batch = torch.randint(VOCABULARY, (rows, context + 1))

    def step(tokens: Tensor = batch) -> Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return Loop(model, optimizer, batch, step)


class Calls(TorchFunctionMode):
    """How many calls of torch a piece of code makes from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
