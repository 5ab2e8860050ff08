"""Rows that meet, or are grouped wrongly."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import from_trainer
from tests.blind.cases import fault


def loader(*tensors, batch_size):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, generator=generator, drop_last=True)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)
        self.softmax = nn.Softmax(dim=0)

    def forward(self, context):
        weights = self.softmax(self.score(context))
        return (weights * context).sum(1), weights


class NewsClassifier(nn.Module):
    def __init__(self, vocab=40, dim=24, classes=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.attention = Attention(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        states, _ = self.rnn(self.embed(ids))
        pooled, _ = self.attention(states)
        return self.out(pooled)


@fault(
    "rows",
    "Softmax(dim=0) of the attention weights runs over the rows of the batch, not over the positions",
    thread="PetrochukM/PyTorch-NLP#2",
    check="batch_independence",
)
def news_attention():
    torch.manual_seed(0)
    model = NewsClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = loader(torch.randint(0, 40, (48, 9)), torch.randint(0, 5, (48,)), batch_size=12)

    def train(batches):
        model.train()
        for ids, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class SentenceVAE(nn.Module):
    def __init__(self, vocab=30, dim=16, hidden=12, latent=6):
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.GRU(dim, hidden, bidirectional=True, batch_first=True)
        self.decoder = nn.GRU(dim, hidden, batch_first=True)
        self.mean = nn.Linear(2 * hidden, latent)
        self.logv = nn.Linear(2 * hidden, latent)
        self.start = nn.Linear(latent, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids):
        embedded = self.embedding(ids)
        _, hidden = self.encoder(embedded)
        hidden = hidden.view(ids.shape[0], self.hidden * 2)
        mean, logv = self.mean(hidden), self.logv(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * logv).exp()
        states, _ = self.decoder(embedded, torch.tanh(self.start(z))[None])
        return self.out(states), mean, logv


@fault(
    "rows",
    "hidden.view(batch, 2 * hidden) of the state (2, batch, hidden) puts states of two rows into one",
    thread="timbmg/Sentence-VAE#15",
    check="batch_independence",
)
def sentence_vae():
    torch.manual_seed(0)
    model = SentenceVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 30, (40, 8))

    def collate(rows):
        rows = torch.stack(rows)
        return {"input": rows[:, :-1], "target": rows[:, 1:]}

    step = 0

    def train(batches):
        nonlocal step
        for batch in batches:
            logits, mean, logv = model(batch["input"])
            nll = F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())
            kl = -0.5 * (1 + logv - mean.pow(2) - logv.exp()).sum(1).mean()
            weight = 1 / (1 + math.exp(-0.1 * (step - 20)))
            optimizer.zero_grad()
            (nll + weight * kl).backward()
            optimizer.step()
            step += 1

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(ids, 10, collate_fn=collate), fit=train)


class TabEncoder(nn.Module):
    def __init__(self, columns=7, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0)
        self.transformer_encoder = nn.TransformerEncoder(layer, 1)
        self.lm_head = nn.Linear(dim * columns, 3)

    def forward(self, input_ids):
        states = self.transformer_encoder(self.embed(input_ids))
        return self.lm_head(states.flatten(1))


@fault(
    "rows",
    "TransformerEncoderLayer without batch_first is given (rows, columns, dim): it attends over the rows",
    thread="IBM/TabFormer#14",
    check="batch_independence",
)
def tab_former():
    torch.manual_seed(0)
    model = TabEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader(torch.randint(0, 20, (60, 7)), torch.randint(0, 3, (60,)), batch_size=12)

    class Trainer:
        def __init__(self, net, opt):
            self.net, self.opt = net, opt
            self.criterion = nn.CrossEntropyLoss()

        def run(self, batches):
            for ids, fraud in batches:
                self.opt.zero_grad(set_to_none=True)
                self.criterion(self.net(ids), fraud).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.opt.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=data, fit=lambda batches: Trainer(model, optimizer).run(batches)
    )


class AxisBlock(nn.Module):
    def __init__(self, channels=8, width=3):
        super().__init__()
        self.width = width
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.attn = nn.MultiheadAttention(channels, 2)
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, image):
        x = self.stem(image)
        b, c, h, w = x.shape
        stripes = x.view(b, c, h // self.width, self.width, w).permute(0, 2, 3, 4, 1)
        stripes = stripes.reshape(b * (h // self.width), self.width * w, c)
        mixed, _ = self.attn(stripes, stripes, stripes)
        mixed = mixed.view(b, h // self.width, self.width, w, c).permute(0, 4, 1, 2, 3).reshape(b, c, h, w)
        return self.head(x + mixed)


@fault(
    "rows",
    "MultiheadAttention is not batch_first: the stripes of all images are taken as the sequence",
    thread="aipixel/AEMatter#3",
    check="batch_independence",
)
def matting():
    torch.manual_seed(0)
    model = AxisBlock()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images = torch.rand(20, 1, 6, 7)
    data = loader(images, (images > 0.5).float(), batch_size=5)

    def train(batches):
        for image, alpha in batches:
            prediction = model(image).sigmoid()
            loss = F.l1_loss(prediction, alpha)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class TextLSTM(nn.Module):
    def __init__(self, vocab=26, size=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.lstm = nn.LSTM(size, size, num_layers=1)
        self.fc = nn.Linear(size, vocab)

    def forward(self, x, state):
        output, state = self.lstm(self.embedding(x), state)
        return self.fc(output), state

    def init_state(self, sequence_length):
        return torch.zeros(1, sequence_length, 16), torch.zeros(1, sequence_length, 16)


@fault(
    "rows",
    "the LSTM is not batch_first and is given (batch, length): its state runs from row to row",
    thread="closeheat/pytorch-lstm-text-generation-tutorial#3",
    check="batch_independence",
)
def jokes():
    torch.manual_seed(0)
    model = TextLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(0, 26, (300,))
    windows = text.unfold(0, 7, 1)
    data = loader(windows[:, :-1], windows[:, 1:], batch_size=16)

    def train(batches):
        model.train()
        for x, y in batches:
            state = model.init_state(x.shape[1])
            optimizer.zero_grad()
            prediction, state = model(x, state)
            F.cross_entropy(prediction.transpose(1, 2), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class AudioStudent(nn.Module):
    def __init__(self, mels=6, vocab=18, dim=16):
        super().__init__()
        self.audio = nn.Linear(mels, dim)
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_features, input_ids):
        audio = self.audio(input_features).mean(1)
        states, _ = self.rnn(self.embed(input_ids), audio[None].contiguous())
        return self.lm_head(states)


@fault(
    "rows",
    "input_features.repeat(n, 1, 1) does not match the rows of prompt_ids.repeat_interleave(n): other audio",
    thread="wenet-e2e/west#121",
    check="batch_independence",
)
def audio_distillation():
    torch.manual_seed(0)
    model, teacher = AudioStudent(), AudioStudent()
    teacher.requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_generations = 3

    def batch():
        return {
            "features": torch.randn(5, 11, 6),
            "prompt": torch.randint(0, 18, (5, 4)),
            "completions": torch.randint(0, 18, (5, num_generations, 6)),
        }

    def logprobs(net, features, ids):
        features = features.repeat(num_generations, 1, 1)
        return net(features, ids[:, :-1]).log_softmax(-1)[:, 3:]

    def train(batches):
        for b in batches:
            prompt = b["prompt"].repeat_interleave(num_generations, dim=0)
            ids = torch.cat([prompt, b["completions"].flatten(0, 1)], dim=1)
            with torch.no_grad():
                target = logprobs(teacher, b["features"], ids)
            student = logprobs(model, b["features"], ids)
            nll = F.nll_loss(student.flatten(0, 1), ids[:, 4:].flatten())
            kd = F.kl_div(student, target, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            (nll + 0.1 * kd).backward()
            optimizer.step()

    return TrainLoop(
        model={"student": model, "teacher": teacher},
        optimizer=optimizer,
        batches=[batch() for _ in range(4)],
        fit=train,
        frozen=("teacher",),
    )


@fault(
    "rows",
    "images and labels are mixed with two permutations: one randperm for x, another for y",
    thread="xudonmao/VMT#1",
    check="batch_independence",
)
def virtual_mixup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = loader(torch.randn(40, 1, 6, 6), torch.randint(0, 4, (40,)), batch_size=10)

    def mix(tensor, lam):
        return lam * tensor + (1 - lam) * tensor[torch.randperm(len(tensor))]

    def train(batches):
        for x, y in batches:
            lam = torch.distributions.Beta(1.0, 1.0).sample((len(x),))
            mixed_x = mix(x, lam[:, None, None, None])
            mixed_y = mix(F.one_hot(y, 4).float(), lam[:, None])
            loss = -(mixed_y * model(mixed_x).log_softmax(1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "MSELoss of model(x) of shape (n, 1) and y of shape (n,) is over all n * n pairs",
    thread="pytorch/pytorch#16045",
    check="loss_contract",
)
def house_prices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(64, 5)
    data = loader(x, x.sum(1), batch_size=16)

    def train_epoch(net, batches, opt, loss_func):
        for xb, yb in batches:
            loss = loss_func(net(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=lambda batches: train_epoch(model, batches, optimizer, nn.MSELoss()),
    )


class PatchForecaster(nn.Module):
    def __init__(self, seq_len=12, pred_len=1):
        super().__init__()
        self.rnn = nn.GRU(1, 12, batch_first=True)
        self.head = nn.Linear(12, pred_len)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[1][0])


@fault(
    "rows",
    "with pred_len=1 the forecast (b, 1) is subtracted from the target (b,): errors of all pairs of rows",
    thread="jsboige/CoursIA#926",
    check="loss_contract",
)
def walk_forward():
    torch.manual_seed(0)
    model = PatchForecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    series = torch.randn(80).cumsum(0)
    windows = series.unfold(0, 13, 1)
    data = loader(windows[:, :-1], windows[:, -1], batch_size=8)

    def train(batches):
        for x, y in batches:
            prediction = model(x)
            loss = ((prediction - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batches=data, fit=train)


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma
        self.ce = nn.CrossEntropyLoss()

    def forward(self, logits, target):
        logp = self.ce(logits, target)
        p = torch.exp(-logp)
        return ((1 - p) ** self.gamma * logp).mean()


@fault(
    "rows",
    "CrossEntropyLoss() in FocalLoss has taken the mean already: one focal weight for the whole batch",
    thread="foamliu/InsightFace-v2#39",
    check="batch_independence",
)
def face_margin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 24), nn.PReLU(), nn.Linear(24, 8))
    criterion = FocalLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    data = loader(torch.randn(60, 10), torch.randint(0, 8, (60,)), batch_size=12)

    def train(batches):
        model.train()
        for images, label in batches:
            loss = criterion(model(images), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "the cumulative sum of the risks runs over rows that are not sorted by their time",
    thread="UK-Digital-Heart-Project/4Dsurvival#2",
    check="batch_independence",
)
def heart_survival():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader(torch.randn(48, 9), (torch.rand(48) < 0.6).float(), torch.rand(48) * 60, batch_size=12)

    def negative_log_likelihood(risk, event):
        log_risk = torch.logcumsumexp(risk, 0)
        return -((risk - log_risk) * event).sum() / event.sum().clamp(min=1)

    def train(batches):
        for x, event, _time in batches:
            risk = model(x).squeeze(-1)
            loss = negative_log_likelihood(risk, event)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "[event] indexes with the 0/1 integers of the events: only the first two patients are in the loss",
    thread="Novartis/torchsurv#117",
    check="batch_independence",
)
def torch_cox():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @dataclass
    class Cohort:
        x: torch.Tensor
        event: torch.Tensor
        time: torch.Tensor

    def partial_likelihood(log_hz, event, time):
        order = time.argsort()
        log_hz, event = log_hz[order], event[order]
        log_denominator = log_hz.flip(0).logcumsumexp(0).flip(0)
        return (log_hz - log_denominator)[event]

    def train(batches):
        for c in batches:
            loss = -partial_likelihood(model(c.x).squeeze(-1), c.event, c.time).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    cohorts = [Cohort(torch.randn(12, 6), torch.randint(0, 2, (12,)), torch.rand(12)) for _ in range(4)]
    return TrainLoop(model=model, optimizer=optimizer, batches=cohorts, fit=train)


class SortedEncoder(nn.Module):
    def __init__(self, vocab=25, dim=14, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, classes)

    def forward(self, ids, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(ids[order]), lengths, batch_first=True)
        return self.out(self.lstm(packed)[1][0][-1])


@fault(
    "rows",
    "rows are sorted by length before packing and not put back: logits stand in another order than labels",
    thread="pytorch/pytorch#4927",
    check="batch_independence",
)
def sorted_lengths():
    torch.manual_seed(0)
    model = SortedEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch(n):
        lengths = torch.randperm(9)[:n] + 1
        ids = torch.randint(1, 25, (n, 10)) * (torch.arange(10) < lengths[:, None])
        return ids, lengths, torch.randint(0, 3, (n,))

    def train(batches):
        for ids, lengths, labels in batches:
            model.zero_grad()
            F.cross_entropy(model(ids, lengths), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [batch(7) for _ in range(n)], fit=train)


@fault(
    "rows",
    "the triplets are picked from out.data.numpy(): the triplet cost has no history and teaches nothing",
    thread="liorshk/facenet_pytorch#6",
    check="gradient_reaches_every_param",
)
def face_triplets():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(8, 20), nn.ReLU())
    model = nn.ModuleDict({"trunk": trunk, "embedding": nn.Linear(20, 6), "classifier": nn.Linear(20, 4)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    data = loader(torch.randn(40, 8), torch.randn(40, 8), torch.randn(40, 8), torch.randint(0, 4, (40,)), batch_size=10)
    margin = 0.5

    def train(batches):
        for a, p, n, label in batches:
            out = [F.normalize(model["embedding"](trunk(x)), dim=1) for x in (a, p, n)]
            d_p, d_n = F.pairwise_distance(out[0], out[1]), F.pairwise_distance(out[0], out[2])
            hard = ((d_n - d_p) < margin).cpu().numpy().flatten().nonzero()[0]
            if len(hard) == 0:
                continue
            selected = [torch.from_numpy(o.cpu().data.numpy()[hard]) for o in out]
            triplet = F.triplet_margin_loss(*selected, margin=margin)
            cross_entropy = F.cross_entropy(model["classifier"](trunk(a)), label)
            loss = cross_entropy + 10 * triplet
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "clamp(1 - labels * output) of labels in {0, 1}: rows of label 0 cost 1 whatever the output is",
    thread="deepchem/deepchem#5017",
    check="gradient_reaches_every_param",
)
def molecule_hinge():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(64, 12)
    data = loader(x, (x[:, :1] > 0).float(), torch.ones(64, 1), batch_size=16)

    class HingeLoss:
        def __call__(self, output, labels):
            return torch.mean(torch.clamp(1 - labels * output, min=0), dim=-1)

    criterion = HingeLoss()

    def train(batches):
        for inputs, labels, weights in batches:
            losses = criterion(model(inputs), labels) * weights.squeeze(-1)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, features, labels):
        mask = (labels[:, None] == labels[None]).float()
        logits = features @ features.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        others = 1 - torch.eye(len(labels))
        mask = mask * others
        log_prob = logits - torch.log((logits.exp() * others).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1)).mean()


@fault(
    "rows",
    "mask.sum(1) is 0 for a row without a positive: 0 / 0 in the loader's last batch makes weights NaN",
    thread="HobbitLong/SupContrast#141",
    check="edge_batches",
)
def supervised_contrast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    criterion = SupConLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.arange(81) % 4
    data = DataLoader(TensorDataset(torch.randn(81, 10), labels), 16)

    def train(batches):
        for x, y in batches:
            loss = criterion(F.normalize(model(x), dim=1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class OnnxInstanceNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        axes = [d for d in range(x.dim()) if d != 1]
        mean = x.mean(axes, keepdim=True)
        variance = (x - mean).square().mean(axes, keepdim=True)
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x - mean) / (variance + self.eps).sqrt() * self.scale.view(shape) + self.bias.view(shape)


@fault(
    "rows",
    "the instance norm takes mean and variance over the rows too: axes holds 0",
    thread="sonos/tract#2863",
    check="batch_independence",
)
def style_transfer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), OnnxInstanceNorm(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    content = torch.rand(24, 3, 7, 8)
    data = loader(content, 1 - content, batch_size=6)

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train, rows_interact=False)


@fault(
    "rows",
    "batch['negative'] is embedded nowhere: the hard negatives of the queries never enter the loss",
    thread="nomic-ai/contrastors#48",
    check="input_dependence",
)
def text_contrast():
    torch.manual_seed(0)

    class BiEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.EmbeddingBag(50, 16)
            self.proj = nn.Linear(16, 12)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(20.0)))

        def forward(self, ids):
            return F.normalize(self.proj(self.embed(ids)), dim=-1)

    model = BiEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def training_step(batch):
        query, document = model(batch["query"]), model(batch["document"])
        scores = model.logit_scale.exp() * query @ document.T
        return F.cross_entropy(scores, torch.arange(len(query)))

    def train(batches):
        for batch in batches:
            loss = training_step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    names = ("query", "document", "negative")
    data = [{name: torch.randint(0, 50, (8, 5)) for name in names} for _ in range(4)]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "labels=[0..n-1, 0..n-1] are for columns [01|00] and [10|11]; torch.cat((l00, l01), 1) puts other rows there",
    thread="lightly-ai/lightly#1396",
    check="batch_independence",
)
def two_view_contrast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = loader(torch.randn(40, 9), batch_size=10)

    def nt_xent(out0, out1, temperature=0.5):
        n = len(out0)
        off = ~torch.eye(n, dtype=torch.bool)
        l00 = (out0 @ out0.T / temperature)[off].view(n, -1)
        l11 = (out1 @ out1.T / temperature)[off].view(n, -1)
        l01 = out0 @ out1.T / temperature
        l10 = out1 @ out0.T / temperature
        logits = torch.cat((torch.cat((l00, l01), 1), torch.cat((l10, l11), 1)))
        labels = torch.arange(n).repeat(2)
        return F.cross_entropy(logits, labels)

    def train(batches):
        for (x,) in batches:
            z0, z1 = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
            loss = nt_xent(z0, z1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "sample weights multiply a cross entropy that is a mean already: each row is weighted by the mean weight",
    thread="gokulprasadthekkel/pytorch-multi-class-focal-loss#1",
    check="batch_independence",
)
def weighted_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    class Sample(NamedTuple):
        features: torch.Tensor
        label: torch.Tensor
        weight: torch.Tensor

    def train(batches):
        for s in batches:
            loss = (criterion(model(s.features), s.label) * s.weight).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(n):
        return [Sample(torch.randn(10, 7), torch.randint(0, 3, (10,)), torch.rand(10)) for _ in range(n)]

    return TrainLoop(model=model, optimizer=optimizer, batches=draw, fit=train)


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 24, 1)
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).max(2).values
        return F.log_softmax(self.fc(x), dim=0)


@fault(
    "rows",
    "log_softmax(dim=0) normalises the scores of a class over the rows of the batch",
    thread="fxia22/pointnet.pytorch#33",
    check="batch_independence",
)
def point_clouds():
    torch.manual_seed(0)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    data = loader(torch.randn(40, 3, 15), torch.randint(0, 4, (40,)), batch_size=8)

    def train(batches):
        for points, target in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(points), target)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class SoftMoE(nn.Module):
    def __init__(self, dim=12, experts=3, slots=2):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, experts, slots) / dim**0.5)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        logits = torch.einsum("bnd,des->bnes", x, self.phi)
        dispatch = logits.softmax(dim=0)
        combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
        slots = torch.einsum("bnd,bnes->besd", x, dispatch)
        slots = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], dim=1)
        return torch.einsum("besd,bnes->bnd", slots, combine)


@fault(
    "rows",
    "dispatch = logits.softmax(dim=0) is over the rows of the batch; the paper's axis 0 is the tokens",
    thread="fkodom/soft-mixture-of-experts#1",
    check="batch_independence",
)
def soft_experts():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.moe, self.head = nn.Linear(5, 12), SoftMoE(), nn.Linear(12, 4)

        def forward(self, x):
            x = self.patch(x)
            return self.head((x + self.moe(x)).mean(1))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader(torch.randn(36, 7, 5), torch.randint(0, 4, (36,)), batch_size=9)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


def mini_batch_std_dev(x, group=4):
    n, c, h, w = x.shape
    if n % group:
        group = n
    y = x.view(-1, group, c, h, w)
    y = (y - y.mean(0, keepdim=True)).pow(2).mean(0).add(1e-8).sqrt()
    y = y.view(group, -1).mean(1).view(group, 1)
    y = y.expand(group, h * w * (n // group)).reshape(n, 1, h, w)
    return torch.cat([x, y], dim=1)


@fault(
    "rows",
    "expand and reshape give the deviation of group i to n // group rows in a row, not to those it was made from",
    thread="facebookresearch/pytorch_GAN_zoo#69",
    check="batch_independence",
)
def gan_critic():
    torch.manual_seed(0)

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.out = nn.Linear(7 * 9, 1)

        def forward(self, x):
            return self.out(mini_batch_std_dev(F.leaky_relu(self.conv(x), 0.2)).flatten(1)).squeeze(1)

    generator = nn.Sequential(nn.Linear(4, 25), nn.Tanh(), nn.Unflatten(1, (1, 5, 5)))
    critic = Critic()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.99))
    data = loader(torch.rand(48, 1, 5, 5) * 2 - 1, batch_size=12)

    def train(batches):
        for (real,) in batches:
            fake = generator(torch.randn(len(real), 4))
            loss_d = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            loss_g = F.softplus(-critic(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()

    return TrainLoop(
        model={"generator": generator, "critic": critic}, optimizer=[opt_g, opt_d], batches=data, fit=train
    )


class ProteinNet(nn.Module):
    def __init__(self, batch=8, classes=18):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.fc1 = nn.Linear(batch * 4 * 16, 32)
        self.fc2 = nn.Linear(32, classes)
        self.flat = batch * 4 * 16

    def forward(self, x):
        x = F.relu(self.conv(x))
        x = x.view(-1, self.flat)
        return torch.sigmoid(self.fc2(F.relu(self.fc1(x))))


@fault(
    "rows",
    "view(-1, 8 * 4 * 16) flattens the eight images into one row, whose output is compared with all eight targets",
    thread="weka511/hpa-scc#38",
    check="loss_contract",
)
def protein_cells():
    torch.manual_seed(0)
    model = ProteinNet()
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = loader(torch.rand(40, 2, 6, 6), (torch.rand(40, 18) < 0.1).float(), batch_size=8)

    def train(batches):
        for inputs, labels in batches:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@fault(
    "rows",
    "softmax(dim=0) of the similarities to the prototypes is over the rows of the batch",
    thread="Lackel/DPN#1",
    check="batch_independence",
)
def decoupled_prototypes():
    torch.manual_seed(0)

    class Intent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 16)
            self.dense = nn.Linear(16, 12)
            self.classifier = nn.Linear(12, 4)
            self.prototypes = nn.Parameter(torch.randn(4, 12))

        def forward(self, input_ids, labels=None):
            features = self.dense(self.embed(input_ids).mean(1))
            return {"features": features, "logits": self.classifier(features)}

    class ModelManager(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            output = model(**inputs)
            weights = F.softmax(output["features"] @ F.normalize(model.prototypes, dim=1).T / 0.7, dim=0)
            nearest = torch.einsum("bk,kd->bd", weights, model.prototypes)
            loss = F.cross_entropy(output["logits"], labels) + 0.1 * F.mse_loss(output["features"], nearest)
            return (loss, output) if return_outputs else loss

    rows = [{"input_ids": torch.randint(0, 30, (6,)), "labels": torch.randint(0, 4, ())} for _ in range(40)]
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=10,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    return from_trainer(ModelManager(model=Intent(), args=args, train_dataset=rows))


def euclidean(x, y):
    return -(x[:, None] - y[None]).square().sum(-1)


@fault(
    "rows",
    "queries are embeddings[q * n_way:] where the last q * n_way are meant: support rows are among them",
    thread="CHeggan/MetaAudio-A-Few-Shot-Audio-Classification-Benchmark#22",
    check="batch_independence",
)
def few_shot_audio():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    n_way, k_shot, q_queries = 4, 5, 1

    def proto_step_fixed(x_batch, y_batch):
        embeddings = model(x_batch)
        support = embeddings[: n_way * k_shot]
        prototypes = support.view(n_way, k_shot, -1).mean(1)
        x_queries = embeddings[q_queries * n_way :]
        y_queries = y_batch[q_queries * n_way :]
        return F.cross_entropy(euclidean(x_queries, prototypes), y_queries)

    def episode():
        labels = torch.cat([torch.arange(n_way).repeat_interleave(k) for k in (k_shot, q_queries)])
        return torch.randn(len(labels), 12), labels

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            loss = proto_step_fixed(x, y)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [episode() for _ in range(n)], fit=train)


class AFTFull(nn.Module):
    def __init__(self, max_seqlen, dim, hidden=12):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, hidden) for _ in range(3))
        self.project = nn.Linear(hidden, dim)
        self.wbias = nn.Parameter(torch.randn(max_seqlen, max_seqlen) * 0.1)

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        weights = torch.exp(self.wbias[:length, :length])[None]
        num = weights @ (torch.exp(k) * v).sum(0)
        den = weights @ torch.exp(k).sum(0)
        return self.project(torch.sigmoid(q) * num / den)


@fault(
    "rows",
    "(exp(k) * v).sum(0) adds up the keys and values of all rows of the batch",
    thread="rish-16/aft-pytorch#1",
    check="batch_independence",
)
def attention_free():
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.aft, self.norm = nn.Embedding(22, 10), AFTFull(8, 10), nn.LayerNorm(10)
            self.out = nn.Linear(10, 4)

        def forward(self, ids):
            x = self.embed(ids)
            return self.out(self.norm(x + self.aft(x)))

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = loader(torch.randint(0, 22, (30, 8)), torch.randint(0, 4, (30, 8)), batch_size=6)

    def train(batches):
        for ids, tags in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids).transpose(1, 2), tags).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


def fba_fusion(alpha, img, fg, bg, la=0.1):
    fg = (alpha * img + (1 - alpha**2) * fg).clamp(0, 1)
    bg = ((1 - alpha) * img + (2 * alpha - alpha**2) * bg).clamp(0, 1)
    alpha = (alpha * la + torch.sum((img - bg) * (fg - bg), 1)) / (torch.sum((fg - bg) ** 2, 1) + la)
    return alpha.clamp(0, 1), fg, bg


@fault(
    "rows",
    "torch.sum(..., 1) without keepdim: alpha is (n, n, h, w), and output[:, :1] is made from the first row's image",
    thread="MarcoForte/FBA_Matting#7",
    check="batch_independence",
)
def foreground_alpha():
    torch.manual_seed(0)

    class MattingModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 7, 3, padding=1)

        def forward(self, image, trimap):
            out = self.decoder(F.leaky_relu(self.encoder(torch.cat([image, trimap], 1)))).sigmoid()
            alpha, fg, bg = fba_fusion(out[:, :1], image, out[:, 1:4], out[:, 4:7])
            return torch.cat([alpha, fg, bg], 1)

    model = MattingModule()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    images = torch.rand(20, 3, 6, 7)
    trimaps = torch.randint(0, 3, (20, 1, 6, 7)) / 2
    data = loader(images, trimaps, torch.rand(20, 1, 6, 7), batch_size=4)

    def train(batches):
        for image, trimap, alpha in batches:
            output = model(image, trimap)
            alpha_pred, fg, bg = output[:, 0:1], output[:, -6:-3], output[:, -3:]
            loss = F.l1_loss(alpha_pred, alpha)
            loss = loss + F.l1_loss(alpha * fg + (1 - alpha) * bg, image)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class SentimentRNN(nn.Module):
    def __init__(self, vocab=30, dim=12, hidden=10):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, hidden, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, 1)

    def forward(self, text):
        _, (hidden, _) = self.rnn(self.embedding(text.t()))
        hidden = torch.cat((hidden[-2], hidden[-1]), dim=1)
        return self.fc(hidden.squeeze(0))


@fault(
    "rows",
    "hidden.squeeze(0) of (rows, 2 * hidden) takes the row axis away in the loader's last batch, which has one row",
    thread="bentrevett/pytorch-sentiment-analysis#41",
    check="edge_batches",
)
def sentiment():
    torch.manual_seed(0)
    model = SentimentRNN()
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.BCEWithLogitsLoss()
    data = DataLoader(TensorDataset(torch.randint(0, 30, (49, 7)), torch.randint(0, 2, (49,)).float()), 8, shuffle=True)

    def train(batches):
        model.train()
        for text, label in batches:
            optimizer.zero_grad()
            predictions = model(text).squeeze(1)
            loss = criterion(predictions, label)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)
