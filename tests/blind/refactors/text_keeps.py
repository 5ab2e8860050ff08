"""Language models."""

# ruff: noqa: N801, N805
from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

VOCAB, WIDTH, HEADS, LENGTH = 29, 16, 2, 12


def token_batches(n, rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (rows, LENGTH + 1), generator=generator) for _ in range(n)]


def padded_batches(n, rows=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n):
        ids = torch.randint(1, VOCAB, (rows, LENGTH), generator=generator)
        lengths = torch.randint(5, LENGTH + 1, (rows,), generator=generator)
        mask = torch.arange(LENGTH)[None] < lengths[:, None]
        ids = ids.masked_fill(~mask, 0)
        batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)})
    return batches


def train_lm(model, optimizer, batches):
    model.train()
    for tokens in batches:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def causal_attention(q, k, v):
    att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    return att.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def heads(x):
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
        return self.out(causal_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention=SelfAttention, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, attention=SelfAttention, dropout=0.0, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loop(model, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=token_batches,
        fit=lambda batches: train_lm(model, optimizer, batches),
    )


@keeps(
    "text",
    "the layers of a GPT get other names and a container for the trunk",
    thread="mosaicml/llm-foundry#1182",
    renamed={
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
)
class gpt_names:
    def before():
        return loop(GPT())

    def after():
        class GPTModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.transformer = nn.ModuleDict(
                    {
                        "wte": nn.Embedding(VOCAB, WIDTH),
                        "wpe": nn.Embedding(LENGTH, WIDTH),
                        "h": nn.ModuleList([Block(), Block()]),
                        "ln_f": nn.LayerNorm(WIDTH),
                    }
                )
                self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

            def forward(self, idx):
                pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
                x = self.transformer.wte(idx) + self.transformer.wpe(pos)
                for block in self.transformer.h:
                    x = block(x)
                return self.lm_head(self.transformer.ln_f(x))

        return loop(GPTModel())


class SplitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.out(causal_attention(q, k, v).transpose(1, 2).flatten(2))


@keeps(
    "text",
    "three projections become one that holds their rows one behind the other",
    thread="sanchit-gandhi/seq2seq-speech#14",
    renamed={
        f"blocks.{i}.attention.{name}_proj.{kind}": f"blocks.{i}.attention.qkv.{kind}"
        for i in range(2)
        for name in "qkv"
        for kind in ("weight", "bias")
    },
)
class projections:
    def before():
        return loop(GPT(SplitAttention))

    def after():
        class FusedAttention(nn.Module):
            def __init__(self):
                super().__init__()
                parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
                self.out = nn.Linear(WIDTH, WIDTH)
                self.qkv = nn.utils.skip_init(nn.Linear, WIDTH, 3 * WIDTH)
                self.qkv.load_state_dict(
                    {key: torch.cat([part.state_dict()[key] for part in parts]) for key in ("weight", "bias")}
                )

            def forward(self, x):
                q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
                return self.out(causal_attention(q, k, v).transpose(1, 2).flatten(2))

        return loop(GPT(FusedAttention))


@keeps(
    "text",
    "attention by torch's own function in place of the product, mask and softmax by hand",
    thread="facebookresearch/multimodal#538",
)
class attention_function:
    def before():
        return loop(GPT())

    def after():
        class Attention(SelfAttention):
            def forward(self, x):
                q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.out(y.transpose(1, 2).flatten(2))

        return loop(GPT(Attention))


@keeps(
    "text",
    "the blocks, which have dropout, are run under activation checkpointing",
    thread="huggingface/transformers#26917",
)
class block_memory:
    def before():
        return loop(GPT(dropout=0.2))

    def after():
        class CheckpointedGPT(GPT):
            gradient_checkpointing = True

            def forward(self, ids):
                x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
                for block in self.blocks:
                    if self.gradient_checkpointing and self.training:
                        x = checkpoint(block, x, use_reentrant=False)
                    else:
                        x = block(x)
                return self.head(self.norm(x))

        return loop(CheckpointedGPT(dropout=0.2))


@keeps(
    "text",
    "the tied output layer is a function of the embedding in place of a module that shares its weight",
    thread="ml-explore/mlx-lm#373",
)
class output_layer:
    def before():
        class TiedGPT(GPT):
            def __init__(self):
                super().__init__()
                nn.init.normal_(self.tokens.weight, std=0.02)
                self.head.weight = self.tokens.weight

        return loop(TiedGPT())

    def after():
        class SharedGPT(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens = nn.Embedding(VOCAB, WIDTH)
                self.positions = nn.Embedding(LENGTH, WIDTH)
                self.blocks = nn.ModuleList(Block() for _ in range(2))
                self.norm = nn.LayerNorm(WIDTH)
                nn.Linear(WIDTH, VOCAB, bias=False)
                nn.init.normal_(self.tokens.weight, std=0.02)

            def forward(self, ids):
                x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
                for block in self.blocks:
                    x = block(x)
                return F.linear(self.norm(x), self.tokens.weight)

        return loop(SharedGPT())


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.classifier = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        x, _ = self.rnn(self.embed(input_ids))
        return self.classifier(x)


@keeps(
    "text",
    "cross entropy with an ignored label becomes gathered log-probabilities, masked and divided by their count",
    thread="huggingface/transformers#35438",
)
class token_loss:
    def _loop(compute_loss):
        model = Tagger()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for batch in batches:
                logits = model(batch["input_ids"], batch["attention_mask"])
                loss = compute_loss(logits[:, :-1], batch["labels"][:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batches=padded_batches, fit=fit)

    def before():
        def compute_loss(logits, labels):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

        return token_loss._loop(compute_loss)

    def after():
        def compute_loss(logits, labels):
            keep = labels != -100
            logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -(logp * keep).sum() / keep.sum()

        return token_loss._loop(compute_loss)


def rotary_angles(length, size, base=10000.0):
    inverse = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    return torch.outer(torch.arange(length, dtype=torch.float32), inverse)


@keeps(
    "text",
    "rotary angles in a buffer, and the rotation in the interleaved layout in place of stacking the halves",
    thread="sgl-project/sglang-jax#1641",
)
class rotary:
    def before():
        class RotaryAttention(SelfAttention):
            def rotate(self, x):
                angles = rotary_angles(x.size(-2), x.size(-1))
                cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
                even, odd = x[..., ::2], x[..., 1::2]
                return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

            def forward(self, x):
                q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
                y = causal_attention(self.rotate(q), self.rotate(k), v)
                return self.out(y.transpose(1, 2).flatten(2))

        return loop(GPT(RotaryAttention))

    def after():
        class RotaryAttention(SelfAttention):
            def __init__(self):
                super().__init__()
                angles = rotary_angles(LENGTH, WIDTH // HEADS)
                sign = torch.tensor([-1.0, 1.0], dtype=torch.float32).repeat(WIDTH // HEADS // 2)
                self.register_buffer("cos", angles.cos().repeat_interleave(2, dim=-1), persistent=False)
                self.register_buffer("sin", angles.sin().repeat_interleave(2, dim=-1) * sign, persistent=False)

            def rotate(self, x):
                swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
                length = x.size(-2)
                return x * self.cos[:length] + swapped * self.sin[:length]

            def forward(self, x):
                q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
                y = causal_attention(self.rotate(q), self.rotate(k), v)
                return self.out(y.transpose(1, 2).flatten(2))

        return loop(GPT(RotaryAttention))


@dataclass
class LMBatch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


@keeps(
    "text",
    "batches are a dataclass in place of a dict, and the model returns an output object with its loss",
    thread="VectorInstitute/mmlearn#26",
)
class batch_object:
    def before():
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def fit(batches):
            for batch in batches:
                labels = batch.pop("labels")
                logits = model(**batch)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=padded_batches, fit=fit)

    def after():
        class TaggerForLM(Tagger):
            def forward(self, input_ids, attention_mask=None, labels=None):
                logits = super().forward(input_ids, attention_mask)
                loss = None
                if labels is not None:
                    loss = nn.CrossEntropyLoss()(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                return CausalLMOutput(loss=loss, logits=logits)

        model = TaggerForLM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def training_step(batch: LMBatch):
            output = model(batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()

        def fit(batches):
            for batch in batches:
                training_step(batch)

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=lambda n: [LMBatch(**batch) for batch in padded_batches(n)],
            fit=fit,
        )


@keeps(
    "text",
    "an encoder layer written by hand is replaced by torch's own, which holds its weights",
    thread="ComputationalPsychiatry/pyhgf#415",
    renamed={
        **{
            f"layer.{name}.{kind}": f"layer.self_attn.in_proj_{kind}"
            for name in ("query", "key", "value")
            for kind in ("weight", "bias")
        },
        "layer.dense": "layer.self_attn.out_proj",
        "layer.norm_a": "layer.norm1",
        "layer.up": "layer.linear1",
        "layer.down": "layer.linear2",
        "layer.norm_b": "layer.norm2",
    },
)
class encoder_layer:
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.dense = nn.Linear(WIDTH, WIDTH)
            self.norm_a = nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
            self.norm_b = nn.LayerNorm(WIDTH)

        def forward(self, x, mask):
            q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
            y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v).transpose(1, 2).flatten(2)
            x = self.norm_a(x + self.dense(y))
            return self.norm_b(x + self.down(F.relu(self.up(x))))

    class Encoder(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.pool = nn.Linear(WIDTH, 1)

        def forward(self, ids, mask):
            if isinstance(self.layer, nn.TransformerEncoderLayer):
                x = self.layer(self.embed(ids), src_key_padding_mask=~mask)
            else:
                x = self.layer(self.embed(ids), mask)
            return self.pool((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).squeeze(-1)

    def _loop(layer):
        model = encoder_layer.Encoder(layer)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for batch in batches:
                mask = batch["attention_mask"].bool()
                target = (batch["input_ids"] > VOCAB // 2).sum(1) / mask.sum(1)
                loss = F.mse_loss(model(batch["input_ids"], mask), target.to(model.pool.weight.dtype))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=padded_batches, fit=fit)

    def before():
        return encoder_layer._loop(encoder_layer.Layer())

    def after():
        old = encoder_layer.Layer().state_dict()
        with torch.random.fork_rng():
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        new = OrderedDict()
        for kind in ("weight", "bias"):
            new[f"self_attn.in_proj_{kind}"] = torch.cat([old[f"{name}.{kind}"] for name in ("query", "key", "value")])
            for source, target in {
                "dense": "self_attn.out_proj",
                "norm_a": "norm1",
                "norm_b": "norm2",
                "up": "linear1",
                "down": "linear2",
            }.items():
                new[f"{target}.{kind}"] = old[f"{source}.{kind}"]
        layer.load_state_dict(new)
        return encoder_layer._loop(layer)
