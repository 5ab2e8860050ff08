"""Train the character-level GPT: ``python -m char_gpt.train --steps 200``."""

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from char_gpt.data import Batch, crop_loader, load_corpus
from char_gpt.model import GPT, GPTConfig


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 200
    batch_size: int = 16
    accumulate: int = 2
    rate: float = 3e-3
    warmup: int = 20
    final_rate: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


def configure_optimizer(model: nn.Module, config: TrainConfig | None = None) -> AdamW:
    """AdamW that decays the weight matrices only: no biases, no norm gains, no embeddings."""
    config = config or TrainConfig()
    undecayed = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.LayerNorm)) for p in m.parameters()}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in trainable if name.endswith("bias") or id(p) in undecayed]
    decayed = [p for name, p in trainable if not name.endswith("bias") and id(p) not in undecayed]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.rate, betas=(0.9, 0.95))


def configure_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig | None = None) -> LambdaLR:
    """Linear warm-up, then a cosine down to ``final_rate`` times the peak."""
    config = config or TrainConfig()

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
        return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


def lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The batches in lists of ``size``; the last list holds what is left over."""
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        yield window


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    accumulate: int = 1,
    scheduler: LambdaLR | None = None,
    clip: float = 1.0,
    log_every: int = 0,
) -> list[float]:
    """One optimizer step per ``accumulate`` batches; returns the loss of every step."""
    device = next(model.parameters()).device
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step, window in enumerate(windows(batches, accumulate), start=1):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens, targets in window:
            loss = lm_loss(model, (tokens.to(device), targets.to(device))) / len(window)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
        if log_every and step % log_every == 0:
            seconds = time.perf_counter() - started
            print(f"step {step:5d}  loss {total:.3f}  norm {norm:.2f}  rate {rate:.2e}  {seconds:.1f} s")
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The mean loss over ``batches``, without dropout."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    losses = [lm_loss(model, (tokens.to(device), targets.to(device))).item() for tokens, targets in batches]
    model.train(was_training)
    return sum(losses) / len(losses)


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "rng": torch.get_rng_state()}, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> None:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--accumulate", type=int, default=TrainConfig.accumulate)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="written at the end; training goes on from it if it is there")
    parser.add_argument("--sample", type=int, default=0, help="characters to print after training")
    options = parser.parse_args(arguments)

    config = TrainConfig(steps=options.steps, accumulate=options.accumulate)
    torch.manual_seed(config.seed)
    corpus = load_corpus()
    model = GPT(GPTConfig(vocab_size=len(corpus.vocabulary))).to(options.device)
    optimizer = configure_optimizer(model, config)
    scheduler = configure_scheduler(optimizer, config)
    if options.checkpoint and options.checkpoint.exists():
        load_checkpoint(options.checkpoint, model, optimizer, scheduler)
    context = model.config.context
    batches = crop_loader(corpus.train, context, config.batch_size, config.steps * config.accumulate)
    validation = crop_loader(corpus.validation, context, 64, 8, seed=0)

    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(corpus.train)} characters to train on")
    print(f"validation loss before training: {evaluate(model, validation):.3f}")
    train(
        model,
        optimizer,
        batches,
        accumulate=config.accumulate,
        scheduler=scheduler,
        clip=config.clip,
        log_every=max(1, config.steps // 10),
    )
    if options.checkpoint:
        save_checkpoint(options.checkpoint, model, optimizer, scheduler)
    print(f"validation loss after {config.steps} steps: {evaluate(model, validation):.3f}")
    if options.sample:
        prompt = corpus.vocabulary.encode("The ")[None].to(options.device)
        print(corpus.vocabulary.decode(model.generate(prompt, options.sample)[0]))


if __name__ == "__main__":
    main()
