"""Weight decay that lands where it is not meant to, or nowhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocab=40, width=32, context=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width), Block(width)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx):
        steps = idx.shape[1]
        mask = torch.full((steps, steps), float("-inf")).triu(1)
        x = self.wte(idx) + self.wpe(torch.arange(steps))
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


def text_loader(batch_size=8):
    tokens = torch.randint(0, 40, (64, 13))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size, shuffle=True)


def train_lm(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@fault(
    "decay",
    "'LayerNorm.weight' and 'LayerNorm.bias' of no_decay match no parameter: the norms are called ln_1, ln_2 and ln_f, "
    "and their weights are decayed",
    thread="karpathy/minGPT#23",
    check="weight_decay_groups",
)
def gpt_from_scratch():
    model = TinyGPT()
    no_decay = ["bias", "LayerNorm.weight", "LayerNorm.bias"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=text_loader(),
        fit=lambda batches: train_lm(model, optimizer, batches),
    )


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.word_embeddings = nn.Embedding(50, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.output = nn.Module()
        self.output.LayerNorm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 3)

    def forward(self, input_ids):
        x = self.LayerNorm(self.word_embeddings(input_ids))
        x = self.output.LayerNorm(x + F.gelu(self.dense(x)))
        return self.classifier(x.mean(1))


class AdamWeightDecay:
    """Builds the groups from lists of patterns."""

    def __init__(self, rate, exclude_from_weight_decay):
        self.rate = rate
        self.exclude = exclude_from_weight_decay

    def use_weight_decay(self, name):
        return all(re.match(pattern, name) is None for pattern in self.exclude)

    def build(self, model, lr):
        decayed, rest = [], []
        for name, param in model.named_parameters():
            (decayed if self.use_weight_decay(name) else rest).append(param)
        groups = [{"params": decayed, "weight_decay": self.rate}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


@fault(
    "decay",
    "re.match looks at the start of a name only: 'bias$' excludes nothing, 'LayerNorm.weight$' not the norm in output, "
    "and these are decayed at 0.01 with everything else",
    thread="huggingface/transformers#4360",
    check="weight_decay_groups",
)
def classify_sentences():
    model = Encoder()
    optimizer = AdamWeightDecay(0.01, exclude_from_weight_decay=["LayerNorm.weight$", "bias$"]).build(model, lr=5e-4)
    data = TensorDataset(torch.randint(0, 50, (64, 10)), torch.randint(0, 3, (64,)))

    def train(batches):
        for input_ids, labels in batches:
            loss = F.cross_entropy(model(input_ids), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train)


@fault(
    "decay",
    "the groups say weight_decay_rate, which torch's AdamW does not read: both are decayed at its default 0.01",
    thread="huggingface/transformers#525",
    check="weight_decay_groups",
)
def finetune_lm():
    model = Encoder()
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
    grouped = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay_rate": 0.05},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay_rate": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=3e-4)

    def train(batches):
        model.train()
        for batch in batches:
            loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def batches(n):
        return [{"input_ids": torch.randint(0, 50, (8, 10)), "labels": torch.randint(0, 3, (8,))} for _ in range(n)]

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=train)


@dataclass
class GPTConfig:
    learning_rate: float = 6e-4
    weight_decay: float = 1e-1
    betas: tuple[float, float] = (0.9, 0.95)


@fault(
    "decay",
    "torch.optim.Adam adds weight_decay=0.1 to the gradient, where its second moment divides it out again; decoupled "
    "decay (AdamW) is meant",
    thread="pytorch/pytorch#48793",
    check="weight_decay_groups",
)
def pretrain_small_gpt():
    config = GPTConfig()
    model = TinyGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=config.learning_rate, betas=config.betas)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=text_loader(),
        fit=lambda batches: train_lm(model, optimizer, batches),
    )


class Reasoner(nn.Module):
    def __init__(self, users=40, items=60, width=16):
        super().__init__()
        self.uid_embeddings = nn.Embedding(users, width)
        self.iid_embeddings = nn.Embedding(items, width)
        self.and_layer = nn.Linear(2 * width, width)
        self.and_out = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def l2(self):
        return sum((p**2).sum() for p in self.parameters())

    def forward(self, users, items):
        pair = torch.cat([self.uid_embeddings(users), self.iid_embeddings(items)], 1)
        return self.score(torch.relu(self.and_out(torch.relu(self.and_layer(pair))))).squeeze(1)


class BaseRunner:
    def __init__(self, model, lr=0.05, l2_weight=1e-4):
        self.model = model
        self.l2_weight = l2_weight
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=l2_weight)

    def fit(self, batches):
        self.model.train()
        for users, items, labels in batches:
            self.optimizer.zero_grad()
            prediction = self.model(users, items)
            loss = F.binary_cross_entropy_with_logits(prediction, labels) + self.model.l2() * self.l2_weight
            loss.backward()
            self.optimizer.step()


@fault(
    "decay",
    "every parameter is decayed twice: weight_decay in SGD, and model.l2() * l2_weight in the loss",
    thread="rutgerswiselab/NCR#2",
    check="weight_decay_groups",
)
def collaborative_reasoning():
    model = Reasoner()
    runner = BaseRunner(model)
    data = TensorDataset(torch.randint(0, 40, (96,)), torch.randint(0, 60, (96,)), torch.randint(0, 2, (96,)).float())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    return TrainLoop(model=model, optimizer=runner.optimizer, batches=loader, fit=runner.fit)


class ViT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patch_embed = nn.Linear(16, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 10, width) * 0.02)
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def no_weight_decay(self):
        return {"pos_embed", "cls_token"}

    def forward(self, images):
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.block(x))[:, 0])


class Wrapped(nn.Module):
    """Stands where a distributed wrapper does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def create_optimizer(model, lr=5e-4, weight_decay=0.05):
    skip = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if param.ndim == 1 or name.endswith(".bias") or name in skip:
            no_decay.append(param)
        else:
            decay.append(param)
    return torch.optim.AdamW(
        [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}], lr=lr
    )


@fault(
    "decay",
    "the optimizer is made from the wrapper, which has no no_weight_decay(): pos_embed and cls_token are decayed",
    thread="facebookresearch/deit#39",
    check="weight_decay_groups",
)
def train_vit():
    model_without_ddp = ViT()
    model = Wrapped(model_without_ddp)
    optimizer = create_optimizer(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def train_one_epoch(batches):
        model.train()
        for samples, targets in batches:
            loss = criterion(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    data = TensorDataset(torch.randn(64, 9, 16), torch.randint(0, 5, (64,)))
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train_one_epoch
    )


class ChannelNorm(nn.Module):
    """Normalizes each channel of each image."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        mean = x.mean((2, 3), keepdim=True)
        std = x.std((2, 3), keepdim=True)
        return (x - mean) / (std + 1e-5) * self.weight + self.bias


def get_default_optimizer_params(model, base_lr, weight_decay, weight_decay_norm):
    norm_module_types = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm)
    params = []
    for module in model.modules():
        for value in module.parameters(recurse=False):
            decay = weight_decay_norm if isinstance(module, norm_module_types) else weight_decay
            params.append({"params": [value], "lr": base_lr, "weight_decay": decay})
    return params


@fault(
    "decay",
    "weight_decay_norm=0 reaches no parameter: the net's norms are of a class of its own, which norm_module_types does "
    "not list",
    thread="facebookresearch/detectron2#737",
    check="weight_decay_groups",
)
def detector_backbone():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        ChannelNorm(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        ChannelNorm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    params = get_default_optimizer_params(model, base_lr=0.02, weight_decay=1e-3, weight_decay_norm=0.0)
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)

    def run(batches):
        for data in batches:
            losses = {"loss_cls": F.cross_entropy(model(data["image"]), data["label"])}
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()

    def batches(n):
        return [{"image": torch.randn(6, 3, 12, 12), "label": torch.randint(0, 4, (6,))} for _ in range(n)]

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=run)


def init_group_params(params, weight_decay):
    decay_params, no_decay_params = [], []
    for name, param in params:
        if len(param.shape) > 1 and not name.endswith("bias"):
            decay_params.append(param)
        else:
            no_decay_params.append(param)
    return [{"params": decay_params, "weight_decay": weight_decay}, {"params": no_decay_params}]


@fault(
    "decay",
    "the group of biases and norms names no weight_decay, so it gets the optimizer's weight_decay=0.05 like the other",
    thread="mindspore-lab/mindcv#752",
    check="weight_decay_groups",
)
def convnet_with_filtered_decay(filter_bias_and_bn=True):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    weight_decay = 0.05
    params = init_group_params(model.named_parameters(), weight_decay) if filter_bias_and_bn else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=weight_decay)

    def train(batches):
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    data = TensorDataset(torch.randn(64, 1, 14, 14), torch.randint(0, 10, (64,)))
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8, shuffle=True), fit=train)


class Args(dict):
    __getattr__ = dict.get


@fault(
    "decay",
    "the decay is lost on its way: the arguments say wd, the optimizer reads args.weight_decay, finds none, and both "
    "groups of the split have decay 0",
    thread="HomebrewML/HeavyBall#71",
    check="weight_decay_groups",
)
def benchmark_transformer():
    args = Args(lr=1e-3, wd=0.1, beta2=0.95)
    model = TinyGPT()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay or 0.0}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, args.beta2),
    )
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=text_loader(),
        fit=lambda batches: train_lm(model, optimizer, batches),
    )


class KernelLayer(nn.Module):
    """A fused layer with parameters of its own names."""

    def __init__(self, width=32):
        super().__init__()
        self.attn_qkvw = nn.Parameter(torch.randn(3 * width, width) * 0.02)
        self.attn_qkvb = nn.Parameter(torch.zeros(3 * width))
        self.attn_ow = nn.Parameter(torch.randn(width, width) * 0.02)
        self.attn_ob = nn.Parameter(torch.zeros(width))
        self.attn_nw = nn.Parameter(torch.ones(width))
        self.attn_nb = nn.Parameter(torch.zeros(width))
        self.inter_w = nn.Parameter(torch.randn(width, width) * 0.02)
        self.inter_b = nn.Parameter(torch.zeros(width))
        self.norm_w = nn.Parameter(torch.ones(width))
        self.norm_b = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:], self.attn_nw, self.attn_nb)
        q, k, v = F.linear(y, self.attn_qkvw, self.attn_qkvb).chunk(3, -1)
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v), self.attn_ow, self.attn_ob)
        return x + F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], self.norm_w, self.norm_b), self.inter_w, self.inter_b))


@fault(
    "decay",
    "the fused layer's biases and norms end in _b, _nw and qkvb: the no_decay list of 'bias' and 'LayerNorm' finds the "
    "head's bias only, and the rest is decayed",
    thread="deepspeedai/DeepSpeedExamples#75",
    check="weight_decay_groups",
)
def fused_kernel_model():
    model = nn.Sequential(nn.Embedding(50, 32), KernelLayer(), KernelLayer(), nn.Linear(32, 50))
    no_decay = ("bias", "LayerNorm.bias", "LayerNorm.weight")
    decayed = [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)]
    rest = [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )

    def pretrain(batches):
        for tokens, labels in batches:
            loss = F.cross_entropy(model(tokens).transpose(1, 2), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    data = TensorDataset(torch.randint(0, 50, (64, 8)), torch.randint(0, 50, (64, 8)))
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8), fit=pretrain)


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


@fault(
    "decay",
    "the no_decay names of create_optimizer know 'LayerNorm.weight', and the head's norm is called layer_norm: its "
    "weight is decayed",
    thread="huggingface/transformers#16908",
    check="weight_decay_groups",
)
def masked_language_model():
    from transformers import Trainer

    from pytest_trainloop.adapters import from_trainer

    class GroupedTrainer(Trainer):
        def create_optimizer(self, model=None):
            no_decay = ["bias", "LayerNorm.weight"]
            named = list(self.model.named_parameters())
            groups = [
                {
                    "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                    "weight_decay": self.args.weight_decay,
                },
                {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    trainer = GroupedTrainer(model=MaskedHead(), args=training_arguments(weight_decay=0.1), train_dataset=TokenRows())
    return from_trainer(trainer)
