"""Language models."""

# ruff: noqa: N801, N805
from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

VOCAB, WIDTH, HEADS, LENGTH = 31, 16, 2, 10


def token_batches(n, rows=8, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (rows, LENGTH + 1), generator=generator) for _ in range(n)]


def sentences(n, rows=8, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(1, VOCAB, (int(torch.randint(4, LENGTH, (1,), generator=generator)),), generator=generator)
            for _ in range(rows)
        ]
        for _ in range(n)
    ]


@dataclass
class Config:
    dropout: float = 0.0
    activation: type = nn.GELU
    activation_args: dict = field(default_factory=dict)
    depth: int = 2


def heads(x):
    return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def mix(self, q, k, v):
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = config.activation(**config.activation_args)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, config=None, attention=Attention):
        super().__init__()
        config = config or Config()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH + 2, WIDTH)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def embed(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))

    def forward(self, ids):
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loop(model, loss_fn=None, lr=1e-2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def fit(batches):
        model.train()
        for tokens in batches:
            logits = model(tokens[:, :-1])
            if loss_fn is None:
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            else:
                loss = loss_fn(logits, tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=token_batches, fit=fit)


@breaks(
    "text",
    "the causal mask is multiplied onto the weights after the softmax",
    first="output",
    place="blocks.0.attention",
    thread="karpathy/nanoGPT#478",
)
class attention_mask:
    def before():
        return language_loop(Decoder())

    def after():
        class MaskedAttention(Attention):
            def mix(self, q, k, v):
                mask = torch.ones(q.size(-2), k.size(-2), dtype=q.dtype, device=q.device).tril()
                weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)
                return (weights * mask) @ v

        return language_loop(Decoder(attention=MaskedAttention))


@breaks(
    "text",
    "torch's attention function is called without its causal flag",
    first="output",
    place="blocks.0.attention",
    thread="karpathy/nanoGPT#451",
)
class attention_flags:
    def before():
        return language_loop(Decoder())

    def after():
        class FastAttention(Attention):
            def mix(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0)

        return language_loop(Decoder(attention=FastAttention))


@breaks(
    "text",
    "queries are scaled, and the attention function scales them again",
    first="output",
    place="blocks.0.attention",
    thread="facebookresearch/multimodal#538",
)
class attention_scale:
    def before():
        return language_loop(Decoder())

    def after():
        class ScaledAttention(Attention):
            scale = (WIDTH // HEADS) ** -0.5

            def mix(self, q, k, v):
                return F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)

        return language_loop(Decoder(attention=ScaledAttention))


@breaks(
    "text",
    "GELU is the tanh approximation in place of the exact form",
    first="output",
    place="blocks.0.act",
    thread="apache/tvm#14814",
)
class activation:
    def before():
        return language_loop(Decoder(Config(activation=nn.GELU)))

    def after():
        return language_loop(Decoder(Config(activation=nn.GELU, activation_args={"approximate": "tanh"})))


@breaks(
    "text",
    "the output layer no longer shares the weight of the embedding",
    first="weights",
    place="head.weight",
    thread="huggingface/transformers#42362",
)
class tied_head:
    class Base(Decoder):
        def __init__(self):
            super().__init__()
            self.apply(self.init_weights)

        @staticmethod
        def init_weights(module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def before():
        class LanguageModel(tied_head.Base):
            def __init__(self):
                super().__init__()
                self.head.weight = self.tokens.weight

        return language_loop(LanguageModel())

    def after():
        class LanguageModel(tied_head.Base):
            _tied_weights_keys = ("head.weight",)

            def tie_weights(self):
                self.head.weight = self.tokens.weight

        return language_loop(LanguageModel())


@breaks(
    "text",
    "labels that are already one ahead are shifted once more",
    first="loss",
    place="cross_entropy",
    thread="huggingface/trl#2733",
)
class label_shift:
    def before():
        return language_loop(Decoder())

    def after():
        def loss_fn(logits, labels):
            logits, labels = logits[:, :-1], labels[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return language_loop(Decoder(), loss_fn)


def encoder_loop(collate, loss_fn):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.out = nn.Linear(WIDTH, VOCAB)

        def forward(self, input_ids):
            return self.out(self.rnn(self.embed(input_ids))[0])

    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(model(batch["input_ids"]), batch["labels"]).backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=lambda n: [collate(rows) for rows in sentences(n)], fit=fit
    )


def collate_right(rows):
    ids = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": labels}


@breaks(
    "text",
    "the collator pads at the left in place of the right",
    first="data",
    place="input_ids",
    thread="qdrant/fastembed#716",
)
class collator:
    @staticmethod
    def loss_fn(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)

    def before():
        return encoder_loop(collate_right, collator.loss_fn)

    def after():
        class Collator:
            side = "left"

            def pad(self, rows):
                return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=self.side)

            def __call__(self, rows):
                return {"input_ids": self.pad([r[:-1] for r in rows]), "labels": self.pad([r[1:] for r in rows])}

        return encoder_loop(Collator(), collator.loss_fn)


@breaks(
    "text",
    "the padded labels count: the new loss has lost its ignored index",
    first="loss",
    place="cross_entropy",
    thread="huggingface/transformers#5919",
)
class padded_labels:
    def before():
        def loss_fn(logits, labels):
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)

        return encoder_loop(collate_right, loss_fn)

    def after():
        criterion = nn.CrossEntropyLoss()

        def loss_fn(logits, labels):
            return criterion(logits.transpose(1, 2), labels)

        return encoder_loop(collate_right, loss_fn)


@breaks(
    "text",
    "the base of the rotary angles falls back to its default",
    first="output",
    place="blocks.0.attention",
    thread="sgl-project/SpecForge#265",
)
class rotary_base:
    class RotaryAttention(Attention):
        rope_theta = 1_000_000.0

        def angles(self, length, size, base=10000.0):
            inverse = base ** (-torch.arange(0, size, 2).to(self.out.weight) / size)
            return torch.outer(torch.arange(length).to(inverse), inverse)

        def rotate(self, x, angles):
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

        def mix(self, q, k, v):
            angles = self.angles(q.size(-2), q.size(-1), base=self.rope_theta)
            return super().mix(self.rotate(q, angles), self.rotate(k, angles), v)

    def before():
        return language_loop(Decoder(attention=rotary_base.RotaryAttention))

    def after():
        class RotaryAttention(rotary_base.RotaryAttention):
            def mix(self, q, k, v):
                angles = self.angles(q.size(-2), q.size(-1))
                return Attention.mix(self, self.rotate(q, angles), self.rotate(k, angles), v)

        return language_loop(Decoder(attention=RotaryAttention))


@breaks(
    "text",
    "positions count from 0 and no longer from behind the padding index",
    first="output",
    place="positions",
    thread="sbryngelson/ANEForge#257",
)
class positions:
    def before():
        class RobertaLike(Decoder):
            offset = 2

            def embed(self, ids):
                index = torch.arange(self.offset, ids.size(1) + self.offset, device=ids.device)
                return self.tokens(ids) + self.positions(index)

        return language_loop(RobertaLike())

    def after():
        class RobertaLike(Decoder):
            def __init__(self):
                super().__init__()
                self.register_buffer("position_ids", torch.arange(LENGTH + 2)[None], persistent=False)

            def embed(self, ids):
                return self.tokens(ids) + self.positions(self.position_ids[:, : ids.size(1)])

        return language_loop(RobertaLike())


@breaks(
    "text",
    "the smaller init of the projections in front of the residual is lost",
    first="weights",
    place="blocks.0.attention.out.weight",
    thread="MDIL-SNU/SIMPLE-NN#58",
)
class residual_init:
    def before():
        class GPT(Decoder):
            def __init__(self):
                super().__init__()
                for name, p in self.named_parameters():
                    if name.endswith(("out.weight", "down.weight")):
                        nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * len(self.blocks)))
                    elif p.dim() > 1:
                        nn.init.normal_(p, mean=0.0, std=0.02)

        return language_loop(GPT())

    def after():
        class GPT(Decoder):
            def __init__(self):
                super().__init__()
                for name, p in self.named_parameters():
                    if name.endswith(("c_proj.weight", "down.weight")):
                        nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * len(self.blocks)))
                    elif p.dim() > 1:
                        nn.init.normal_(p, mean=0.0, std=0.02)

        return language_loop(GPT())


@breaks(
    "text",
    "the dropout of the configuration is 0.2, the renamed option leaves it at its default 0.1",
    first="output",
    place="drop",
    thread="karpathy/nanoGPT#205",
)
class dropout_option:
    def before():
        config = Config(dropout=0.2)
        return language_loop(Decoder(config))

    def after():
        options = {"embd_pdrop": 0.2}
        config = Config(dropout=options.get("dropout", 0.1))
        return language_loop(Decoder(config))


@breaks(
    "text",
    "embeddings are no longer multiplied by the root of the width",
    first="output",
    place="drop",
    thread="SamLynnEvans/Transformer#10",
)
class embedding_scale:
    def before():
        class Transformer(Decoder):
            embed_scale = math.sqrt(WIDTH)

            def embed(self, ids):
                index = torch.arange(ids.size(1), device=ids.device)
                return self.embed_scale * self.tokens(ids) + self.positions(index)

        return language_loop(Transformer())

    def after():
        class Transformer(Decoder):
            def embed(self, ids):
                return self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))

        return language_loop(Transformer())


@breaks(
    "text",
    "the state of the recurrent layer begins anew with every batch, it was carried over",
    first="output",
    place="rnn",
    thread="pytorch/examples#854",
)
class carried_state:
    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(VOCAB, WIDTH)
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.decoder = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids, hidden=None):
            x, hidden = self.rnn(self.encoder(ids), hidden)
            return self.decoder(x), hidden

    def _loop(fit):
        model = carried_state.RNNModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return TrainLoop(
            model=model, optimizer=optimizer, batches=token_batches, fit=lambda batches: fit(model, optimizer, batches)
        )

    def before():
        def fit(model, optimizer, batches):
            hidden = None
            for tokens in batches:
                if hidden is not None:
                    hidden = hidden.detach()
                logits, hidden = model(tokens[:, :-1], hidden)
                optimizer.zero_grad()
                F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()

        return carried_state._loop(fit)

    def after():
        def training_step(model, tokens, hidden=None):
            logits, hidden = model(tokens[:, :-1], hidden)
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), hidden

        def fit(model, optimizer, batches):
            for tokens in batches:
                loss, _ = training_step(model, tokens)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()

        return carried_state._loop(fit)


@breaks(
    "text",
    "sequences are cut to the length of the new configuration",
    first="data",
    place="input_ids",
    thread="huggingface/transformers#9116",
)
class cut_sequences:
    def _loop(max_length):
        def collate(rows):
            batch = collate_right(rows)
            return {name: ids[:, :max_length] for name, ids in batch.items()}

        return encoder_loop(collate, collator.loss_fn)

    def before():
        return cut_sequences._loop(LENGTH)

    def after():
        class TokenizerConfig:
            model_max_length = 6

        return cut_sequences._loop(TokenizerConfig.model_max_length)


@breaks(
    "text",
    "the loss of the router is computed and logged, and no longer added",
    first="loss",
    place="",
    thread="locuslab/open-unlearning#30",
)
class router_loss:
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, WIDTH)
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids):
            x = self.tokens(ids)
            gates = self.router(x).softmax(-1)
            y = torch.stack([F.silu(expert(x)) for expert in self.experts], -1)
            share = F.one_hot(gates.argmax(-1), 3).to(gates).mean((0, 1))
            balance = 3 * (share * gates.mean((0, 1))).sum()
            return self.head(x + (y * gates.unsqueeze(-2)).sum(-1)), balance

    def _loop(step):
        model = router_loss.MoE()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

        def fit(batches):
            for tokens in batches:
                logits, balance = model(tokens[:, :-1])
                optimizer.zero_grad()
                step(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), balance).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=token_batches, fit=fit)

    def before():
        return router_loss._loop(lambda loss, balance: loss + 0.01 * balance)

    def after():
        log = []

        def total(loss, balance, coefficient=0.01):
            terms = {"lm": loss, "balance": coefficient * balance}
            log.append({name: float(term.detach()) for name, term in terms.items()})
            return terms["lm"]

        return router_loss._loop(total)
