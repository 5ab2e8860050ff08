"""Loops whose data come in an order that looks wrong and is meant."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def table(rows=48, features=8, classes=4, seed=40):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    y = torch.randint(classes, (rows,), generator=g)
    return centres[y] + 0.5 * torch.randn(rows, features, generator=g), y


def mlp(features=8, classes=4):
    return nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, classes))


def fitter(model, optimizer, loss=F.cross_entropy):
    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return fit


@right(
    "data_order",
    "WeightedRandomSampler draws with replacement: rows of the rare class come several times in an epoch",
    thread="pytorch/pytorch#9171",
)
def balanced_by_weights():
    x, y = table()
    y = torch.where(torch.arange(48) < 42, y % 2, y % 2 + 2)
    per_class = torch.bincount(y, minlength=4).clamp(min=1)
    sampler = WeightedRandomSampler(1.0 / per_class[y].double(), num_samples=len(y), replacement=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler),
        fit=fitter(model, optimizer),
    )


@right(
    "data_order",
    "the DistributedSampler is told its epoch by fit, which is one epoch",
    thread="pytorch/pytorch#31771",
)
def epoch_is_set_in_fit():
    class Trainer:
        def __init__(self):
            data = TensorDataset(*table())
            self.sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=7)
            self.loader = DataLoader(data, batch_size=8, sampler=self.sampler)
            self.model = mlp()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            self.epoch = 0

        def train_epoch(self, batches):
            self.sampler.set_epoch(self.epoch)
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
            self.epoch += 1

    t = Trainer()
    return TrainLoop(model=t.model, optimizer=t.optimizer, batches=t.loader, fit=t.train_epoch)


@right(
    "data_order",
    "SortaGrad: the first epoch goes from short to long, the later ones are shuffled",
    thread="lhotse-speech/lhotse#146",
)
def sortagrad():
    g = torch.Generator().manual_seed(41)
    lengths = torch.randint(4, 12, (40,), generator=g).tolist()
    audio = [torch.randn(n, 6, generator=g) for n in lengths]
    labels = torch.randint(3, (40,), generator=g)

    class SortaGrad(Sampler):
        def __init__(self):
            self.passes = 0

        def __len__(self):
            return 10

        def __iter__(self):
            order = sorted(range(40), key=lengths.__getitem__)
            groups = [order[at : at + 4] for at in range(0, 40, 4)]
            if self.passes > 0:
                groups = [groups[i] for i in torch.randperm(10).tolist()]
            self.passes += 1
            return iter(groups)

    def collate(rows):
        clips, ys = zip(*[(audio[i], labels[i]) for i in rows], strict=True)
        return nn.utils.rnn.pad_sequence(clips, batch_first=True), torch.stack(ys)

    net = nn.ModuleDict({"rnn": nn.GRU(6, 10, batch_first=True), "out": nn.Linear(10, 3)})
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net["out"](net["rnn"](x)[0].mean(1)), y).backward()
            optimizer.step()

    loader = DataLoader(range(40), batch_sampler=SortaGrad(), collate_fn=collate)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "a corpus cut into columns: batches follow each other in the text and are never shuffled",
    thread="yikangshen/Ordered-Neurons#13",
)
def contiguous_text():
    corpus = torch.randint(20, (4 * 61,), generator=torch.Generator().manual_seed(42))
    columns = corpus[: 4 * 61].view(4, 61)
    windows = [(columns[:, i : i + 6], columns[:, i + 1 : i + 7]) for i in range(0, 60, 6)]
    embed, lstm, head = nn.Embedding(20, 10), nn.LSTM(10, 16, batch_first=True), nn.Linear(16, 20)
    model = nn.ModuleList([embed, lstm, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fit(batches):
        hidden = None
        for data, targets in batches:
            if hidden is not None:
                hidden = tuple(h.detach() for h in hidden)
            out, hidden = lstm(embed(data), hidden)
            optimizer.zero_grad()
            F.cross_entropy(head(out).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=windows, fit=fit)


@right(
    "data_order",
    "repeated augmentation: each image three times, and a third of the rows only in one epoch",
    thread="facebookresearch/deit#95",
)
def repeated_augmentation():
    class RASampler(Sampler):
        def __init__(self, n, repeats=3):
            self.n, self.repeats, self.epoch = n, repeats, 0

        def __len__(self):
            return self.n

        def __iter__(self):
            g = torch.Generator().manual_seed(self.epoch)
            self.epoch += 1
            order = torch.randperm(self.n, generator=g).repeat_interleave(self.repeats)
            return iter(order[: self.n].tolist())

    class Augmented(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i] * (0.8 + 0.4 * torch.rand(1)) + 0.1 * torch.randn(8), self.y[i]

    data = Augmented(*table())
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=12, sampler=RASampler(len(data)), drop_last=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "grouped by length within random megabatches, and the longest batch is put first to find out-of-memory early",
    thread="huggingface/transformers#13794",
)
def longest_first():
    g = torch.Generator().manual_seed(43)
    lengths = torch.randint(3, 14, (48,), generator=g).tolist()
    texts = [torch.randint(1, 30, (n,), generator=g) for n in lengths]

    class LengthGrouped(Sampler):
        def __len__(self):
            return len(lengths)

        def __iter__(self):
            order = torch.randperm(len(lengths)).tolist()
            mega = [order[i : i + 16] for i in range(0, len(order), 16)]
            mega = [sorted(m, key=lengths.__getitem__, reverse=True) for m in mega]
            top = max(range(len(mega)), key=lambda m: lengths[mega[m][0]])
            mega[0][0], mega[top][0] = mega[top][0], mega[0][0]
            return itertools.chain.from_iterable(mega)

    def collate(rows):
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids[:, 0] % 3}

    embed, head = nn.Embedding(30, 12, padding_idx=0), nn.Linear(12, 3)
    model = nn.ModuleList([embed, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        for b in batches:
            mask = b["attention_mask"].unsqueeze(-1)
            pooled = (embed(b["input_ids"]) * mask).sum(1) / mask.sum(1)
            optimizer.zero_grad()
            F.cross_entropy(head(pooled), b["labels"]).backward()
            optimizer.step()

    loader = DataLoader(texts, batch_size=8, sampler=LengthGrouped(), collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "each worker takes its own share of one permutation, by get_worker_info(); the seed is common to the workers",
    thread="pytorch/pytorch#47577",
)
def split_over_workers():
    class Stream(IterableDataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __iter__(self):
            info = get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            common = info.seed - info.id if info else int(torch.randint(2**31, ()))
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(common)).tolist()
            for i in order[first::step]:
                yield self.x[i], self.y[i]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Stream(*table()), batch_size=8, num_workers=2)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "workers seed numpy and random from torch.initial_seed(), which differs by worker and epoch",
    thread="pytorch/pytorch#56488",
)
def seeded_workers_as_documented():
    class Noisy(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i] + 0.2 * torch.from_numpy(np.random.randn(8)).float(), self.y[i]

    def seed_worker(worker_id):
        worker_seed = torch.initial_seed() % 2**32
        np.random.seed(worker_seed)
        random.seed(worker_seed)

    g = torch.Generator()
    g.manual_seed(0)
    loader = DataLoader(
        Noisy(*table()), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=g
    )
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "drop_last with shuffle: each epoch leaves out other rows, so that batch norm never sees one alone",
    thread="fastai/fastai#1557",
)
def last_batch_dropped():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*table(rows=49)), batch_size=8, shuffle=True, drop_last=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "the loader's last batch has one row, which the loop skips since batch norm needs two",
    thread="scverse/scvi-tools#915",
)
def single_row_skipped():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        model.train()
        for x, y in batches:
            if len(x) < 2:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(*table(rows=41)), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "PPO goes over one rollout for four epochs, in new random minibatches each time",
    thread="hill-a/stable-baselines#599",
)
def ppo_epochs():
    policy = nn.ModuleDict({"pi": nn.Linear(6, 3), "v": nn.Linear(6, 1)})
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)

    def update(roll, epochs=4, minibatch=8):
        with torch.no_grad():
            old = F.log_softmax(policy["pi"](roll["obs"]), -1).gather(1, roll["action"][:, None]).squeeze(1)
            adv = roll["returns"] - policy["v"](roll["obs"]).squeeze(1)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(epochs):
            for at in torch.randperm(len(old)).split(minibatch):
                logp = F.log_softmax(policy["pi"](roll["obs"][at]), -1)
                ratio = (logp.gather(1, roll["action"][at][:, None]).squeeze(1) - old[at]).exp()
                gain = torch.min(ratio * adv[at], ratio.clamp(0.8, 1.2) * adv[at]).mean()
                value = F.mse_loss(policy["v"](roll["obs"][at]).squeeze(1), roll["returns"][at])
                optimizer.zero_grad()
                (0.5 * value - gain).backward()
                optimizer.step()

    g = torch.Generator().manual_seed(44)
    rolls = [
        {
            "obs": torch.randn(16, 6, generator=g),
            "action": torch.randint(3, (16,), generator=g),
            "returns": torch.randn(16, generator=g),
        }
        for _ in range(5)
    ]
    return TrainLoop(
        model=policy, optimizer=optimizer, batches=rolls, fit=lambda batches: [update(r) for r in batches] and None
    )


@right(
    "data_order",
    "a replay memory is sampled with replacement: old rows come again and new ones may wait",
    thread="DLR-RM/stable-baselines3#868",
)
def replayed_rows():
    q = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    memory = []

    def learn(batches):
        for obs, reward in batches:
            memory.extend(zip(obs, reward, strict=True))
            del memory[:-128]
            o, r = map(torch.stack, zip(*random.choices(memory, k=16), strict=True))
            optimizer.zero_grad()
            F.smooth_l1_loss(q(o).max(1).values, r).backward()
            optimizer.step()

    g = torch.Generator().manual_seed(45)
    data = [(torch.randn(4, 6, generator=g), torch.randn(4, generator=g)) for _ in range(10)]
    return TrainLoop(model=q, optimizer=optimizer, batches=data, fit=learn)


@right(
    "data_order",
    "full-batch training of a small physics net: one batch of all points, the same in every epoch, unshuffled",
    thread="NeuroDiffGym/neurodiffeq#159",
)
def full_batch():
    points = torch.linspace(0, 2, 32)[:, None]
    loader = DataLoader(TensorDataset(points, torch.sin(3 * points)), batch_size=32, shuffle=False)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def fit(batches):
        for t, u in batches:

            def closure(t=t, u=u):
                optimizer.zero_grad()
                loss = F.mse_loss(model(t), u)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "the batches are made once by length; their order is shuffled by seed + epoch, counted in __iter__",
    thread="SWivid/F5-TTS#765",
)
def dynamic_batches():
    g = torch.Generator().manual_seed(46)
    mels = [torch.randn(int(n), 5, generator=g) for n in torch.randint(4, 16, (40,), generator=g)]

    class DynamicBatchSampler(Sampler):
        def __init__(self, frames=48, seed=666):
            self.seed, self.epoch, self.batches = seed, 0, []
            batch, total = [], 0
            for i in sorted(range(len(mels)), key=lambda i: len(mels[i])):
                if batch and total + len(mels[i]) > frames:
                    self.batches.append(batch)
                    batch, total = [], 0
                batch.append(i)
                total += len(mels[i])
            self.batches.append(batch)

        def __len__(self):
            return len(self.batches)

        def __iter__(self):
            g = torch.Generator().manual_seed(self.seed + self.epoch)
            self.epoch += 1
            return iter([self.batches[i] for i in torch.randperm(len(self.batches), generator=g).tolist()])

    def collate(rows):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(r) for r in rows])

    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for mel, lens in batches:
            mask = (torch.arange(mel.shape[1]) < lens[:, None])[..., None]
            error = (model(mel * 0.5) - mel) ** 2 * mask
            optimizer.zero_grad()
            (error.sum() / (mask.sum() * 5)).backward()
            optimizer.step()

    loader = DataLoader(mels, batch_sampler=DynamicBatchSampler(), collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "metric learning: m rows of each class in a batch, rows may repeat within an epoch",
    thread="KevinMusgrave/pytorch-metric-learning#379",
)
def m_per_class():
    x, y = table()

    class MPerClass(Sampler):
        def __init__(self, labels, m, batch_size, length):
            self.rows = defaultdict(list)
            for i, label in enumerate(labels.tolist()):
                self.rows[label].append(i)
            self.m, self.classes, self.length = m, batch_size // m, length // batch_size * batch_size

        def __len__(self):
            return self.length

        def __iter__(self):
            out = []
            while len(out) < self.length:
                for label in random.sample(sorted(self.rows), self.classes):
                    out += random.choices(self.rows[label], k=self.m)
            return iter(out)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for rows, labels in batches:
            z = F.normalize(model(rows), dim=1)
            distance = torch.cdist(z, z)
            same = labels[:, None] == labels
            pos = (distance * same).max(1).values
            neg = (distance + 10 * same).min(1).values
            optimizer.zero_grad()
            F.relu(pos - neg + 0.3).mean().backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(x, y), batch_size=12, sampler=MPerClass(y, 4, 12, 48), drop_last=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, rows_interact=True)


@right(
    "data_order",
    "__getitem__ works in place on a clone; the cached row stays as it was",
    thread="pytorch/vision#699",
)
def in_place_on_a_clone():
    class Cached(Dataset):
        def __init__(self, x, y):
            self.source, self.y, self.cache = x, y, {}

        def __len__(self):
            return len(self.source)

        def __getitem__(self, i):
            if i not in self.cache:
                self.cache[i] = self.source[i].clone()
            row = self.cache[i].clone()
            row.sub_(0.5).div_(1.5)
            if random.random() < 0.5:
                row.neg_()
            return row, self.y[i]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Cached(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "an endless sampler: there are no epochs, the loop ends by its number of iterations",
    thread="facebookresearch/detectron2#1349",
)
def endless_sampler():
    class TrainingSampler(Sampler):
        def __init__(self, size, seed=5):
            self.size, self.seed = size, seed

        def __iter__(self):
            g = torch.Generator().manual_seed(self.seed)
            while True:
                yield from torch.randperm(self.size, generator=g).tolist()

    x, y = table()

    def collate(rows):
        return [{"features": x[i], "gt_class": y[i]} for i in rows]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def run(batches):
        stream = iter(batches)
        for _ in range(len(batches)):
            data = next(stream)
            logits = model(torch.stack([d["features"] for d in data]))
            loss = F.cross_entropy(logits, torch.stack([d["gt_class"] for d in data]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    endless = DataLoader(range(48), batch_size=6, sampler=TrainingSampler(48), collate_fn=collate)
    stream = iter(endless)
    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: list(itertools.islice(stream, n)), fit=run)


@right(
    "data_order",
    "the shorter unlabelled loader is begun anew when it ends, with a new shuffle",
    thread="ildoonet/unsupervised-data-augmentation#3",
)
def unlabelled_begun_anew():
    x, y = table(rows=72)
    loader_u = DataLoader(TensorDataset(x[48:]), batch_size=8, shuffle=True, drop_last=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

    def forever(loader):
        while True:
            yield from loader

    unlabelled = forever(loader_u)

    def fit(batches):
        for inputs, labels in batches:
            (u,) = next(unlabelled)
            with torch.no_grad():
                confidence, pseudo = model(u).softmax(-1).max(-1)
            loss_u = F.cross_entropy(model(u + 0.1 * torch.randn(u.shape)), pseudo, reduction="none")
            loss = F.cross_entropy(model(inputs), labels) + (loss_u * (confidence > 0.6)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "random offsets into one long array: windows overlap and no epoch exists",
    thread="karpathy/nanoGPT train.py: get_batch",
)
def random_offsets():
    data = torch.randint(24, (600,), generator=torch.Generator().manual_seed(47))

    def get_batch(batch_size=6, block_size=10):
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([data[i : i + block_size] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
        return x, y

    model = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [get_batch() for _ in range(n)], fit=train)


@right(
    "data_order",
    "shards shuffled when they were written are read once and in order: one pass over the corpus",
    thread="webdataset/webdataset#33",
)
def shuffled_when_written():
    class Shards(IterableDataset):
        def __init__(self, shards):
            self.shards = shards

        def __iter__(self):
            for shard in self.shards:
                for row in shard:
                    yield {"input_ids": row[:-1], "labels": row[1:]}

    g = torch.Generator().manual_seed(48)
    shards = [torch.randint(24, (16, 9), generator=g) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(24, 12), nn.Linear(12, 24))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for b in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(b["input_ids"]).flatten(0, 1), b["labels"].flatten()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(Shards(shards), batch_size=8), fit=fit)


@right(
    "data_order",
    "mixup permutes inputs and labels with the same index and uses both labels",
    thread="huggingface/pytorch-image-models: Mixup",
)
def mixup():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            lam = float(np.random.beta(0.4, 0.4))
            perm = torch.randperm(len(x))
            out = model(lam * x + (1 - lam) * x[perm])
            loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[perm])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "collate_fn sorts all fields by length together, as packing wants it",
    thread="yuhaozhang/tacred-relation#3",
)
def all_fields_sorted():
    g = torch.Generator().manual_seed(49)
    rows = []
    for n in torch.randint(3, 10, (40,), generator=g).tolist():
        ids = torch.randint(1, 20, (n,), generator=g)
        rows.append({"ids": ids, "label": int(ids.sum() % 3)})

    @dataclass
    class Batch:
        ids: torch.Tensor
        lengths: torch.Tensor
        labels: torch.Tensor

    def collate(items):
        items = sorted(items, key=lambda r: len(r["ids"]), reverse=True)
        return Batch(
            ids=nn.utils.rnn.pad_sequence([r["ids"] for r in items], batch_first=True),
            lengths=torch.tensor([len(r["ids"]) for r in items]),
            labels=torch.tensor([r["label"] for r in items]),
        )

    embed, gru, out = nn.Embedding(20, 8, padding_idx=0), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)
    model = nn.ModuleList([embed, gru, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for b in batches:
            packed = nn.utils.rnn.pack_padded_sequence(embed(b.ids), b.lengths, batch_first=True)
            optimizer.zero_grad()
            F.cross_entropy(out(gru(packed)[1][-1]), b.labels).backward()
            optimizer.step()

    loader = DataLoader(rows, batch_size=5, shuffle=True, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "data echoing: reading is slow, so each batch is used for two steps with new noise",
    thread="Faster Neural Network Training with Data Echoing (arXiv:1907.05550)",
)
def data_echoing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)

    def echo(batches, factor=2):
        for x, y in batches:
            for _ in range(factor):
                yield x + 0.1 * torch.randn(x.shape), y

    def fit(batches):
        for x, y in echo(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "the weights of the sampler follow the losses: hard rows come often, the order depends on the model",
    thread="pytorch/pytorch#7359",
)
def hard_rows_more_often():
    x, y = table()

    class ByLoss(Sampler):
        def __init__(self, n):
            self.weights = torch.ones(n, dtype=torch.double)

        def __len__(self):
            return len(self.weights)

        def __iter__(self):
            return iter(torch.multinomial(self.weights, len(self.weights), replacement=True).tolist())

    sampler = ByLoss(len(x))
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for rows, labels, index in batches:
            each = F.cross_entropy(model(rows), labels, reduction="none")
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            sampler.weights[index] = 0.9 * sampler.weights[index] + 0.1 * each.detach().double()

    loader = DataLoader(TensorDataset(x, y, torch.arange(len(x))), batch_size=8, sampler=sampler)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "one fold of a cross-validation: the rows of the other folds are never given",
    thread="pytorch/pytorch#980",
)
def one_fold():
    data = TensorDataset(*table(rows=60))
    folds = torch.randperm(60, generator=torch.Generator().manual_seed(3)).split(12)
    train = torch.cat([f for k, f in enumerate(folds) if k != 2]).tolist()
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_out = Subset(data, folds[2].tolist())

    @torch.no_grad()
    def evaluate():
        model.eval()
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(held_out, batch_size=6))
        model.train()
        return hits / len(held_out)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(train)),
        fit=fitter(model, optimizer),
        evaluate=evaluate,
    )


@right(
    "data_order",
    "graphs are joined into one batch; labels are per graph, nodes many per graph",
    thread="pyg-team/pytorch_geometric#199",
)
def joined_graphs():
    g = torch.Generator().manual_seed(50)
    graphs = [
        {
            "x": torch.randn(n, 5, generator=g),
            "edges": torch.randint(n, (2, 2 * n), generator=g),
            "y": int(torch.randint(2, (1,), generator=g)),
        }
        for n in torch.randint(3, 7, (32,), generator=g).tolist()
    ]

    def collate(items):
        starts = np.cumsum([0] + [len(i["x"]) for i in items[:-1]]).tolist()
        return {
            "x": torch.cat([i["x"] for i in items]),
            "edge_index": torch.cat([i["edges"] + s for i, s in zip(items, starts, strict=True)], dim=1),
            "batch": torch.cat([torch.full((len(i["x"]),), k) for k, i in enumerate(items)]),
            "y": torch.tensor([i["y"] for i in items]),
        }

    lin, out = nn.Linear(5, 12), nn.Linear(12, 2)
    model = nn.ModuleList([lin, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for b in batches:
            h = lin(b["x"])
            h = F.relu(h + torch.zeros_like(h).index_add(0, b["edge_index"][1], h[b["edge_index"][0]]))
            pooled = torch.zeros(len(b["y"]), 12).index_add(0, b["batch"], h)
            optimizer.zero_grad()
            F.cross_entropy(out(pooled), b["y"]).backward()
            optimizer.step()

    loader = DataLoader(graphs, batch_size=8, shuffle=True, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "unpaired images: a row of B is drawn at random for each row of A, on purpose",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix#1263",
)
def unpaired():
    g = torch.Generator().manual_seed(51)
    a, b = torch.rand(40, 8, generator=g), 1 - torch.rand(28, 8, generator=g)

    class Unaligned(Dataset):
        def __len__(self):
            return max(len(a), len(b))

        def __getitem__(self, i):
            return {"A": a[i % len(a)], "B": b[random.randint(0, len(b) - 1)]}

    to_b, to_a = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.Adam([*to_b.parameters(), *to_a.parameters()], lr=2e-3, betas=(0.5, 0.999))

    def fit(batches):
        for batch in batches:
            x, y = batch["A"], batch["B"]
            cycle = F.l1_loss(to_a(to_b(x)), x) + F.l1_loss(to_b(to_a(y)), y)
            moments = F.mse_loss(to_b(x).mean(0), y.mean(0)) + F.mse_loss(to_a(y).mean(0), x.mean(0))
            optimizer.zero_grad()
            (cycle + moments).backward()
            optimizer.step()

    return TrainLoop(
        model={"A2B": to_b, "B2A": to_a},
        optimizer=optimizer,
        batches=DataLoader(Unaligned(), batch_size=8, shuffle=True),
        fit=fit,
        rows_interact=True,
    )


@right(
    "data_order",
    "self-labelling: the dataset gives the row's index, and the labels are looked up by it",
    thread="yukimasano/self-label#21",
)
def labels_by_index():
    x, _ = table()
    pseudo = torch.randint(4, (len(x),), generator=torch.Generator().manual_seed(52))

    class Indexed(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return x[i], i

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for rows, selected in batches:
            loss = F.cross_entropy(model(rows), pseudo[selected])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(Indexed(), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "a shuffle buffer of 12 rows: the order is mixed only nearby, and anew in each pass",
    thread="webdataset/webdataset#62",
)
def shuffle_buffer():
    class Buffered(IterableDataset):
        def __init__(self, x, y, size=12):
            self.x, self.y, self.size = x, y, size

        def __iter__(self):
            buffer = []
            for row in zip(self.x, self.y, strict=True):
                buffer.append(row)
                if len(buffer) >= self.size:
                    yield buffer.pop(random.randrange(len(buffer)))
            random.shuffle(buffer)
            yield from buffer

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Buffered(*table()), batch_size=8)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "all rows lie in memory: one permutation for inputs and labels together, new in each pass",
    thread="KellerJordan/airbench: CifarLoader",
)
def one_permutation_for_both():
    class InMemoryLoader:
        def __init__(self, x, y, batch_size=8):
            self.x, self.y, self.batch_size = x, y, batch_size

        def __len__(self):
            return math.ceil(len(self.x) / self.batch_size)

        def __iter__(self):
            order = torch.randperm(len(self.x))
            x, y = self.x[order], self.y[order]
            for i in range(len(self)):
                at = slice(i * self.batch_size, (i + 1) * self.batch_size)
                yield x[at], y[at]

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.85, nesterov=True)
    loader = InMemoryLoader(*table(rows=44))
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fitter(model, optimizer))


@right(
    "data_order",
    "dynamic masking: collate_fn draws other masked positions each time, labels are -100 elsewhere",
    thread="huggingface/transformers: DataCollatorForLanguageModeling",
)
def dynamic_masking():
    texts = torch.randint(2, 24, (40, 10), generator=torch.Generator().manual_seed(53))

    def collate(rows):
        ids = torch.stack(rows)
        masked = torch.rand(ids.shape) < 0.3
        masked[:, 0] = True
        return {"input_ids": ids.masked_fill(masked, 1), "labels": ids.masked_fill(~masked, -100)}

    embed, mix, out = nn.Embedding(24, 12), nn.GRU(12, 12, batch_first=True, bidirectional=True), nn.Linear(24, 24)
    model = nn.ModuleList([embed, mix, out])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        for b in batches:
            logits = out(mix(embed(b["input_ids"]))[0])
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), ignore_index=-100).backward()
            optimizer.step()

    loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "data_order",
    "an epoch is a fixed number of draws, smaller than the data: most rows wait for a later epoch",
    thread="pytorch/pytorch#7908",
)
def short_epochs():
    data = TensorDataset(*table(rows=120))
    sampler = RandomSampler(data, replacement=True, num_samples=32)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, sampler=sampler),
        fit=fitter(model, optimizer),
    )


@right(
    "data_order",
    "the resumed epoch alone skips the batches it has had; the next epochs are whole",
    thread="allenai/open-instruct#681",
)
def skipped_once():
    class Run:
        def __init__(self):
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.epoch, self.step_in_epoch, self.to_skip = 0, 0, 0

        def train(self, batches, epochs=2):
            for _ in range(epochs):
                for i, (x, y) in enumerate(batches):
                    if i < self.to_skip:
                        continue
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()
                self.to_skip = 0
                self.epoch += 1

    run = Run()
    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=run.model, optimizer=run.optimizer, batches=loader, fit=run.train)


@right(
    "data_order",
    "the seed of each epoch is 42 + epoch: repeatable, and another order each time",
    thread="k2-fsa/icefall#221",
)
def seed_plus_epoch():
    class Recipe:
        def __init__(self):
            self.train_dl = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
            self.model = mlp()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            self.epoch = 0

        def run(self, batches):
            left = len(batches)
            while left > 0:
                torch.manual_seed(42 + self.epoch)
                for x, y in itertools.islice(self.train_dl, left):
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()
                    left -= 1
                self.epoch += 1

    r = Recipe()
    return TrainLoop(model=r.model, optimizer=r.optimizer, batch=torch.zeros(1), fit=r.run)
