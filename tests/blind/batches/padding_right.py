"""Right loops about padding that look odd."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import right

VOCAB = 30


def sentences(n=40, low=3, high=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (n,), generator=generator)
    return [torch.randint(3, VOCAB, (int(length),), generator=generator) for length in lengths]


def labelled(classes, **keywords):
    return [(text, int(text.sum()) % classes) for text in sentences(**keywords)]


def pad(rows, value=0):
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def collate_labelled(items):
    ids = pad(text for text, _ in items)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([label for _, label in items])}


def supervised(model, optimizer):
    """The loop of most classifiers here: one dict a batch."""

    def fit(batches):
        model.train()
        for batch in batches:
            logits = model(batch["input_ids"], batch["attention_mask"])
            loss = F.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return fit


@right(
    "padding",
    "no padding mask at all: attention is causal and padding stands on the right, so no real token sees "
    "it; its labels are -100",
    thread="Alpha-VLLM/LLaMA2-Accessory#43",
)
def causal_without_mask():
    torch.manual_seed(0)

    class LLaMA(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
            self.qkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

        def forward(self, examples, labels):
            x = self.tok(examples) + self.pos(torch.arange(examples.shape[1]))
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            return F.cross_entropy(self.output(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = LLaMA()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(rows):
        return pad(rows), pad(rows, -100)

    def train(batches):
        for examples, labels in batches:
            optimizer.zero_grad()
            model(examples, labels).backward()
            optimizer.step()

    loader = DataLoader(sentences(), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=train, padding=Padding(pad_id=0, ignore_index=-100)
    )


@right(
    "padding",
    "padded queries attend to padded keys (seq_id equal): real tokens see real ones only, and only those are read",
    thread="Biohub/esm#299",
)
def protein_encoder():
    torch.manual_seed(0)

    class ESM(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, VOCAB)

        def forward(self, ids, seq_id):
            x = self.embed(ids)
            q, k, v = self.qkv(x).chunk(3, -1)
            same = seq_id.unsqueeze(-1) == seq_id.unsqueeze(-2)
            return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=same))

    model = ESM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def collate(rows):
        ids = pad(rows)
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[:, 1::3] = True
        masked &= ids.ne(0)
        return {"ids": ids.masked_fill(masked, 1), "seq_id": ids.ne(0), "labels": ids.masked_fill(~masked, -100)}

    def fit(batches):
        for batch in batches:
            logits = model(batch["ids"], batch["seq_id"])
            loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=1), batch_size=8, collate_fn=collate),
        fit=fit,
        padding=Padding(pad_id=0, ignore_index=-100),
    )


@right(
    "padding",
    "left padding with position ids counted from the first real token",
    thread="huggingface/transformers#33095",
)
def left_padded_with_positions():
    torch.manual_seed(0)

    class GPT(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
            self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
            self.head = nn.Linear(dim, VOCAB)

        def forward(self, ids, mask, position_ids):
            length = ids.shape[1]
            x = self.wte(ids) + self.wpe(position_ids)
            blocked = torch.ones(length, length, dtype=torch.bool).triu(1) | mask[:, None].eq(0)
            blocked &= ~torch.eye(length, dtype=torch.bool)
            return self.head(
                x + self.attention(x, x, x, attn_mask=blocked.repeat_interleave(2, 0), need_weights=False)[0]
            )

    def collate(rows):
        width = max(map(len, rows))
        ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])
        mask = ids.ne(0).long()
        return {"ids": ids, "mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits = model(**batch)[:, :-1]
            labels = batch["ids"][:, 1:].masked_fill(batch["mask"][:, :-1].eq(0) | batch["mask"][:, 1:].eq(0), -100)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=2), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "max pooling over time with padded states filled by -inf",
    thread="https://discuss.pytorch.org/t/cnn-padding-what-do-you-do-about-padding-w-a-cnn-for-text-classification/168181",
)
def max_pooled():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
            self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 3)

        def forward(self, ids, mask):
            states = self.up(self.embed(ids)).masked_fill(mask.unsqueeze(-1).eq(0), float("-inf"))
            return self.out(states.amax(1).relu())

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(labelled(3, seed=3), batch_size=8, collate_fn=collate_labelled)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=supervised(model, optimizer), ordered=False)


@right(
    "padding",
    "a Kim CNN whose convolutions see zero vectors of padding_idx at the end, of sentences padded to one fixed width",
    thread="https://escholarship.org/uc/item/7bc9c7jp",
)
def text_cnn():
    torch.manual_seed(0)

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
            self.convs = nn.ModuleList(nn.Conv1d(16, 8, size) for size in (2, 3, 4))
            self.fc = nn.Linear(24, 3)

        def forward(self, ids):
            x = self.embed(ids).transpose(1, 2)
            return self.fc(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1))

    model = TextCNN()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    data = labelled(3, seed=4)
    batches = []
    for i in range(0, 40, 8):
        ids = torch.stack([F.pad(text, (0, 12 - len(text))) for text, _ in data[i : i + 8]])
        batches.append((ids, torch.tensor([label for _, label in data[i : i + 8]])))

    def fit(batches):
        for ids, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


@right(
    "padding",
    "masked language modelling: labels are -100 at all but the chosen tokens, keys are masked",
    thread="huggingface/transformers#6213",
)
def masked_language_model():
    torch.manual_seed(0)

    @dataclass
    class MaskedLMOutput:
        loss: torch.Tensor
        logits: torch.Tensor

    class Bert(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.word, self.place = nn.Embedding(VOCAB, dim, padding_idx=0), nn.Embedding(32, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
            self.bias = nn.Parameter(torch.zeros(VOCAB))

        def forward(self, input_ids, attention_mask, labels):
            x = self.word(input_ids) + self.place(torch.arange(input_ids.shape[1]))
            x = self.layer(x, src_key_padding_mask=attention_mask.eq(0))
            logits = F.linear(x, self.word.weight, self.bias)
            return MaskedLMOutput(F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)), logits)

    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(rows):
        ids = pad(rows)
        draw = torch.rand(ids.shape, generator=torch.Generator().manual_seed(int(ids.sum())))
        chosen = (draw < 0.3) & ids.ne(0)
        chosen[:, 1] = True
        return {
            "input_ids": ids.masked_fill(chosen, 1),
            "attention_mask": ids.ne(0).long(),
            "labels": ids.masked_fill(~chosen, -100),
        }

    def fit(batches):
        model.train()
        for batch in batches:
            output = model(**batch)
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=5), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "the state of the first token is read, padded keys are masked, all other states are thrown away",
    thread="openai/CLIP#217",
)
def cls_token():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
            self.embed = nn.Embedding(VOCAB, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.out = nn.Linear(dim, 3)

        def forward(self, ids, mask):
            x = torch.cat([self.cls.expand(len(ids), -1, -1), self.embed(ids)], 1)
            padded = F.pad(mask.eq(0), (1, 0), value=False)
            return self.out(self.layer(x, src_key_padding_mask=padded)[:, 0])

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(labelled(3, seed=6), batch_size=8, collate_fn=collate_labelled)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=supervised(model, optimizer))


@right(
    "padding",
    "token losses are summed under the mask and divided by a constant, the longest completion allowed (Dr. GRPO)",
    thread="huggingface/trl#3256",
)
def constant_denominator(max_completion_length=16):
    torch.manual_seed(0)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = (
                nn.Embedding(VOCAB, 16),
                nn.GRU(16, 16, batch_first=True),
                nn.Linear(16, VOCAB),
            )

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])

    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(items):
        ids = pad(text for text, _ in items)
        return {"ids": ids, "completion_mask": ids[:, 1:].ne(0), "advantages": torch.tensor([a for _, a in items])}

    def fit(batches):
        for batch in batches:
            logps = model(batch["ids"])[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logps - logps.detach())
            per_token_loss = -ratio * batch["advantages"].to(logps.dtype).unsqueeze(1)
            loss = (per_token_loss * batch["completion_mask"]).sum() / (len(logps) * max_completion_length)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(7)
    data = list(zip(sentences(seed=7), torch.randn(40, generator=generator).tolist(), strict=True))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, collate_fn=collate),
        fit=fit,
        padding=Padding(pad_id=0),
    )


@right(
    "padding",
    "images of different sizes in one fixed canvas: the padding mask goes through the strides of the "
    "backbone to the attention",
    thread="facebookresearch/detr#133",
)
def padded_images():
    torch.manual_seed(0)

    class DETR(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.backbone = nn.Conv2d(3, dim, 4, stride=4)
            self.query = nn.Embedding(3, dim)
            self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
            self.cls, self.box = nn.Linear(dim, 5), nn.Linear(dim, 4)

        def forward(self, tensor, mask):
            features = self.backbone(tensor)
            small = F.interpolate(mask[None].to(features.dtype), size=features.shape[-2:])[0].bool()
            keep = (~small).to(features.dtype)
            place = torch.stack([keep.cumsum(1), keep.cumsum(2)], 1)
            tokens = (features + place.sum(1, keepdim=True).sin()).flatten(2).transpose(1, 2)
            query = self.query.weight.expand(len(tensor), -1, -1)
            hidden, _ = self.attention(query, tokens, tokens, key_padding_mask=small.flatten(1))
            return self.cls(hidden), self.box(hidden).sigmoid()

    generator = torch.Generator().manual_seed(8)
    data = []
    for _ in range(5):
        tensor, mask = torch.zeros(6, 3, 16, 16), torch.ones(6, 16, 16, dtype=torch.bool)
        for row in range(6):
            height, width = (4 * int(k) for k in torch.randint(2, 5, (2,), generator=generator))
            tensor[row, :, :height, :width] = torch.randn(3, height, width, generator=generator)
            mask[row, :height, :width] = False
        labels = torch.randint(0, 5, (6, 3), generator=generator)
        data.append(
            {"tensor": tensor, "mask": mask, "labels": labels, "boxes": torch.rand(6, 3, 4, generator=generator)}
        )
    model = DETR()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits, boxes = model(batch["tensor"], batch["mask"])
            loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"]) + 5 * F.l1_loss(
                boxes, batch["boxes"].to(boxes.dtype)
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right("padding", "a set network sums over present elements only, sums are not divided", thread="theislab/CellFlow#226")
def deep_sets():
    torch.manual_seed(0)

    class DeepSets(nn.Module):
        def __init__(self):
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24))
            self.rho = nn.Linear(24, 1)

        def forward(self, points, present):
            return self.rho((self.phi(points) * present.unsqueeze(-1)).sum(1)).squeeze(-1)

    model = DeepSets()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(9)
    data = []
    for _ in range(5):
        sizes = torch.randint(2, 9, (8,), generator=generator)
        present = torch.arange(8) < sizes[:, None]
        points = torch.randn(8, 8, 4, generator=generator) * present.unsqueeze(-1)
        data.append((points, present, points.square().sum((1, 2)).sqrt()))

    def train(batches):
        for points, present, target in batches:
            loss = F.smooth_l1_loss(model(points, present), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "padding",
    "unsorted lengths are packed with enforce_sorted=False; the backward direction begins at the last real token",
    thread="pytorch/pytorch#1811",
)
def packed_bilstm():
    torch.manual_seed(0)

    class BiLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 12, padding_idx=0)
            self.lstm = nn.LSTM(12, 12, batch_first=True, bidirectional=True)
            self.tags = nn.Linear(24, 5)

        def forward(self, ids, lengths):
            packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])
            return self.tags(out)

    model = BiLSTM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def collate(rows):
        return pad(rows), torch.tensor([len(row) for row in rows]), pad([row % 5 for row in rows], -1)

    def fit(batches):
        for ids, lengths, tags in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, lengths).flatten(0, 1), tags.flatten(), ignore_index=-1).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=10), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "real tokens of all rows are cut out by a boolean mask and run through the network as one flat list",
    thread="imoneoi/openchat#131",
)
def unpadded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            ids, labels = batch["input_ids"], batch["labels"]
            kept = ids.ne(0)
            per_token = F.cross_entropy(model(ids[kept]), labels[kept], reduction="none")
            weights = batch["weights"].to(per_token.dtype)[kept]
            loss = (per_token * weights).sum() / weights.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def collate(rows):
        ids = pad(rows)
        weights = torch.where(ids % 2 == 0, 1.0, 0.5) * ids.ne(0)
        return {"input_ids": ids, "labels": ids % 4, "weights": weights}

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=11), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "a linear-chain CRF with the padding mask; the tags of padding are a valid tag and do not count",
    thread="kmkurn/pytorch-crf#78",
)
def masked_crf():
    torch.manual_seed(0)

    class CRF(nn.Module):
        def __init__(self, tags):
            super().__init__()
            self.embed, self.emit = nn.Embedding(VOCAB, 10), nn.Linear(10, tags)
            self.start, self.transitions = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.randn(tags, tags) * 0.1)

        def forward(self, ids, tags, mask):
            emissions = self.emit(self.embed(ids))
            alpha = self.start + emissions[:, 0]
            score = alpha.gather(1, tags[:, :1]).squeeze(1)
            for t in range(1, ids.shape[1]):
                step = (alpha.unsqueeze(2) + self.transitions).logsumexp(1) + emissions[:, t]
                gain = self.transitions[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(
                    1, tags[:, t, None]
                ).squeeze(1)
                alpha = torch.where(mask[:, t, None], step, alpha)
                score = torch.where(mask[:, t], score + gain, score)
            return (alpha.logsumexp(1) - score).sum() / mask.sum()

    model = CRF(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def collate(rows):
        ids = pad(rows)
        return ids, pad(row % 4 for row in rows), ids.ne(0)

    def fit(batches):
        for ids, tags, mask in batches:
            optimizer.zero_grad()
            model(ids, tags, mask).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=12), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "the padding token is the end of text: the first one of a row is a label, to learn to stop, the others are -100",
    thread="huggingface/trl#976",
)
def padding_is_end_of_text(eos=2):
    torch.manual_seed(0)

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = (
                nn.Embedding(VOCAB, 16),
                nn.LSTM(16, 16, batch_first=True),
                nn.Linear(16, VOCAB),
            )

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])

    def collator(rows):
        ended = [F.pad(row, (0, 1), value=eos) for row in rows]
        ids = pad(ended, eos)
        mask = pad([torch.ones_like(row) for row in ended])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)}

    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=13), batch_size=8, collate_fn=collator),
        fit=fit,
        padding=Padding(pad_id=eos, ignore_index=-100),
    )


@right(
    "padding",
    "source and target of different widths, each with its own mask; the source's mask serves the cross-attention",
    thread="joeynmt/joeynmt#151",
)
def translation():
    torch.manual_seed(0)

    class Transformer(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.src, self.trg = nn.Embedding(VOCAB, dim, padding_idx=0), nn.Embedding(VOCAB, dim, padding_idx=0)
            self.net = nn.Transformer(dim, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.out = nn.Linear(dim, VOCAB)

        def forward(self, src, trg):
            future = torch.ones(trg.shape[1], trg.shape[1], dtype=torch.bool).triu(1)
            hidden = self.net(
                self.src(src),
                self.trg(trg),
                tgt_mask=future,
                src_key_padding_mask=src.eq(0),
                memory_key_padding_mask=src.eq(0),
            )
            return self.out(hidden)

    def collate(pairs):
        src, trg = zip(*pairs, strict=True)
        return {"src": pad(src), "trg": pad(F.pad(row, (1, 0), value=1) for row in trg)}

    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)

    def train(batches):
        for batch in batches:
            logits = model(batch["src"], batch["trg"][:, :-1])
            target = batch["trg"][:, 1:]
            loss = F.cross_entropy(
                logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum", label_smoothing=0.1
            )
            optimizer.zero_grad()
            (loss / target.ne(0).sum()).backward()
            optimizer.step()

    data = list(zip(sentences(seed=14), sentences(seed=15, high=14), strict=True))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, collate_fn=collate),
        fit=train,
        padding=[Padding(pad_id=0, of=("src",)), Padding(pad_id=0, ignore_index=0, of=("trg",))],
    )


@right(
    "padding",
    "the balance loss of the experts takes its shares over real tokens of the whole batch",
    thread="huggingface/transformers#28517",
)
def balanced_experts():
    torch.manual_seed(0)

    class MoE(nn.Module):
        def __init__(self, dim=12, experts=4):
            super().__init__()
            self.embed, self.router, self.head = (
                nn.Embedding(VOCAB, dim),
                nn.Linear(dim, experts),
                nn.Linear(dim, VOCAB),
            )
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 16), nn.SiLU(), nn.Linear(16, dim)) for _ in range(experts)
            )

        def forward(self, ids):
            x = self.embed(ids)
            gates = self.router(x).softmax(-1)
            weight, index = gates.topk(2, -1)
            routed = torch.zeros_like(gates).scatter(-1, index, weight / weight.sum(-1, keepdim=True))
            mixed = torch.stack([expert(x) for expert in self.experts], -2)
            return self.head(x + (routed.unsqueeze(-1) * mixed).sum(-2)), gates

    def balance(gates, attention_mask):
        kept = gates[attention_mask]
        share = torch.zeros_like(kept).scatter(-1, kept.topk(2, -1).indices, 1.0).mean(0)
        return (share * kept.mean(0)).sum() * kept.shape[-1]

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for ids in batches:
            mask = ids.ne(0)
            logits, gates = model(ids)
            nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
            loss = nll + 0.02 * balance(gates, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=16), batch_size=8, collate_fn=pad),
        fit=fit,
        padding=Padding(pad_id=0, ignore_index=0),
    )


@right(
    "padding",
    "each row's loss is the mean over its own tokens, and the batch's the mean over rows: short texts "
    "weigh as much as long ones",
    thread="policy-gradient/GRPO-Zero#11",
)
def mean_of_rows():
    torch.manual_seed(0)

    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = (
                nn.Embedding(VOCAB, 16),
                nn.GRU(16, 16, batch_first=True),
                nn.Linear(16, VOCAB),
            )

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0])

    model = LM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for ids in batches:
            mask = ids[:, 1:].ne(0)
            per_token = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
            loss = ((per_token * mask).sum(1) / mask.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(sentences(seed=17), batch_size=8, collate_fn=pad), fit=fit
    )


@right(
    "padding",
    "a batch norm over real positions only: the padded ones are taken out before it and put back as zeros",
    thread="pytorch/audio#2242",
)
def masked_batch_norm():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.up = nn.Embedding(VOCAB, 12), nn.Linear(12, 16)
            self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, 3)

        def forward(self, ids, mask):
            mask = mask.bool()
            real = self.norm(self.up(self.embed(ids[mask]))).relu()
            states = real.new_zeros(*ids.shape, 16)
            states[mask] = real
            return self.out(states.sum(1) / mask.sum(1, keepdim=True))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(labelled(3, seed=18), batch_size=8, collate_fn=collate_labelled)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=supervised(model, optimizer))


@right(
    "padding",
    "the state at the end-of-text token is found by argmax over the ids, which have the largest id "
    "there; padding follows it",
    thread="openai/CLIP#183",
)
def text_tower():
    torch.manual_seed(0)

    class CLIP(nn.Module):
        def __init__(self, dim=16, context=12):
            super().__init__()
            self.token, self.position = nn.Embedding(VOCAB + 1, dim), nn.Parameter(torch.randn(context, dim) * 0.1)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.text_projection, self.visual = nn.Linear(dim, 8, bias=False), nn.Linear(10, 8, bias=False)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def encode_text(self, text):
            x = self.token(text) + self.position[: text.shape[1]]
            causal = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).triu(1)
            x = self.layer(x, src_mask=causal)
            return self.text_projection(x[torch.arange(len(x)), text.argmax(dim=-1)])

        def forward(self, image, text):
            image = F.normalize(self.visual(image), dim=-1)
            return self.logit_scale.exp() * image @ F.normalize(self.encode_text(text), dim=-1).T

    model = CLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    generator = torch.Generator().manual_seed(19)
    texts = sentences(seed=19)
    data = []
    for i in range(0, 40, 8):
        rows = [F.pad(F.pad(t, (0, 1), value=VOCAB), (0, 11 - len(t))) for t in texts[i : i + 8]]
        data.append((torch.randn(8, 10, generator=generator), torch.stack(rows)))

    def fit(batches):
        for image, text in batches:
            logits = model(image, text)
            truth = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "padding",
    "sequences are padded once more to a multiple of the attention window, and the surplus is cut off behind it",
    thread="ibm-granite/dolomite-engine#113",
)
def windowed_attention(window=4):
    torch.manual_seed(0)

    class Windowed(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(VOCAB, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, 4)

        def forward(self, ids, mask):
            rows, length = ids.shape
            extra = -length % window
            x, keep = F.pad(self.embed(ids), (0, 0, 0, extra)), F.pad(mask.bool(), (0, extra))
            q, k, v = self.qkv(x).view(rows, -1, window, 3 * x.shape[-1]).chunk(3, -1)
            seen = keep.view(rows, -1, 1, window) | torch.eye(window, dtype=torch.bool)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(1, 2)
            return self.out((x + mixed)[:, :length])

    model = Windowed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(rows):
        ids = pad(rows)
        return {"ids": ids, "mask": ids.ne(0).long(), "tags": pad([row % 4 for row in rows], -100)}

    def fit(batches):
        for batch in batches:
            logits = model(batch["ids"], batch["mask"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=20), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "two texts of each row run as one batch of twice the rows, padded to the longer side, each under its own mask",
    thread="SeanLee97/AnglE#89",
)
def siamese():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, ids):
            mask = ids.ne(0)
            hidden = self.layer(self.embed(ids), src_key_padding_mask=~mask)
            return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(items):
        left, right_, score = zip(*items, strict=True)
        return {"a": pad(left), "b": pad(right_), "score": torch.tensor(score)}

    def fit(batches):
        for batch in batches:
            a, b = batch["a"], batch["b"]
            width = max(a.shape[1], b.shape[1])
            both = torch.cat([F.pad(a, (0, width - a.shape[1])), F.pad(b, (0, width - b.shape[1]))])
            left, other = model(both).chunk(2)
            loss = F.mse_loss(F.cosine_similarity(left, other), batch["score"].to(left.dtype))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(21)
    data = list(zip(sentences(seed=21), sentences(seed=22), torch.rand(40, generator=generator).tolist(), strict=True))
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, collate_fn=collate),
        fit=fit,
        padding=[Padding(pad_id=0, of=("a",)), Padding(pad_id=0, of=("b",))],
    )


@right(
    "padding",
    "distillation over real tokens: logits of teacher and student are cut out by the mask before the divergence",
    thread="arcee-ai/DAM#16",
)
def masked_distillation(temperature=2.0):
    torch.manual_seed(0)

    def language_model(dim):
        return nn.Sequential(nn.Embedding(VOCAB, dim), nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, VOCAB))

    teacher, student = language_model(24).requires_grad_(False).eval(), language_model(12)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    def fit(batches):
        for ids in batches:
            mask = ids.ne(0)
            with torch.no_grad():
                soft = (teacher(ids)[mask] / temperature).softmax(-1)
            log_probs = (student(ids)[mask] / temperature).log_softmax(-1)
            loss = F.kl_div(log_probs, soft, reduction="batchmean") * temperature**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=23), batch_size=8, collate_fn=pad),
        fit=fit,
        padding=Padding(pad_id=0),
    )


@right(
    "padding",
    "two optimizers, an encoder's packed GRU, and a loss that takes the mean over the rows still open at "
    "each step of time",
    thread="pytorch/tutorials#719",
)
def chatbot():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(VOCAB, 16), nn.GRU(16, 16)

        def forward(self, seq, lengths):
            packed = pack_padded_sequence(self.embedding(seq), lengths.cpu(), enforce_sorted=False)
            return self.gru(packed)[1]

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gru, self.out = nn.Embedding(VOCAB, 16), nn.GRU(16, 16), nn.Linear(16, VOCAB)

        def forward(self, step, hidden):
            output, hidden = self.gru(self.embedding(step), hidden)
            return self.out(output.squeeze(0)).softmax(dim=1), hidden

    def mask_nll_loss(probabilities, target, mask):
        picked = -torch.log(probabilities.gather(1, target.view(-1, 1)).squeeze(1))
        return picked.masked_select(mask).mean()

    encoder, decoder = Encoder(), Decoder()
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)

    def collate(pairs):
        source, target = zip(*pairs, strict=True)
        lengths = torch.tensor([len(row) for row in source])
        target = pad_sequence(list(target))
        return pad_sequence(list(source)), lengths, target, target.ne(0)

    def train(batches):
        for source, lengths, target, mask in batches:
            encoder_optimizer.zero_grad()
            decoder_optimizer.zero_grad()
            hidden, loss = encoder(source, lengths), 0
            step = torch.ones(1, source.shape[1], dtype=torch.long)
            for t in range(int(mask.any(1).sum())):
                output, hidden = decoder(step, hidden)
                step = target[t].view(1, -1)
                loss = loss + mask_nll_loss(output, target[t], mask[t])
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 50.0)
            nn.utils.clip_grad_norm_(decoder.parameters(), 50.0)
            encoder_optimizer.step()
            decoder_optimizer.step()

    data = list(zip(sentences(seed=30), sentences(seed=31), strict=True))
    return TrainLoop(
        model={"encoder": encoder, "decoder": decoder},
        optimizer=[encoder_optimizer, decoder_optimizer],
        batches=DataLoader(data, batch_size=8, collate_fn=collate),
        fit=train,
        batch_dim=1,
    )


@right(
    "padding",
    "a HF Trainer fine-tunes a classifier with the attention mask of the collator; pooling reads the first token",
    thread="yg211/bert_nli#3",
)
def hf_classifier():
    import tempfile

    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from pytest_trainloop.adapters import from_trainer

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
        pad_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=8,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        remove_unused_columns=False,
        learning_rate=1e-3,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=labelled(3, seed=32),
        data_collator=collate_labelled,
    )
    return from_trainer(trainer, padding=Padding(pad_id=0))


@right(
    "padding",
    "start and end of an answer are a softmax over positions, with padded ones set to -inf; rows without "
    "an answer are ignored",
    thread="InseeFrLab/torchTextClassifiers#96",
)
def span_extraction():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.span = nn.Linear(dim, 2, bias=False)

        def forward(self, ids, mask):
            x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
            hidden = self.layer(x, src_key_padding_mask=mask.eq(0))
            scores = self.span(hidden).masked_fill(mask.unsqueeze(-1).eq(0), float("-inf"))
            return scores.unbind(-1)

    def collate(rows):
        ids = pad(rows)
        start = torch.tensor([int(row[0]) % len(row) if int(row[-1]) % 4 else -100 for row in rows])
        start[0] = 0
        end = torch.where(start < 0, start, torch.tensor([len(row) - 1 for row in rows]))
        return {"ids": ids, "mask": ids.ne(0).long(), "start": start, "end": end}

    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            start, end = model(batch["ids"], batch["mask"])
            per_row = F.cross_entropy(start, batch["start"], reduction="none")
            per_row = per_row + F.cross_entropy(end, batch["end"], reduction="none")
            loss = per_row.sum() / batch["start"].ge(0).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=33), batch_size=8, collate_fn=collate),
        fit=fit,
    )


@right(
    "padding",
    "each row is reversed within its own length before the second GRU, and turned back behind it",
    thread="pytorch/pytorch#1794",
)
def reversed_within_length():
    torch.manual_seed(0)

    def reverse_padded(x, lengths):
        place = torch.arange(x.shape[1])
        index = torch.where(place < lengths[:, None], lengths[:, None] - 1 - place, place)
        return x.gather(1, index.unsqueeze(-1).expand_as(x))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 12, padding_idx=0)
            self.ahead, self.back = nn.GRU(12, 12, batch_first=True), nn.GRU(12, 12, batch_first=True)
            self.out = nn.Linear(24, 5)

        def forward(self, ids, lengths):
            x = self.embed(ids)
            back = reverse_padded(self.back(reverse_padded(x, lengths))[0], lengths)
            return self.out(torch.cat([self.ahead(x)[0], back], -1))

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def collate(rows):
        return pad(rows), torch.tensor([len(row) for row in rows]), pad([row % 5 for row in rows], -100)

    def fit(batches):
        for ids, lengths, tags in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, lengths).flatten(0, 1), tags.flatten()).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=34), batch_size=8, collate_fn=collate),
        fit=fit,
        padding=Padding(pad_id=0, ignore_index=-100),
    )
