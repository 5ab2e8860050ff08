"""Loops that see their data in a wrong order, twice, not at all, or with the labels of other rows."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def table(rows=48, features=8, classes=4, seed=30):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    y = torch.randint(classes, (rows,), generator=g)
    return centres[y] + 0.5 * torch.randn(rows, features, generator=g), y


def mlp(features=8, classes=4):
    return nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, classes))


def classifier_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@fault(
    "data_order",
    "set_epoch is never called on the DistributedSampler: each epoch has the same order",
    thread="kan-bayashi/ParallelWaveGAN#177",
    check="data_order",
)
def wavegan_trainer():
    class Trainer:
        def __init__(self, rank=0, world_size=1):
            x, y = table()
            data = TensorDataset(x, y)
            self.sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
            self.data_loader = DataLoader(data, batch_size=8, sampler=self.sampler)
            self.model = mlp()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            self.epochs = 0

        def _train_epoch(self, batches):
            for x, y in batches:
                classifier_step(self.model, self.optimizer, x, y)
            self.epochs += 1

    t = Trainer()
    return TrainLoop(model=t.model, optimizer=t.optimizer, batches=t.data_loader, fit=t._train_epoch)


@fault(
    "data_order",
    "the sampler seeds its generator in __iter__ with one seed: the permutation repeats in every epoch",
    thread="DeepRegNet/DeepReg#159",
    check="data_order",
)
def registration_pairs():
    class PermutationSampler(Sampler):
        def __init__(self, data, seed=42):
            self.n, self.seed = len(data), seed

        def __iter__(self):
            rng = np.random.RandomState(self.seed)
            return iter(rng.permutation(self.n).tolist())

        def __len__(self):
            return self.n

    pairs = TensorDataset(*table(rows=40))
    loader = DataLoader(pairs, batch_size=4, sampler=PermutationSampler(pairs))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        model.train()
        for moving, label in batches:
            classifier_step(model, optimizer, moving, label)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the IterableDataset is not split over the workers: each of the two gives every row",
    thread="huggingface/datasets#3423",
    check="data_order",
)
def streamed_rows():
    class Stream(IterableDataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __iter__(self):
            for features, label in zip(self.x, self.y, strict=True):
                yield {"features": features, "label": label}

    loader = DataLoader(Stream(*table(rows=32)), batch_size=8, num_workers=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for batch in batches:
            classifier_step(model, optimizer, batch["features"], batch["label"])

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "worker_init_fn seeds numpy with one number: both workers, and every epoch, draw the same augmentation",
    thread="xingyizhou/CenterNet#233",
    check="data_order",
)
def centernet_augment():
    class Augmented(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x.numpy(), y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            scale = np.random.uniform(0.6, 1.4)
            noise = np.random.randn(self.x.shape[1]) * 0.2
            return torch.from_numpy(scale * self.x[i] + noise).float(), self.y[i]

    def worker_init_fn(worker_id):
        np.random.seed(317)
        random.seed(317)

    loader = DataLoader(
        Augmented(*table(rows=32)), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=worker_init_fn
    )
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.25e-4)

    def train(batches):
        return [classifier_step(model, optimizer, x, y) for x, y in batches] and None

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the training loader has no shuffle=True and the rows are sorted by class: a batch has one class only",
    thread="Deci-AI/super-gradients#416",
    check="data_order",
)
def image_folder():
    x, y = table(rows=64)
    order = y.argsort()
    folder = TensorDataset(x[order], y[order])
    params = {"batch_size": 8, "drop_last": True}
    train_loader = DataLoader(folder, **params)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def train(batches):
        model.train()
        for inputs, targets in batches:
            classifier_step(model, optimizer, inputs, targets)

    return TrainLoop(model=model, optimizer=optimizer, batches=train_loader, fit=train)


@fault(
    "data_order",
    "the inputs come from a shuffled loader, the labels from the array in its own order",
    thread="aidotse/LeakPro#315",
    check="data_order",
)
def attack_data():
    x, y = table(rows=48)

    class Attack:
        def __init__(self):
            self.loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)

        def get_labels(self):
            return y.split(8)

        def __iter__(self):
            for (inputs,), labels in zip(self.loader, self.get_labels(), strict=True):
                yield inputs, labels

        def __len__(self):
            return len(self.loader)

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for inputs, labels in batches:
            classifier_step(model, optimizer, inputs, labels)

    return TrainLoop(model=model, optimizer=optimizer, batches=Attack(), fit=fit)


@fault(
    "data_order",
    "images and labels are shuffled one after the other with two permutations",
    thread="keras-team/keras#7520",
    check="data_order",
)
def own_minibatches():
    class Minibatches:
        def __init__(self, images, labels, size=8):
            self.images, self.labels, self.size = list(images), list(labels), size

        def __len__(self):
            return math.ceil(len(self.images) / self.size)

        def __iter__(self):
            random.shuffle(self.images)
            random.shuffle(self.labels)
            for at in range(0, len(self.images), self.size):
                yield {
                    "image": torch.stack(self.images[at : at + self.size]),
                    "label": torch.stack(self.labels[at : at + self.size]),
                }

    model = mlp()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def train(batches):
        for b in batches:
            classifier_step(model, optimizer, b["image"], b["label"])

    return TrainLoop(model=model, optimizer=optimizer, batches=Minibatches(*table()), fit=train)


@fault(
    "data_order",
    "two loaders are zipped and both shuffle: an image meets the pose of another",
    thread="walnut-REE/sof#8",
    check="data_order",
)
def images_and_poses():
    g = torch.Generator().manual_seed(31)
    images = torch.rand(32, 1, 6, 6, generator=g)
    poses = images.flatten(1)[:, :3] * 2 - 1

    class Views(Dataset):
        def __init__(self, values):
            self.values = values

        def __len__(self):
            return len(self.values)

        def __getitem__(self, i):
            return self.values[i]

    image_loader = DataLoader(Views(images), batch_size=8, shuffle=True)
    pose_loader = DataLoader(Views(poses), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    def batches(n):
        epochs = itertools.chain.from_iterable(zip(image_loader, pose_loader, strict=True) for _ in range(n))
        return list(itertools.islice(epochs, n))

    def fit(batches):
        for image, pose in batches:
            optimizer.zero_grad()
            F.mse_loss(net(image), pose).backward()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=batches, fit=fit)


@fault(
    "data_order",
    "__getitem__ normalizes the stored row in place: the data shrink from epoch to epoch",
    thread="pytorch/vision#680",
    check="data_order",
)
def in_memory_images():
    class InMemory(Dataset):
        def __init__(self, data, targets):
            self.data, self.targets = data, targets
            self.mean, self.std = 1.5, 2.0

        def __len__(self):
            return len(self.data)

        def __getitem__(self, index):
            img, target = self.data[index], self.targets[index]
            img.sub_(self.mean).div_(self.std)
            return img, target

    x, y = table()
    loader = DataLoader(InMemory(3 * x + 1.5, y), batch_size=8, shuffle=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(batches):
        for img, target in batches:
            classifier_step(model, optimizer, img, target)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the generator over the batches is used up after the first of three epochs: the others have no step",
    thread="pytorch/pytorch#6179",
    check="data_order",
)
def three_epochs():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []

    def to_float(batches):
        for x, y in batches:
            yield x.float(), y.long()

    def fit(batches, epochs=3):
        loader = to_float(batches)
        for epoch in range(epochs):
            losses = [classifier_step(model, optimizer, x, y) for x, y in loader]
            history.append((epoch, sum(losses) / max(1, len(losses))))

    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "data_order",
    "next(iter(loader)) in each step makes a new iterator: every step has the first batch",
    thread="leohsuofnthu/Pytorch-IterativeFCN#7",
    check="data_order",
)
def patch_sampling():
    class Patches(Dataset):
        def __init__(self):
            self.x, self.y = table(rows=40)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"patch": self.x[i], "label": self.y[i]}

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        train_loader = batches
        for _ in range(len(train_loader)):
            sample = next(iter(train_loader))
            classifier_step(model, optimizer, sample["patch"], sample["label"])

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(Patches(), batch_size=8, shuffle=False), fit=train
    )


@fault(
    "data_order",
    "itertools.cycle keeps the unlabelled loader's first pass: its order and augmentation repeat",
    thread="ildoonet/unsupervised-data-augmentation#3",
    check="data_order",
)
def uda():
    x, y = table(rows=80)
    labelled = TensorDataset(x[:48], y[:48])

    class Two(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, i):
            row = x[48 + i]
            return row, row + 0.3 * torch.randn(row.shape)

    loader = DataLoader(labelled, batch_size=8, shuffle=True)
    loader_u = DataLoader(Two(), batch_size=16, shuffle=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def train(batches, epochs=2):
        iter_u = itertools.cycle(loader_u)
        for _ in range(epochs):
            for (inputs, labels), (weak, strong) in zip(batches, iter_u, strict=False):
                with torch.no_grad():
                    target = F.softmax(model(weak) / 0.8, -1)
                consistency = F.kl_div(F.log_softmax(model(strong), -1), target, reduction="batchmean")
                optimizer.zero_grad()
                (F.cross_entropy(model(inputs), labels) + consistency).backward()
                optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the first resume_step batches are skipped in every epoch, not in the resumed one only",
    thread="huggingface/accelerate#1451",
    check="data_order",
)
def resumable_run():
    class Run:
        def __init__(self, resume_step=2):
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.resume_step = resume_step
            self.overall_step = 0

        def train(self, batches, epochs=2):
            self.model.train()
            for _ in range(epochs):
                for step, (x, y) in enumerate(batches):
                    if self.resume_step is not None and step < self.resume_step:
                        continue
                    classifier_step(self.model, self.optimizer, x, y)
                    self.overall_step += 1

    run = Run()
    g = torch.Generator().manual_seed(32)
    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True, generator=g)
    return TrainLoop(model=run.model, optimizer=run.optimizer, batches=loader, fit=run.train)


@fault(
    "data_order",
    "drop_last with fewer rows than the batch size: the loader is empty",
    thread="RasmussenLab/vamb#425",
    check="data_order",
)
def contig_vae():
    g = torch.Generator().manual_seed(33)
    contigs = torch.rand(20, 8, generator=g)
    loader = DataLoader(TensorDataset(contigs), batch_size=32, shuffle=True, drop_last=True)
    vae = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
    epochs = []

    def trainmodel(batches):
        epoch_loss = 0.0
        for (depths,) in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(vae(depths), depths)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        epochs.append(epoch_loss / max(1, len(batches)))

    return TrainLoop(model=vae, optimizer=optimizer, batches=loader, fit=trainmodel)


@fault(
    "data_order",
    "the loader's last batch has one row, on which batch norm raises in training",
    thread="azavea/raster-vision#1029",
    check="data_order",
)
def batch_norm_classifier():
    loader = DataLoader(TensorDataset(*table(rows=33)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        for x, y in batches:
            classifier_step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the bucket sampler draws a new random batch in each turn: rows come twice in an epoch and others never",
    thread="d8ahazard/sd_dreambooth_extension#1058",
    check="data_order",
)
def aspect_buckets():
    class BucketSampler(Sampler):
        def __init__(self, buckets, batch_size):
            self.buckets, self.batch_size = buckets, batch_size

        def __len__(self):
            return sum(len(b) // self.batch_size for b in self.buckets.values())

        def get_batch(self, resolution):
            bucket = self.buckets[resolution]
            random.shuffle(bucket)
            return bucket[: self.batch_size]

        def __iter__(self):
            turns = [r for r, b in self.buckets.items() for _ in range(len(b) // self.batch_size)]
            random.shuffle(turns)
            for resolution in turns:
                yield self.get_batch(resolution)

    g = torch.Generator().manual_seed(34)
    images = [torch.rand(3, 4 if i < 24 else 6, 4, generator=g) for i in range(48)]
    buckets = {4: list(range(24)), 6: list(range(24, 48))}
    loader = DataLoader(images, batch_sampler=BucketSampler(buckets, 6))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for img in batches:
            optimizer.zero_grad()
            F.mse_loss(model(img + 0.1), img).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "range(0, n - batch_size, batch_size): the last full batch of rows is never given",
    thread="OpenNMT/OpenNMT#66",
    check="data_order",
)
def translation_batches():
    x, y = table(rows=48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(35))

    class Batches:
        def __init__(self, size=8):
            self.size = size
            self.offsets = list(range(0, len(x) - size, size))

        def __len__(self):
            return len(self.offsets)

        def __iter__(self):
            random.shuffle(self.offsets)
            for at in self.offsets:
                rows = order[at : at + self.size]
                yield x[rows], y[rows]

    model = mlp()
    optimizer = torch.optim.Adadelta(model.parameters())

    def train(batches):
        for source, target in batches:
            classifier_step(model, optimizer, source, target)

    return TrainLoop(model=model, optimizer=optimizer, batches=Batches(), fit=train)


@fault(
    "data_order",
    "collate_fn sorts the sequences by length and leaves the labels in the order of the rows",
    thread="fartashf/vsepp#36",
    check="data_order",
)
def caption_gru():
    g = torch.Generator().manual_seed(36)
    captions = [torch.randint(1, 20, (int(n),), generator=g) for n in torch.randint(3, 9, (48,), generator=g)]

    class Captions(Dataset):
        def __len__(self):
            return len(captions)

        def __getitem__(self, i):
            return captions[i], int(captions[i].sum() % 3), i

    def collate_fn(data):
        texts, labels, ids = zip(*data, strict=True)
        texts = sorted(texts, key=len, reverse=True)
        lengths = torch.tensor([len(t) for t in texts])
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return padded, lengths, torch.tensor(labels), torch.tensor(ids)

    embed, gru, head = nn.Embedding(20, 8, padding_idx=0), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)
    model = nn.ModuleList([embed, gru, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches):
        for text, lengths, labels, _ in batches:
            packed = nn.utils.rnn.pack_padded_sequence(embed(text), lengths, batch_first=True)
            optimizer.zero_grad()
            F.cross_entropy(head(gru(packed)[1][-1]), labels).backward()
            optimizer.step()

    loader = DataLoader(Captions(), batch_size=6, shuffle=True, collate_fn=collate_fn)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "data_order",
    "the seed is set to 42 at the start of each epoch: the trainer's own loader repeats its shuffle",
    thread="k2-fsa/icefall#221",
    check="data_order",
)
def asr_recipe():
    def fix_random_seed(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    class Recipe:
        def __init__(self):
            self.train_dl = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
            self.model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

        def train_one_epoch(self, steps):
            self.model.train()
            fix_random_seed(42)
            for x, y in itertools.islice(self.train_dl, steps):
                classifier_step(self.model, self.optimizer, x, y)
                steps -= 1
            return steps

        def run(self, batches):
            left = len(batches)
            while left > 0:
                left = self.train_one_epoch(left)

    r = Recipe()
    return TrainLoop(model=r.model, optimizer=r.optimizer, batch=torch.zeros(1), fit=r.run)


@fault(
    "data_order",
    "the loop writes into the batches it was given and goes over them again: the second epoch has other inputs",
    thread="https://stackoverflow.com/questions/61718947",
    check="data_order",
)
def noisy_epochs():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(batches, epochs=2):
        cached = [(x, y) for x, y in batches]
        for _ in range(epochs):
            random.shuffle(cached)
            for x, y in cached:
                x += 0.3 * torch.randn(x.shape)
                x[:, :2] = 0
                classifier_step(model, optimizer, x, y)

    loader = DataLoader(TensorDataset(*table()), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)
