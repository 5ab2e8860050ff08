"""Tables: embeddings, residual networks, recommendation."""

# ruff: noqa: N801, N805
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

NUMERIC, CARDINALITIES, WIDTH = 5, (4, 6, 3), 8


def rows(n, size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "numeric": torch.randn(size, NUMERIC, generator=generator),
            "categorical": torch.stack(
                [torch.randint(0, c, (size,), generator=generator) for c in CARDINALITIES], dim=1
            ),
            "target": (torch.rand(size, generator=generator) < 0.4).float(),
        }
        for _ in range(n)
    ]


def numeric_loop(model, optimizer, loss_fn=F.binary_cross_entropy_with_logits):
    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model(batch["numeric"]).squeeze(-1), batch["target"]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=rows, fit=fit)


class ResidualBlock(nn.Module):
    def __init__(self, width=WIDTH, p=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lin1, self.lin2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.lin2(self.drop(F.relu(self.lin1(self.norm(x)))))


class ResNet(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.first = nn.Linear(NUMERIC, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@keeps("tabular", "SGD with momentum is written by hand", thread="workofart/ml-by-hand#42")
class sgd_by_hand:
    def before():
        model = ResNet()
        return numeric_loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3))

    def after():
        class Momentum(torch.optim.Optimizer):
            def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
                super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is None:
                            continue
                        direction = p.grad + group["weight_decay"] * p
                        velocity = self.state[p].get("momentum_buffer")
                        velocity = direction if velocity is None else group["momentum"] * velocity + direction
                        self.state[p]["momentum_buffer"] = velocity.clone()
                        p -= group["lr"] * velocity

        model = ResNet()
        return numeric_loop(model, Momentum(model.parameters(), lr=0.1, weight_decay=1e-3))


@keeps(
    "tabular",
    "the groups of AdamW come in another order, the decayed ones in two pieces",
    thread="VectorInstitute/mmlearn#2",
)
class group_order:
    def before():
        model = ResNet()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return numeric_loop(model, torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.98)))

    def after():
        model = ResNet()
        plain, trunk, head = [], [], []
        for name, p in reversed(list(model.named_parameters())):
            if name.endswith("bias") or "norm" in name or name == "head.0.weight":
                plain.append(p)
            elif name.startswith("head"):
                head.append(p)
            else:
                trunk.append(p)
        options = {"lr": 5e-3, "betas": (0.9, 0.98)}
        optimizer = torch.optim.AdamW(
            [
                {"params": plain, "weight_decay": 0.0, **options},
                {"params": head, "weight_decay": 0.05, **options},
                {"params": trunk, "weight_decay": 0.05, **options},
            ]
        )
        return numeric_loop(model, optimizer)


@keeps(
    "tabular",
    "norms, activations and dropout are modules in place of functions with parameters of the model",
    thread="cellarium-ai/cellarium-ml#251",
    renamed={"weight": "norm.weight", "bias": "norm.bias", "w1": "net.0.weight", "b1": "net.0.bias", "out": "net.3"},
)
class functions_to_modules:
    def before():
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                layer = nn.Linear(NUMERIC, 16)
                self.w1, self.b1 = layer.weight, layer.bias
                self.weight, self.bias = nn.Parameter(torch.ones(NUMERIC)), nn.Parameter(torch.zeros(NUMERIC))
                self.out = nn.Linear(16, 1)

            def forward(self, x):
                x = F.layer_norm(x, (NUMERIC,), self.weight, self.bias, eps=1e-5)
                x = F.gelu(F.linear(x, self.w1, self.b1))
                return self.out(F.dropout(x, 0.25, training=self.training))

        model = Net()
        return numeric_loop(model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def after():
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(NUMERIC)
                self.net = nn.Sequential(nn.Linear(NUMERIC, 16), nn.GELU(), nn.Dropout(p=0.25), nn.Linear(16, 1))

            def forward(self, x):
                return self.net(self.norm(x))

        model = Net()
        return numeric_loop(model, torch.optim.Adam(model.parameters(), lr=1e-2))


@keeps(
    "tabular",
    "embeddings are held by the names of their columns, and registered behind the layers that they were built before",
    thread="jmschrei/cherimoya#34",
    renamed={f"embeddings.{i}": f"columns.{name}" for i, name in enumerate(("city", "browser", "plan"))},
)
class column_names:
    def _loop(model):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                logits = model(batch["numeric"], batch["categorical"])
                F.binary_cross_entropy_with_logits(logits, batch["target"]).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=rows, fit=fit)

    def before():
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embeddings = nn.ModuleList([nn.Embedding(c, 4) for c in CARDINALITIES])
                self.hidden = nn.Linear(NUMERIC + 12, 16)
                self.out = nn.Linear(16, 1)

            def forward(self, numeric, categorical):
                parts = [e(categorical[:, i]) for i, e in enumerate(self.embeddings)]
                return self.out(F.relu(self.hidden(torch.cat([numeric, *parts], 1)))).squeeze(1)

        return column_names._loop(Model())

    def after():
        class Model(nn.Module):
            names = ("city", "browser", "plan")

            def __init__(self):
                super().__init__()
                sizes = dict(zip(self.names, CARDINALITIES, strict=True))
                columns = {name: nn.Embedding(size, 4) for name, size in sizes.items()}
                hidden = nn.Linear(NUMERIC + 4 * len(columns), 16)
                self.out = nn.Linear(16, 1)
                self.hidden = hidden
                self.columns = nn.ModuleDict(reversed(columns.items()))

            def forward(self, numeric, categorical):
                x = torch.cat([numeric] + [self.columns[n](categorical[:, i]) for i, n in enumerate(self.names)], -1)
                return self.out(self.hidden(x).relu())[:, 0]

        return column_names._loop(Model())


@keeps(
    "tabular",
    "the binary cross entropy is written with softplus, weighted and divided by hand",
    thread="pytorch/pytorch#63122",
)
class binary_loss:
    def before():
        model = ResNet()
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1.5))
        return numeric_loop(model, torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5), criterion)

    def after():
        def criterion(logits, target, positive=1.5):
            losses = positive * target * F.softplus(-logits) + (1 - target) * F.softplus(logits)
            return losses.sum() / target.numel()

        model = ResNet()
        return numeric_loop(model, torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5), criterion)


@keeps(
    "tabular",
    "products of all pairs of features are one einsum, of which the upper triangle is taken",
    thread="facebookresearch/dlrm#183",
    renamed={"bottom": "towers.dense", "tables": "towers.sparse", "top": "predictor"},
)
class pair_products:
    def _fit(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

        def fit(batches):
            for batch in batches:
                loss = F.mse_loss(model(batch), batch["target"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=rows, fit=fit)

    def before():
        class DLRM(nn.Module):
            def __init__(self):
                super().__init__()
                self.bottom = nn.Linear(NUMERIC, WIDTH)
                self.tables = nn.ModuleList(nn.Embedding(c, WIDTH) for c in CARDINALITIES)
                self.top = nn.Linear(WIDTH + 6, 1)

            def forward(self, batch):
                x = F.relu(self.bottom(batch["numeric"]))
                vectors = [x] + [t(batch["categorical"][:, i]) for i, t in enumerate(self.tables)]
                pairs = [(a * b).sum(1) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
                return self.top(torch.cat([x, torch.stack(pairs, 1)], 1)).squeeze(1)

        return pair_products._fit(DLRM())

    def after():
        class Towers(nn.Module):
            def __init__(self):
                super().__init__()
                self.dense = nn.Linear(NUMERIC, WIDTH)
                self.sparse = nn.ModuleList(nn.Embedding(c, WIDTH) for c in CARDINALITIES)

            def forward(self, numeric, categorical):
                columns = categorical.unbind(1)
                sparse = [table(column) for table, column in zip(self.sparse, columns, strict=True)]
                return torch.stack([self.dense(numeric).clamp(min=0), *sparse], dim=1)

        class DLRM(nn.Module):
            def __init__(self):
                super().__init__()
                self.towers = Towers()
                self.predictor = nn.Linear(WIDTH + 6, 1)

            def forward(self, batch):
                v = self.towers(batch["numeric"], batch["categorical"])
                i, j = torch.triu_indices(v.size(1), v.size(1), offset=1)
                products = torch.einsum("bif,bjf->bij", v, v)[:, i, j]
                return self.predictor(torch.cat([v[:, 0], products], dim=-1)).flatten()

        return pair_products._fit(DLRM())
