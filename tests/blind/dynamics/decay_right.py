"""Weight decay as projects mean it, where a rule of thumb would object."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, channels=8, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.layers = nn.Sequential(BasicBlock(channels), BasicBlock(channels))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        return self.fc(self.layers(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


def image_loader(classes=5, batch_size=8):
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, classes, (64,)))
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def train_classifier(model, optimizer, batches, scheduler=None):
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@right("decay", "the classic ResNet recipe: SGD decays everything, biases and BatchNorm too", thread="torch/torch7#846")
def wide_resnet():
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )


class GCN(nn.Module):
    def __init__(self, features=20, hidden=16, classes=4):
        super().__init__()
        self.gc1 = nn.Linear(features, hidden)
        self.gc2 = nn.Linear(hidden, classes)

    def forward(self, x, adj):
        x = F.relu(adj @ self.gc1(x))
        return F.log_softmax(adj @ self.gc2(F.dropout(x, 0.5, self.training)), 1)


def graph():
    adj = (torch.rand(30, 30) < 0.15).float()
    adj = ((adj + adj.T) > 0).float() + torch.eye(30)
    degree = adj.sum(1).rsqrt()
    return torch.randn(30, 20), degree[:, None] * adj * degree[None], torch.randint(0, 4, (30,))


def train_graph(model, optimizer, batches, penalty=lambda: 0.0):
    model.train()
    for x, adj, y in batches:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adj)[:10], y[:10]) + penalty()
        loss.backward()
        optimizer.step()


@right(
    "decay",
    "Adam with an L2 penalty on the first convolution only, biases included, as the GCN paper has it",
    thread="pyg-team/pytorch_geometric#1468",
)
def gcn_on_citations():
    model = GCN()
    optimizer = torch.optim.Adam(
        [
            {"params": model.gc1.parameters(), "weight_decay": 5e-4},
            {"params": model.gc2.parameters(), "weight_decay": 0},
        ],
        lr=0.01,
    )
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=graph(),
        fit=lambda batches: train_graph(model, optimizer, batches),
        rows_interact=True,
    )


@right(
    "decay",
    "an explicit L2 term on the first layer in the loss, and no weight_decay in the optimizer",
    thread="spindro/AP-GCN#2",
)
def adaptive_propagation(reg=5e-3):
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=graph(),
        fit=lambda batches: train_graph(
            model, optimizer, batches, penalty=lambda: reg / 2 * model.gc1.weight.square().sum()
        ),
        rows_interact=True,
    )


class CharModel(nn.Module):
    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(10, width))
        self.norm = nn.LayerNorm(width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x):
        return self.head(self.mix(self.norm(self.embed(x) + self.position))[0])


def char_loader(vocab=30):
    text = torch.randint(0, vocab, (64, 11))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)


def train_chars(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


@right(
    "decay",
    "nanoGPT's rule by dimension: all tensors with two dimensions are decayed, embeddings and positions among them",
    thread="Lightning-AI/lit-llama#254",
)
def decay_by_dimension():
    model = CharModel()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=char_loader(),
        fit=lambda batches: train_chars(model, optimizer, batches),
    )


@right(
    "decay",
    "timm's factory: the decay stands in the groups, and the optimizer itself is given weight_decay=0",
    thread="guochengqian/PointNeXt#69",
)
def optimizer_factory(opt="adamw", weight_decay=1e-4):
    model = ResNet()
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    parameters = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]
    weight_decay = 0.0
    kinds = {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}
    optimizer = kinds[opt](parameters, lr=2e-3, weight_decay=weight_decay)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )


@right(
    "decay",
    "the filter for norms finds none that train, since all BatchNorms are frozen: its group is left out",
    thread="facebookresearch/detectron2#737",
)
def frozen_batchnorm_detector():
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    norms, rest = [], []
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                (norms if isinstance(module, nn.BatchNorm2d) else rest).append(p)
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": rest, "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD([g for g in groups if g["params"]], lr=0.02, momentum=0.9)

    def run(batches):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=run,
        frozen=("bn.", "layers.0.bn1.", "layers.0.bn2.", "layers.1.bn1.", "layers.1.bn2."),
    )


class DistilledViT(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.patch = nn.Linear(12, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.dist_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 8, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 5)
        self.head_dist = nn.Linear(width, 5)

    def forward(self, x):
        tokens = [self.cls_token.expand(len(x), -1, -1), self.dist_token.expand(len(x), -1, -1), self.patch(x)]
        x = self.block(torch.cat(tokens, 1) + self.pos_embed)
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


@right(
    "decay",
    "cls_token and pos_embed are spared and the distillation token is decayed: the authors say that it is meant",
    thread="facebookresearch/deit#60",
)
def distilled_vit():
    model = DistilledViT()
    skip = {"pos_embed", "cls_token"}
    groups = {0.0: [], 0.05: []}
    for name, p in model.named_parameters():
        groups[0.0 if p.ndim == 1 or name in skip else 0.05].append(p)
    optimizer = torch.optim.AdamW([{"params": ps, "weight_decay": wd} for wd, ps in groups.items()], lr=5e-4)
    data = TensorDataset(torch.randn(64, 6, 12), torch.randint(0, 5, (64,)))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )


@right(
    "decay",
    "one no_decay list for all architectures of the project: most of its entries match nothing here, and all biases "
    "and norms are spared",
    thread="huggingface/transformers#4832",
)
def shared_no_decay_list():
    model = CharModel()
    no_decay = ["bias", "LayerNorm.weight", "layer_norm.weight", "layernorm", "ln_f.weight", "norm.weight", "rms_norm"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=char_loader(),
        fit=lambda batches: train_chars(model, optimizer, batches),
    )


class NeuMF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(50, 8)
        self.item = nn.Embedding(80, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        return self.mlp(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


@right(
    "decay",
    "l2_regularization of the config is Adam's weight_decay, an L2 penalty of 1e-7 on everything as the paper tunes it",
    thread="yihong-chen/neural-collaborative-filtering#14",
)
def neural_matrix_factorization():
    config = {"adam_lr": 1e-3, "l2_regularization": 1e-7}
    model = NeuMF()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["adam_lr"], weight_decay=config["l2_regularization"])
    criterion = nn.BCEWithLogitsLoss()

    def train_an_epoch(batches):
        model.train()
        for user, item, rating in batches:
            optimizer.zero_grad()
            criterion(model(user, item), rating).backward()
            optimizer.step()

    data = TensorDataset(torch.randint(0, 50, (96,)), torch.randint(0, 80, (96,)), torch.randint(0, 2, (96,)).float())
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=16, shuffle=True), fit=train_an_epoch
    )


@right(
    "decay",
    "each layer's weight has a decay of its own, the first none, as the reference training has; biases go to plain SGD",
    thread="aiqm/torchani#279",
)
def atomic_network():
    net = nn.Sequential(
        nn.Linear(24, 32),
        nn.CELU(0.1),
        nn.Linear(32, 24),
        nn.CELU(0.1),
        nn.Linear(24, 16),
        nn.CELU(0.1),
        nn.Linear(16, 1),
    )
    weights = torch.optim.AdamW(
        [
            {"params": [net[0].weight], "weight_decay": 0},
            {"params": [net[2].weight], "weight_decay": 1e-5},
            {"params": [net[4].weight], "weight_decay": 1e-6},
            {"params": [net[6].weight], "weight_decay": 0},
        ],
        lr=1e-3,
    )
    biases = torch.optim.SGD([net[i].bias for i in (0, 2, 4, 6)], lr=1e-3)

    def train(batches):
        for aev, energy in batches:
            loss = F.mse_loss(net(aev).squeeze(1), energy)
            weights.zero_grad()
            biases.zero_grad()
            loss.backward()
            weights.step()
            biases.step()

    x = torch.rand(64, 24)
    return TrainLoop(
        model=net,
        optimizer=[weights, biases],
        batches=DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=16, shuffle=True),
        fit=train,
    )


@right(
    "decay",
    "reg_loss is reported and always 0: the regularization is the optimizer's weight_decay, which bypasses the loss",
    thread="allenai/allennlp#4436",
)
def applicator_without_terms():
    model = NeuMF()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def terms(model, batch):
        user, item, rating = batch
        return {"loss": F.binary_cross_entropy_with_logits(model(user, item), rating), "reg_loss": torch.tensor(0.0)}

    def train(batches):
        for batch in batches:
            outputs = terms(model, batch)
            optimizer.zero_grad()
            (outputs["loss"] + outputs["reg_loss"]).backward()
            optimizer.step()

    data = TensorDataset(torch.randint(0, 50, (96,)), torch.randint(0, 80, (96,)), torch.randint(0, 2, (96,)).float())
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=16, shuffle=True), fit=train, parts=terms
    )


@right(
    "decay",
    "decoupled decay written out by hand beside Adam, which itself has weight_decay=0",
    thread="pytorch/pytorch#4429",
)
def decay_by_hand():
    model = CharModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    decayed = [p for p in model.parameters() if p.dim() > 1]

    def train(batches):
        for x, y in batches:
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            with torch.no_grad():
                torch._foreach_mul_(decayed, 1 - optimizer.param_groups[0]["lr"] * 0.1)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=char_loader(), fit=train)


class SparseTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 16, sparse=True)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))

    def forward(self, x):
        return self.body(self.embed(x).mean(1))


@right(
    "decay",
    "rare input embeddings are kept out of the decay: they have SparseAdam, the rest AdamW",
    thread="pytorch/torchtitan#2599",
)
def sparse_embeddings():
    model = SparseTagger()
    optimizers = [
        torch.optim.SparseAdam(list(model.embed.parameters()), lr=1e-2),
        torch.optim.AdamW(model.body.parameters(), lr=1e-3, weight_decay=0.1),
    ]

    def train(batches):
        for x, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    data = TensorDataset(torch.randint(0, 200, (64, 5)), torch.randint(0, 6, (64,)))
    return TrainLoop(model=model, optimizer=optimizers, batches=DataLoader(data, batch_size=16), fit=train)


@right(
    "decay",
    "depthwise filters and BatchNorm have no decay, as the MobileNet paper asks; pointwise ones have",
    thread="JiahuiYu/slimmable_networks#15",
)
def depthwise_without_decay():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 3, groups=16, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    params = []
    for p in model.parameters():
        depthwise = p.dim() == 4 and p.shape[1] == 1
        params.append(
            {"params": p, "weight_decay": 4e-5 if p.dim() > 1 and not depthwise else 0, "lr": 0.05, "momentum": 0.9}
        )
    optimizer = torch.optim.SGD(params, lr=0.05)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )


@right(
    "decay",
    "apply_weight_decay_to_all is a switch of the config, and here it is on: AdamW decays norms and biases on purpose",
    thread="autrainer/autrainer#166",
)
def decay_on_everything(apply_weight_decay_to_all=True):
    model = ResNet()
    if apply_weight_decay_to_all:
        params = model.parameters()
    else:
        params = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )


@right(
    "decay",
    "no decay at all: AdamW with weight_decay=0.0 for a short finetuning, the Hugging Face default",
    thread="huggingface/transformers#5938",
)
def finetune_without_decay():
    model = CharModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=char_loader(),
        fit=lambda batches: train_chars(model, optimizer, batches),
    )


class MaskedHead(nn.Module):
    """Returns a loss when it is given labels, as the library's models do."""

    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, input_ids, labels=None):
        x = self.LayerNorm(self.embeddings(input_ids))
        logits = self.decoder(self.layer_norm(F.gelu(self.dense(x + x.mean(1, keepdim=True)))))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class TokenRows(torch.utils.data.Dataset):
    def __init__(self, rows=64):
        self.tokens = torch.randint(0, 30, (rows, 8))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].roll(1)}


def training_arguments(**kwargs):
    import tempfile

    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **kwargs,
    )


@right(
    "decay",
    "the Hugging Face Trainer's own groups: matrices and embeddings are decayed, norms are found by class and name",
    thread="huggingface/transformers#35927",
)
def trainer_with_its_own_groups():
    from transformers import Trainer

    from pytest_trainloop.adapters import from_trainer

    trainer = Trainer(model=MaskedHead(), args=training_arguments(weight_decay=0.1), train_dataset=TokenRows())
    return from_trainer(trainer)


@right(
    "decay",
    "ultralytics' three groups: weights with decay 5e-4, norms' weights and biases without, in one SGD",
    thread="ultralytics/ultralytics#19064",
)
def three_groups():
    model = ResNet()
    groups = [], [], []
    norms = tuple(v for k, v in nn.__dict__.items() if "Norm" in k and isinstance(v, type))
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if name == "bias":
                groups[2].append(param)
            elif isinstance(module, norms):
                groups[1].append(param)
            else:
                groups[0].append(param)
    optimizer = torch.optim.SGD(groups[2], lr=0.02, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": groups[0], "weight_decay": 5e-4})
    optimizer.add_param_group({"params": groups[1], "weight_decay": 0.0})
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=image_loader(),
        fit=lambda batches: train_classifier(model, optimizer, batches),
    )
