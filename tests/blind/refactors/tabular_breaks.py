"""Tables: embeddings, residual networks, recommendation."""

# ruff: noqa: N801, N805
from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

NUMERIC, CARDINALITIES, WIDTH = 6, (5, 4), 8


def rows(n, size=16, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "numeric": torch.randn(size, NUMERIC, generator=generator),
            "categorical": torch.stack(
                [torch.randint(0, c, (size,), generator=generator) for c in CARDINALITIES], dim=1
            ),
            "label": (torch.rand(size, generator=generator) < 0.3).float(),
            "price": 20 + 5 * torch.randn(size, generator=generator),
        }
        for _ in range(n)
    ]


def loop(model, optimizer, loss_fn, batches=rows):
    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model(batch["numeric"]), batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


def label_loss(output, batch):
    return F.binary_cross_entropy_with_logits(output.squeeze(1), batch["label"])


class MLP(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.lin1 = nn.Linear(NUMERIC, 16)
        self.norm = norm(16)
        self.lin2 = nn.Linear(16, 1)

    def forward(self, x):
        return self.lin2(F.relu(self.norm(self.lin1(x))))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def attend(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class FTTransformer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(NUMERIC, WIDTH))
        self.bias = nn.Parameter(torch.zeros(NUMERIC, WIDTH))
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = x[..., None] * self.weight + self.bias
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@breaks(
    "tabular",
    "the norms stand behind the sums and no longer before the sublayers",
    first="output",
    place="layers.0.attention",
    thread="harvardnlp/annotated-transformer#13",
)
class norm_place:
    def before():
        class EncoderLayer(Layer):
            def forward(self, x):
                x = x + self.attend(self.norm1(x))
                return x + self.ffn(self.norm2(x))

        model = FTTransformer(EncoderLayer)
        return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), label_loss)

    def after():
        class EncoderLayer(Layer):
            norm_first = False

            def forward(self, x):
                x = self.norm1(x + self.attend(x))
                return self.norm2(x + self.ffn(x))

        model = FTTransformer(EncoderLayer)
        return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), label_loss)


@breaks(
    "tabular",
    "the norm takes the whole batch and no longer virtual batches of it",
    first="output",
    place="norm.bn",
    thread="dreamquark-ai/tabnet#305",
)
class virtual_batches:
    class Norm(nn.Module):
        def __init__(self, width, virtual_batch_size=4):
            super().__init__()
            self.bn = nn.BatchNorm1d(width, momentum=0.02)
            self.virtual_batch_size = virtual_batch_size

    def before():
        class GhostNorm(virtual_batches.Norm):
            def forward(self, x):
                return torch.cat([self.bn(part) for part in x.split(self.virtual_batch_size)], dim=0)

        model = MLP(GhostNorm)
        return loop(model, torch.optim.Adam(model.parameters(), lr=2e-2), label_loss)

    def after():
        class GhostNorm(virtual_batches.Norm):
            def forward(self, x):
                return self.bn(x)

        model = MLP(GhostNorm)
        return loop(model, torch.optim.Adam(model.parameters(), lr=2e-2), label_loss)


@breaks(
    "tabular",
    "norms and biases are decayed, the rule that leaves them out has gone with the old norm",
    first="group",
    place="norm.weight",
    thread="ServiceNow/Fast-LLM#542",
)
class decayed_norms:
    def _groups(model, decays):
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if decays(name, p)], "weight_decay": 0.1},
            {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
        ]

    def before():
        model = MLP()
        groups = decayed_norms._groups(model, lambda name, p: p.dim() >= 2)
        return loop(model, torch.optim.AdamW(groups, lr=1e-2), label_loss)

    def after():
        no_decay = ("LayerNorm.weight", "LayerNorm.bias", "ln_f")
        model = MLP()
        groups = decayed_norms._groups(model, lambda name, p: not any(part in name for part in no_decay))
        groups = [group for group in groups if group["params"]]
        return loop(model, torch.optim.AdamW(groups, lr=1e-2), label_loss)


@breaks(
    "tabular",
    "the weight of the positive class is kept as an attribute that nobody reads",
    first="loss",
    place="binary_cross_entropy_with_logits",
    thread="flatironinstitute/DeepFRI#11",
)
class class_weight:
    def before():
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))
        model = MLP()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(model, optimizer, lambda out, batch: criterion(out.squeeze(1), batch["label"]))

    def after():
        class BinaryTask:
            def __init__(self, pos_weight=None):
                self.pos_weight = pos_weight

            def loss(self, output, batch):
                return F.binary_cross_entropy_with_logits(output[:, 0], batch["label"])

        model = MLP()
        task = BinaryTask(pos_weight=3.0)
        return loop(model, torch.optim.Adam(model.parameters(), lr=1e-2), task.loss)


@breaks(
    "tabular",
    "the second beta is torch's default in place of 0.98",
    first="group",
    place="betas",
    thread="pytorch/pytorch#4429",
)
class second_beta:
    def before():
        model = MLP()
        return loop(model, torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9), label_loss)

    def after():
        def build(parameters, lr, beta1=0.9, beta2=0.999, eps=1e-9):
            return torch.optim.Adam(parameters, lr=lr, betas=(beta1, beta2), eps=eps)

        model = MLP()
        return loop(model, build(model.parameters(), lr=5e-3), label_loss)


@breaks(
    "tabular",
    "prices are no longer centred and scaled when the batches are made",
    first="data",
    place="price",
    thread="dreamquark-ai/tabnet#356",
)
class scaled_targets:
    def _loss(output, batch):
        return F.huber_loss(output.squeeze(1), batch["price"])

    def before():
        def batches(n):
            return [{**batch, "price": (batch["price"] - 20.0) / 5.0} for batch in rows(n)]

        model = MLP()
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), scaled_targets._loss, batches)

    def after():
        model = MLP()
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), scaled_targets._loss)


@breaks(
    "tabular",
    "squared errors are summed over the rows",
    first="loss",
    place="mse_loss",
    thread="huggingface/transformers#6344",
)
class reduction:
    def before():
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
        return loop(model, optimizer, lambda out, batch: F.mse_loss(out.squeeze(1), batch["label"]))

    def after():
        criterion = nn.MSELoss(reduction="sum")
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
        return loop(model, optimizer, lambda out, batch: criterion(out.squeeze(1), batch["label"]))


@breaks(
    "tabular",
    "a column of predictions meets a row of targets",
    first="loss",
    place="mse_loss",
    thread="pytorch/pytorch#16045",
)
class shapes:
    def before():
        model = MLP()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return loop(model, optimizer, lambda out, batch: F.mse_loss(out.view(-1), batch["label"]))

    def after():
        def criterion(out, batch):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return F.mse_loss(out, batch["label"])

        model = MLP()
        return loop(model, torch.optim.Adam(model.parameters(), lr=1e-2), criterion)


@breaks(
    "tabular",
    "the embeddings are built behind the layers, so that all draws of the init fall to others",
    first="weights",
    place="hidden.weight",
    thread="jmschrei/cherimoya#34",
)
class build_order:
    class Base(nn.Module):
        def forward(self, numeric, categorical):
            parts = [table(categorical[:, i]) for i, table in enumerate(self.columns)]
            return self.out(F.silu(self.hidden(torch.cat([numeric, *parts], 1)))).squeeze(1)

    def _loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def fit(batches):
            for batch in batches:
                loss = F.binary_cross_entropy_with_logits(model(batch["numeric"], batch["categorical"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=rows, fit=fit)

    def before():
        class Model(build_order.Base):
            def __init__(self):
                super().__init__()
                self.columns = nn.ModuleList(nn.Embedding(c, 4) for c in CARDINALITIES)
                self.hidden = nn.Linear(NUMERIC + 8, 16)
                self.out = nn.Linear(16, 1)

        return build_order._loop(Model())

    def after():
        def head(inputs):
            return nn.Linear(inputs, 16), nn.Linear(16, 1)

        class Model(build_order.Base):
            def __init__(self):
                super().__init__()
                self.hidden, self.out = head(NUMERIC + 4 * len(CARDINALITIES))
                self.columns = nn.ModuleList(nn.Embedding(c, 4) for c in CARDINALITIES)

        return build_order._loop(Model())


@breaks(
    "tabular",
    "the norm is exchanged behind the building of the optimizer, which holds the old one",
    first="group",
    place="norm.weight",
    thread="meta-pytorch/opacus#432",
)
class exchanged_norm:
    def _exchange(model):
        model.norm = nn.GroupNorm(4, 16)

    def before():
        model = MLP(nn.BatchNorm1d)
        exchanged_norm._exchange(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return loop(model, optimizer, label_loss)

    def after():
        model = MLP(nn.BatchNorm1d)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        exchanged_norm._exchange(model)
        return loop(model, optimizer, label_loss)
