"""Faulty loops about padding: attention, pooling, losses, masks of two sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import fault


def sentences(n, vocab=30, low=3, high=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (n,), generator=generator)
    return [torch.randint(1, vocab, (int(length),), generator=generator) for length in lengths]


def labels_of(texts, classes):
    return [int(text.sum()) % classes for text in texts]


@fault(
    "padding",
    "mean(dim=1) of the token states divides by the longest sentence of the batch and adds the padded states",
    thread="lanterndata/lantern_extras#91",
    check="padding_invariance",
)
def sentence_encoder():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed = nn.Embedding(30, dim, padding_idx=0)
            layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.classify = nn.Linear(dim, 4)

        def forward(self, input_ids, attention_mask):
            hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
            return self.classify(hidden.mean(dim=1))

    def collate(items):
        ids = pad_sequence([text for text, _ in items], batch_first=True)
        labels = torch.tensor([label for _, label in items])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    texts = sentences(40)
    loader = DataLoader(list(zip(texts, labels_of(texts, 4), strict=True)), batch_size=8, collate_fn=collate)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            logits = model(batch["input_ids"], batch["attention_mask"])
            loss = F.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "padding",
    "masked_fill(mask) hides the real keys and leaves the padded ones: the mask is true at tokens",
    thread="https://kiwix.lema.org/stackoverflow.com_en_all_2023-11/questions/62170439/difference-between-src-mask-and-src-key-padding-mask",
    check="padding_invariance",
)
def token_tagger():
    torch.manual_seed(0)

    class SelfAttention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.qkv = nn.Linear(dim, 3 * dim)
            self.out = nn.Linear(dim, dim)

        def forward(self, x, mask):
            rows, length, dim = x.shape
            q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(mask[:, None, None, :], -1e4)
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, dim))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(30, 16, padding_idx=0)
            self.positions = nn.Embedding(32, 16)
            self.attention = SelfAttention(16, 2)
            self.norm = nn.LayerNorm(16)
            self.head = nn.Linear(16, 5)

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            return self.head(self.norm(x + self.attention(x, ids.ne(0))))

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    texts = sentences(48, seed=1)

    def batches(n):
        for start in range(n):
            chunk = [texts[(start * 8 + i) % len(texts)] for i in range(8)]
            ids = pad_sequence(chunk, batch_first=True)
            tags = pad_sequence([text % 5 for text in chunk], batch_first=True, padding_value=-100)
            yield ids, tags

    def train(data):
        for ids, tags in data:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(ids).flatten(0, 1), tags.flatten()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: list(batches(n)), fit=train)


@fault(
    "padding",
    "the decoder's attention to the source is given the padding mask of the target (memory_key_padding_mask=tgt_pad)",
    thread="Kamichanw/SeekDeeper#3",
    check="padding_invariance",
)
def translator():
    torch.manual_seed(0)

    class Seq2Seq(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.source = nn.Embedding(30, dim, padding_idx=0)
            self.target = nn.Embedding(30, dim, padding_idx=0)
            self.transformer = nn.Transformer(dim, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.project = nn.Linear(dim, 30)

        def forward(self, src, tgt):
            src_pad, tgt_pad = src.eq(0), tgt.eq(0)
            future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
            memory = self.transformer.encoder(self.source(src), src_key_padding_mask=src_pad)
            hidden = self.transformer.decoder(
                self.target(tgt),
                memory,
                tgt_mask=future,
                tgt_key_padding_mask=tgt_pad,
                memory_key_padding_mask=tgt_pad,
            )
            return self.project(hidden)

    def collate(pairs, width=12):
        src, tgt = zip(*pairs, strict=True)
        pad = lambda rows, size: torch.stack([F.pad(row, (0, size - len(row))) for row in rows])  # noqa: E731
        return {"src": pad(src, width), "tgt": pad(tgt, width + 1)}

    pairs = [
        (src, torch.cat([torch.tensor([1]), tgt]))
        for src, tgt in zip(sentences(40, seed=2), sentences(40, seed=3), strict=True)
    ]
    loader = DataLoader(pairs, batch_size=8, collate_fn=collate)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    criterion = nn.CrossEntropyLoss(ignore_index=0)

    def fit(batches):
        for batch in batches:
            logits = model(batch["src"], batch["tgt"][:, :-1])
            loss = criterion(logits.transpose(1, 2), batch["tgt"][:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[Padding(pad_id=0, of=("src",)), Padding(pad_id=0, ignore_index=0, of=("tgt",))],
    )


@fault(
    "padding",
    "cross_entropy counts padded positions: tags are padded with 0, which is the class O, and no ignore_index is given",
    thread="hiyoung123/SoftMaskedBert#20",
    check="padding_invariance",
)
def named_entities():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(30, 12, padding_idx=0),
            "mlp": nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    texts = sentences(40, seed=4)

    def collate(rows):
        ids = pad_sequence(rows, batch_first=True)
        tags = pad_sequence([row % 4 for row in rows], batch_first=True)
        return ids, tags

    def fit(batches):
        for ids, tags in batches:
            scores = model["mlp"](model["embed"](ids))
            loss = F.cross_entropy(scores.reshape(-1, 4), tags.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(texts, batch_size=10, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=0))


@fault(
    "padding",
    "(loss * mask).mean() divides by all positions, the padded ones too",
    thread="d2l-ai/d2l-en#2076",
    check="padding_invariance",
)
def masked_softmax_loss():
    torch.manual_seed(0)

    class MaskedSoftmaxCELoss(nn.CrossEntropyLoss):
        def forward(self, pred, label, valid_len):
            weights = (torch.arange(label.shape[1]) < valid_len[:, None]).to(pred.dtype)
            self.reduction = "none"
            unweighted = super().forward(pred.permute(0, 2, 1), label)
            return (unweighted * weights).mean(dim=1)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 12)
            self.rnn = nn.GRU(12, 16, batch_first=True)
            self.dense = nn.Linear(16, 30)

        def forward(self, x):
            return self.dense(self.rnn(self.embedding(x))[0])

    net, loss = Decoder(), MaskedSoftmaxCELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    texts = sentences(32, seed=5, low=4)

    def data():
        for i in range(0, 32, 8):
            rows = texts[i : i + 8]
            yield pad_sequence(rows, batch_first=True), torch.tensor([len(row) - 1 for row in rows])

    def train_epoch(iterator):
        for y, y_len in iterator:
            optimizer.zero_grad()
            value = loss(net(y[:, :-1]), y[:, 1:], y_len)
            value.sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=list(data()), fit=train_epoch)


@fault(
    "padding",
    "out[:, -1] of the LSTM is the state after the padding for all but the longest review",
    thread="https://www.codegenes.net/blog/get-last-hidden-state-lstm-pytorch",
    check="padding_invariance",
)
def review_lstm():
    torch.manual_seed(0)

    class Sentiment(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 12, padding_idx=0)
            self.lstm = nn.LSTM(12, 16, batch_first=True)
            self.fc = nn.Linear(16, 1)

        def forward(self, text, text_lengths):
            out, _ = self.lstm(self.embedding(text))
            return self.fc(out[:, -1]).squeeze(1)

    @dataclass
    class Batch:
        text: torch.Tensor
        text_lengths: torch.Tensor
        label: torch.Tensor

    model = Sentiment()
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.BCEWithLogitsLoss()
    texts = sentences(40, seed=6)
    iterator = []
    for i in range(0, 40, 8):
        rows = texts[i : i + 8]
        label = torch.tensor(labels_of(rows, 2), dtype=torch.float)
        iterator.append(Batch(pad_sequence(rows, batch_first=True), torch.tensor([len(r) for r in rows]), label))

    def train(batches):
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = criterion(model(batch.text, batch.text_lengths), batch.label)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=iterator, fit=train)


@fault(
    "padding",
    "position_ids are arange(length) although the batch is padded on the left, so a text's positions "
    "depend on its neighbours",
    thread="tloen/alpaca-lora#315",
    check="padding_invariance",
)
def gpt_finetuning():
    torch.manual_seed(0)

    class GPT(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(31, dim), nn.Embedding(32, dim)
            self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
            self.ln = nn.LayerNorm(dim)
            self.lm_head = nn.Linear(dim, 31, bias=False)

        def forward(self, input_ids, attention_mask, labels):
            length = input_ids.shape[1]
            position_ids = torch.arange(length).expand_as(input_ids)
            x = self.wte(input_ids) + self.wpe(position_ids)
            allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None].bool()
            allowed = allowed | torch.eye(length, dtype=torch.bool)
            h, _ = self.attention(x, x, x, attn_mask=~allowed.repeat_interleave(2, 0), need_weights=False)
            logits = self.lm_head(self.ln(x + h))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    def collator(rows):
        width = max(len(row) for row in rows)
        ids = torch.stack([F.pad(row, (width - len(row), 0), value=30) for row in rows])
        mask = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    loader = DataLoader(sentences(40, seed=7), batch_size=8, collate_fn=collator)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=30, ignore_index=-100)
    )


@fault(
    "padding",
    "pooling weights are multiplied by the mask after the softmax: padded positions stay in its sum",
    thread="tomhosking/torchseq#10",
    check="padding_invariance",
)
def attention_pooling():
    torch.manual_seed(0)

    class AttentionPool(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

        def forward(self, states, mask):
            weights = self.score(states).squeeze(-1).softmax(dim=1)
            weights = weights * mask
            return torch.einsum("bt,btd->bd", weights, states)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16, padding_idx=0)
            self.project = nn.Linear(16, 16)
            self.pool = AttentionPool(16)
            self.out = nn.Linear(16, 3)

        def forward(self, tokens):
            return self.out(self.pool(self.project(self.embed(tokens)).relu(), tokens != 0))

    model = Classifier()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    texts = sentences(30, seed=8)

    def batches(n):
        out = []
        for i in range(n):
            rows = [texts[(i * 6 + j) % 30] for j in range(6)]
            out.append((pad_sequence(rows, batch_first=True), torch.tensor(labels_of(rows, 3))))
        return out

    def step(batch):
        tokens, labels = batch
        loss = F.cross_entropy(model(tokens), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=batches, fit=lambda data: [step(batch) for batch in data]
    )


@fault(
    "padding",
    "the load-balancing loss takes router probabilities of padded tokens into its shares",
    thread="huggingface/transformers#28505",
    check="padding_invariance",
)
def mixture_of_experts():
    torch.manual_seed(0)

    class MoE(nn.Module):
        def __init__(self, dim=12, experts=3):
            super().__init__()
            self.embed = nn.Embedding(30, dim, padding_idx=0)
            self.router = nn.Linear(dim, experts)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim)) for _ in range(experts)
            )
            self.head = nn.Linear(dim, 30)

        def forward(self, ids):
            x = self.embed(ids)
            probs = self.router(x).softmax(-1)
            x = x + sum(probs[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
            return self.head(x), probs

    def load_balancing_loss(probs):
        flat = probs.flatten(0, 1)
        chosen = F.one_hot(flat.argmax(-1), flat.shape[-1]).to(flat.dtype)
        return flat.shape[-1] * (chosen.mean(0) * flat.mean(0)).sum()

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def collate(rows):
        ids = pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": ids.masked_fill(ids.eq(0), -100)}

    def fit(batches):
        for batch in batches:
            logits, probs = model(batch["input_ids"])
            nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            loss = nll + 0.05 * load_balancing_loss(probs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(sentences(40, seed=9), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=0, ignore_index=-100)
    )


@fault(
    "padding",
    "kl_div(reduction='batchmean') over the flattened tokens distils the teacher's guesses at padded positions",
    thread="arcee-ai/DAM#16",
    check="padding_invariance",
)
def distillation():
    torch.manual_seed(0)

    def language_model(dim):
        return nn.Sequential(nn.Embedding(30, dim), nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 30))

    teacher, student = language_model(24).requires_grad_(False).eval(), language_model(12)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    temperature = 2.0

    def collate(rows):
        ids = pad_sequence(rows, batch_first=True)
        return ids, ids.ne(0)

    def train(batches):
        for ids, mask in batches:
            with torch.no_grad():
                soft = (teacher(ids) / temperature).softmax(-1)
            logits = student(ids)
            log_probs = (logits / temperature).log_softmax(-1)
            kd = F.kl_div(log_probs.flatten(0, 1), soft.flatten(0, 1), reduction="batchmean") * temperature**2
            targets = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
            ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            (0.5 * kd + 0.5 * ce).backward()
            optimizer.step()

    loader = DataLoader(sentences(32, seed=10), batch_size=8, collate_fn=collate)
    return TrainLoop(model={"student": student, "teacher": teacher}, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "padding",
    "documents are pooled with the mask of the queries: forward(doc_ids, query_mask)",
    thread="SeanLee97/AnglE#89",
    check="padding_invariance",
)
def dual_encoder():
    torch.manual_seed(0)

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, ids, mask):
            weight = mask.unsqueeze(-1).to(self.embed.weight.dtype)
            states = self.mlp(self.embed(ids)) * weight
            return F.normalize(states.sum(1) / weight.sum(1).clamp(min=1e-6), dim=-1)

    encoder = Tower()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)

    def collate(items, width=12):
        fill = lambda row: F.pad(row, (0, width - len(row)))  # noqa: E731
        query = torch.stack([fill(item[0]) for item in items])
        doc = torch.stack([fill(item[1]) for item in items])
        score = torch.tensor([item[2] for item in items])
        return {
            "query": query,
            "query_mask": query.ne(0).long(),
            "doc": doc,
            "doc_mask": doc.ne(0).long(),
            "score": score,
        }

    def fit(batches):
        for batch in batches:
            q = encoder(batch["query"], batch["query_mask"])
            d = encoder(batch["doc"], batch["query_mask"])
            loss = F.mse_loss((q * d).sum(-1), batch["score"].to(q.dtype))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    data = list(zip(sentences(40, seed=11), sentences(40, seed=12), torch.rand(40).tolist(), strict=True))
    loader = DataLoader(data, batch_size=8, collate_fn=collate)
    return TrainLoop(
        model=encoder,
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[Padding(pad_id=0, of=("query", "query_mask")), Padding(pad_id=0, of=("doc", "doc_mask"))],
    )


@fault(
    "padding",
    "the collator's attention mask is all ones: padded keys take part in attention and in the mean",
    thread="yg211/bert_nli#3",
    check="padding_invariance",
)
def nli_collator():
    torch.manual_seed(0)

    def build_batch(tokens, labels):
        longest = max(len(row) for row in tokens)
        padded, masks = [], []
        for row in tokens:
            padded.append(F.pad(row, (0, longest - len(row))))
            masks.append(torch.ones(longest, dtype=torch.long))
        return torch.stack(padded), torch.stack(masks), torch.tensor(labels)

    class NLI(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16, padding_idx=0)
            self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.fc = nn.Linear(16, 3)

        def forward(self, ids, mask):
            hidden = self.block(self.embed(ids), src_key_padding_mask=mask.eq(0))
            weight = mask.unsqueeze(-1).to(hidden.dtype)
            return self.fc((hidden * weight).sum(1) / weight.sum(1))

    texts = sentences(40, seed=13)
    data = [build_batch(texts[i : i + 8], labels_of(texts[i : i + 8], 3)) for i in range(0, 40, 8)]
    model = NLI()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for ids, mask, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, mask), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train, padding=Padding(pad_id=0))


@fault(
    "padding",
    "the partition and the path score of the CRF run over padded positions: the mask is not passed on",
    thread="kmkurn/pytorch-crf#77",
    check="padding_invariance",
)
def bilstm_crf():
    torch.manual_seed(0)

    class CRF(nn.Module):
        def __init__(self, tags):
            super().__init__()
            self.start = nn.Parameter(torch.randn(tags) * 0.1)
            self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

        def forward(self, emissions, tags, mask=None):
            if mask is None:
                mask = torch.ones_like(tags, dtype=torch.bool)
            first = emissions[:, 0]
            alpha = self.start + first
            score = self.start[tags[:, 0]] + first.gather(1, tags[:, :1]).squeeze(1)
            for t in range(1, emissions.shape[1]):
                on = mask[:, t]
                step = (alpha.unsqueeze(2) + self.transitions).logsumexp(1) + emissions[:, t]
                alpha = torch.where(on.unsqueeze(1), step, alpha)
                gain = self.transitions[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(
                    1, tags[:, t : t + 1]
                ).squeeze(1)
                score = torch.where(on, score + gain, score)
            return (alpha.logsumexp(1) - score).mean()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 10, padding_idx=0)
            self.emit = nn.Linear(10, 4)
            self.crf = CRF(4)

        def forward(self, ids, tags, mask):
            return self.crf(self.emit(self.embed(ids)), tags)

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def collate(rows):
        ids = pad_sequence(rows, batch_first=True)
        return ids, pad_sequence([row % 4 for row in rows], batch_first=True), ids.ne(0)

    def fit(batches):
        for ids, tags, mask in batches:
            optimizer.zero_grad()
            net(ids, tags, mask).backward()
            optimizer.step()

    loader = DataLoader(sentences(32, seed=14), batch_size=8, collate_fn=collate)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "padding",
    "the texts are sorted by length for pack_padded_sequence, the labels keep the order of the batch",
    thread="pytorch/pytorch#3662",
    check="batch_independence",
)
def packed_reader():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 12, padding_idx=0)
            self.gru = nn.GRU(12, 16, batch_first=True)
            self.out = nn.Linear(16, 3)

        def forward(self, ids, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), lengths.cpu(), batch_first=True)
            _, hidden = self.gru(packed)
            return self.out(hidden[-1])

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def collate(items):
        rows, labels = zip(*items, strict=True)
        lengths = torch.tensor([len(row) for row in rows])
        return pad_sequence(rows, batch_first=True), lengths, torch.tensor(labels)

    def train(batches):
        for ids, lengths, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, lengths), labels).backward()
            optimizer.step()

    texts = sentences(40, seed=15)
    loader = DataLoader(list(zip(texts, labels_of(texts, 3), strict=True)), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, ordered=False)


@fault(
    "padding",
    "the mask is unsqueezed at -1: it blocks the rows of padded queries and leaves padded keys in every softmax",
    thread="zai-org/GLM-4-Voice#182",
    check="padding_invariance",
)
def masked_block():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

        def forward(self, x, padding_mask):
            allowed = padding_mask.unsqueeze(-1).expand(-1, -1, x.shape[1])
            bias = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill(~allowed, torch.finfo(x.dtype).min)
            return x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=bias)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16, padding_idx=0)
            self.block = Block()
            self.head = nn.Linear(16, 2)

        def forward(self, ids):
            mask = ids.ne(0)
            hidden = self.block(self.embed(ids), mask) * mask.unsqueeze(-1)
            return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))

    class Trainer:
        def __init__(self, model, lr=1e-3):
            self.model = model
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
            self.history = []

        def train(self, batches):
            for ids, y in batches:
                loss = F.cross_entropy(self.model(ids), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.history.append(loss.item())

    trainer = Trainer(Model())
    texts = sentences(32, seed=16)
    data = [
        (pad_sequence(texts[i : i + 8], batch_first=True), torch.tensor(labels_of(texts[i : i + 8], 2)))
        for i in range(0, 32, 8)
    ]
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=data, fit=trainer.train)


@fault(
    "padding",
    "pad_sequence fills with 0, the mask of the model compares with pad_token_id 1: every padded "
    "position counts as a token",
    thread="CarperAI/trlx#474",
    check="padding_invariance",
)
def roberta_classifier(pad_token_id=1):
    torch.manual_seed(0)

    class Roberta(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.words = nn.Embedding(30, dim, padding_idx=pad_token_id)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.classifier = nn.Linear(dim, 3)

        def forward(self, input_ids):
            mask = input_ids.ne(pad_token_id)
            hidden = self.layer(self.words(input_ids), src_key_padding_mask=~mask)
            return self.classifier((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    def collate(items):
        rows, labels = zip(*items, strict=True)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": pad_sequence(rows, batch_first=True), "length": lengths, "labels": torch.tensor(labels)}

    model = Roberta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    texts = [text.clamp(min=2) for text in sentences(40, seed=17)]
    loader = DataLoader(list(zip(texts, labels_of(texts, 3), strict=True)), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "padding",
    "the entropy bonus is the mean over all positions of the completion, padded ones too; the policy loss is masked",
    thread="allenai/open-instruct#1076",
    check="padding_invariance",
)
def completion_update(coefficient=0.05):
    torch.manual_seed(0)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.rnn = nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, 30)

        def forward(self, ids):
            return self.head(self.rnn(self.embed(ids))[0]).log_softmax(-1)

    def masked_mean(values, mask):
        return (values * mask).sum() / mask.sum()

    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    def collate(items):
        ids = pad_sequence([text for text, _ in items], batch_first=True)
        return {"ids": ids, "mask": ids[:, 1:].ne(0), "advantage": torch.tensor([value for _, value in items])}

    def update(batches):
        for batch in batches:
            log_probs = policy(batch["ids"])[:, :-1]
            chosen = log_probs.gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            pg_loss = masked_mean(-chosen * batch["advantage"].to(chosen.dtype).unsqueeze(1), batch["mask"])
            optimizer.zero_grad()
            (pg_loss - coefficient * entropy).backward()
            optimizer.step()

    values = torch.randn(40, generator=torch.Generator().manual_seed(18)).tolist()
    loader = DataLoader(list(zip(sentences(40, seed=18), values, strict=True)), batch_size=8, collate_fn=collate)
    return TrainLoop(model=policy, optimizer=optimizer, batches=loader, fit=update, padding=Padding(pad_id=0))


@fault(
    "padding",
    "the flipped direction begins with the padding: flip(1) of padded rows, and the last state is kept",
    thread="state-spaces/mamba#52",
    check="padding_invariance",
)
def bidirectional_tagger():
    torch.manual_seed(0)

    class Bidirectional(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 12, padding_idx=0)
            self.forward_rnn, self.reverse_rnn = nn.GRU(12, 16, batch_first=True), nn.GRU(12, 16, batch_first=True)
            self.tags = nn.Linear(32, 5)

        def forward(self, ids):
            x = self.embed(ids)
            ahead, _ = self.forward_rnn(x)
            back, _ = self.reverse_rnn(x.flip(1))
            return self.tags(torch.cat([ahead, back.flip(1)], -1))

    model = Bidirectional()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def collate(rows):
        ids = pad_sequence(rows, batch_first=True)
        return ids, pad_sequence([row % 5 for row in rows], batch_first=True, padding_value=-100)

    def train(batches):
        for ids, tags in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids).transpose(1, 2), tags).backward()
            optimizer.step()

    loader = DataLoader(sentences(40, seed=19), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=train, padding=Padding(pad_id=0, ignore_index=-100)
    )
