"""Twelve small loops and loss functions, right and wrong ones, that enter most functions of the package together."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import LossContract, Padding, TrainLoop


def regression(accumulate=1):
    """Accumulates, and splits a batch itself."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for number, (x, y) in enumerate(batches, 1):
            (F.mse_loss(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 3), torch.randn(8, 1)), fit=fit)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(0.1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.body(x)))))


def classes():
    """Resumes, evaluates, and follows a schedule; its data come from a loader."""
    model = Classifier()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x[:, :3].argmax(1))

    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    def evaluate():
        was = model.training
        model.eval()
        with torch.no_grad():
            score = float((model(x).argmax(1) == rows.tensors[1]).float().mean())
        model.train(was)
        return score

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=DataLoader(rows, batch_size=5, shuffle=True),
        fit=fit,
        evaluate=evaluate,
        save=lambda: {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()},
        load=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
    )


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.mix = nn.MultiheadAttention(4, 1, batch_first=True)
        self.head = nn.Linear(4, 9)

    def forward(self, ids):
        h, length = self.embed(ids), ids.shape[1]
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed, _ = self.mix(h, h, h, attn_mask=ahead, key_padding_mask=ids == 0, need_weights=False)
        return self.head(h + mixed)


def padded_tokens():
    """Predicts the next token of padded rows."""
    ids = torch.randint(1, 9, (6, 7))
    for row, length in enumerate((7, 5, 6, 3, 7, 4)):
        ids[row, length:] = 0
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for given in batches:
            optimizer.zero_grad()
            logits, labels = model(given[:, :-1]), given[:, 1:]
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0).backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=ids, fit=fit, ordered=True, padding=Padding(pad_id=0, ignore_index=0)
    )


def adversaries():
    """A generator against a discriminator."""
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    score = F.binary_cross_entropy_with_logits

    def fit(batches):
        for real in batches:
            made, ones, zeros = (
                generator(torch.randn(len(real), 2)),
                torch.ones(len(real), 1),
                torch.zeros(len(real), 1),
            )
            of_discriminator.zero_grad()
            (score(discriminator(real), ones) + score(discriminator(made.detach()), zeros)).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            score(discriminator(made), ones).backward()
            of_generator.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[of_generator, of_discriminator],
        batch=torch.randn(6, 3),
        fit=fit,
    )


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision(precision="fp32", checkpoint=False):
    """Autocast, a scaler, and blocks that can be checkpointed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "fp16")

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            lower = torch.autocast("cpu", dtype=LOWER[precision]) if precision in LOWER else contextlib.nullcontext()
            with lower:
                out = checkpointed(model, x, use_reentrant=False) if checkpoint else model(x)
                loss = F.mse_loss(out.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(
        model=model, optimizer=optimizer, scaler=scaler, batch=(torch.randn(6, 4), torch.randn(6, 1)), fit=fit
    )


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def terms_of(model, x):
    out, mean, spread = model(x)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return {"reconstruction": F.mse_loss(out, x, reduction="sum") / len(x), "divergence": (0.1, divergence)}


def parts(compile=False):
    """A loss of two terms, declared; the model can be compiled."""
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    called = torch.compile(model, backend="aot_eager") if compile else model

    def fit(batches):
        for x in batches:
            optimizer.zero_grad()
            terms = terms_of(called, x)
            (terms["reconstruction"] + terms["divergence"][0] * terms["divergence"][1]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(6, 4), fit=fit, parts=terms_of)


def shared_bugs(accumulate=1):
    """Wrong: gradients are never zeroed, labels broadcast, a layer is not trained and another one is cut off."""
    model = nn.ModuleDict({"body": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "cut": nn.Linear(4, 4)})
    model["left_out"], model["head"] = nn.Linear(4, 4), nn.Linear(4, 1)
    held = [p for name, p in model.named_parameters() if not name.startswith("left_out")]
    optimizer = torch.optim.Adam(held, lr=1.0, weight_decay=0.1)
    model.eval()

    def fit(batches):
        for x, y in batches:
            h = torch.relu(model["norm"](model["body"](x)) - 5)
            h = model["left_out"](h + model["cut"](h).detach())
            F.mse_loss(model["head"](h), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6)), fit=fit)


def loses_state():
    """Wrong: resuming loses the optimizer, evaluation trains statistics, the data are read in the same order twice."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = TensorDataset(torch.randn(6, 3), torch.randn(6, 1))
    seen = []

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss)

    def evaluate():
        with torch.no_grad():
            return float(F.mse_loss(model(rows.tensors[0]), rows.tensors[1]))

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(rows, batch_size=4),
        fit=fit,
        evaluate=evaluate,
        save=lambda: {"model": copy.deepcopy(model.state_dict())},
        load=lambda state: model.load_state_dict(state["model"]),
    )


def leaks():
    """Wrong: a model of ordered values that sees the future and the other rows, and a loss of probabilities."""
    model = nn.ModuleDict({"mix": nn.Linear(5, 5), "head": nn.Linear(2, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.01)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            h = model["mix"](x.transpose(1, 2)).transpose(1, 2)
            h = (h - h.mean(0)) / (h.std(0) + 1e-5)
            F.cross_entropy(model["head"](h).softmax(-1).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=(torch.randn(4, 5, 2), torch.randint(3, (4, 5))),
        fit=fit,
        ordered=True,
    )


def only_a_loss():
    """Neither a loop nor an optimizer is given; the values leave float32's range."""
    model = nn.Linear(3, 2)
    return TrainLoop(
        model=model,
        batch=(torch.randn(5, 3), torch.randint(2, (5,))),
        loss=lambda model, batch: F.nll_loss((200 * model(batch[0])).softmax(1).log(), batch[1]),
    )


def focal(logits, target):
    kept = target != -100
    log_p = logits.log_softmax(1)[kept].gather(1, target[kept][:, None]).squeeze(1)
    return -((1 - log_p.exp()).square() * log_p).sum() / kept.sum().clamp(min=1)


def focal_loss():
    """A right loss function."""
    return LossContract(criterion=focal, expects="logits", num_classes=3, ignore_index=-100)


def wrong_loss():
    """A wrong one: it ignores no index, and cuts the gradient of half of its value."""
    return LossContract(
        criterion=lambda logits, target: F.cross_entropy(logits, target.clamp(min=0)) + logits.detach().exp().mean(),
        expects="logits",
        num_classes=3,
        ignore_index=-100,
    )


LOOPS = (
    regression,
    classes,
    padded_tokens,
    adversaries,
    mixed_precision,
    parts,
    shared_bugs,
    loses_state,
    leaks,
    only_a_loss,
)
LOSSES = (focal_loss, wrong_loss)
