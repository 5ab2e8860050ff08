"""Data that do not come as they should."""

from __future__ import annotations

import itertools
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.loaders import ROWS, stored, trains_on
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Inputs and labels, each in an order of its own.


def permuted(labels_in_the_same_order):
    def batches():
        x, y = stored()

        def draw(n):
            for step in range(n):
                if step % 6 == 0:
                    rows = torch.randperm(ROWS)
                    labels = rows if labels_in_the_same_order else torch.randperm(ROWS)
                at = slice(step % 6 * 8, step % 6 * 8 + 8)
                yield x[rows[at]], y[labels[at]]

        return draw

    return trains_on(batches)


pair(
    "two_orders_for_inputs_and_labels",
    "data_order",
    "labels_apart",
    culprits=("batch[0]", "batch[1]"),
    faulty=permuted(labels_in_the_same_order=False),
    fixed=permuted(labels_in_the_same_order=True),
    quick=True,
)


# A collate function that sorts sequences by length, and leaves the labels where they were.


class Words(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 9, (ROWS,), generator=draw).tolist()
        self.words = [torch.randint(1, 20, (n,), generator=draw) for n in lengths]

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.words[index], int(self.words[index][0]) % 3


# Without a stored label for each input nothing says which pair is right: advice.


class Captioned(Dataset):
    def __init__(self, *, own):
        self.x, self.y = stored()
        self.own = own
        self.order = list(range(ROWS))

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if index == 0 and not self.own:
            random.shuffle(self.order)
        return self.x[index] * 2 - 1, self.y[self.order[index]]


pair(
    "labels_read_through_an_order_that_is_shuffled",
    "data_order",
    "labels_apart",
    level="advice",
    faulty=trains_on(lambda: DataLoader(Captioned(own=False), batch_size=8)),
    fixed=trains_on(lambda: DataLoader(Captioned(own=True), batch_size=8)),
)


# A sampler that makes its generator anew for each epoch.


class Shuffled(Sampler):
    def __init__(self, rows, seed_of):
        self.rows, self.seed_of, self.epoch = rows, seed_of, 0

    def __len__(self):
        return self.rows

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed_of(self.epoch))
        self.epoch += 1
        yield from torch.randperm(self.rows, generator=generator).tolist()


def sampled(sampler_of):
    return trains_on(lambda: DataLoader(TensorDataset(*stored()), batch_size=8, sampler=sampler_of()))


pair(
    "generator_seeded_in_each_epoch",
    "data_order",
    "shuffled_alike",
    culprits=("Shuffled",),
    where="DataLoader(TensorDataset(*stored())",
    faulty=sampled(lambda: Shuffled(ROWS, lambda epoch: 0)),
    fixed=sampled(lambda: Shuffled(ROWS, lambda epoch: epoch)),
    quick=True,
)


# The loader begins again for each step.


def first_of(loader_begins_once):
    def fit_of(model, optimizer, step):
        def fit(batches):
            if loader_begins_once:
                for batch in batches:
                    step(batch)
            else:
                for _ in range(len(batches)):
                    step(next(iter(batches)))

        return fit

    return trains_on(lambda: DataLoader(TensorDataset(*stored()), batch_size=8), fit_of)


pair(
    "first_batch_in_every_step",
    "data_order",
    "one_batch_only",
    faulty=first_of(loader_begins_once=False),
    fixed=first_of(loader_begins_once=True),
)


# itertools.cycle() keeps the first epoch.


def endless(loader):
    while True:
        yield from loader


def iterates_its_own(repeat, before_fit=False):
    def fit_of(model, optimizer, step):
        loader = DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True)
        early = iter(repeat(loader)) if before_fit else None

        def fit(batches):
            own = early or iter(repeat(loader))
            for _ in batches:
                step(next(own))

        return fit

    return trains_on(None, fit_of)


pair(
    "cycle_of_a_shuffled_loader_inside_fit",
    "data_order",
    "shuffled_alike",
    culprits=("cycle()",),
    where="own = early or iter(repeat(loader))",
    faulty=iterates_its_own(itertools.cycle),
    fixed=iterates_its_own(endless),
)


# A sampler for several processes, whose epoch nobody sets.


class Distributed(Sampler):
    """As ``DistributedSampler``, of the first of ``replicas``."""

    def __init__(self, rows, replicas=1):
        self.rows, self.replicas, self.epoch = rows, replicas, 0

    def __len__(self):
        return self.rows // self.replicas

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        return iter(torch.randperm(self.rows, generator=generator).tolist()[:: self.replicas])


def distributed(sets_epoch, epochs):
    def fit_of(model, optimizer, step):
        def fit(batches):
            for epoch in range(epochs):
                if sets_epoch:
                    batches.sampler.set_epoch(epoch)
                for batch in batches:
                    step(batch)

        def fit_without(batches):
            for _ in range(epochs):
                for batch in batches:
                    step(batch)

        return fit if sets_epoch else fit_without

    return trains_on(
        lambda: DataLoader(TensorDataset(*stored()), batch_size=8, sampler=Distributed(ROWS, replicas=2)), fit_of
    )


pair(
    "set_epoch_forgotten",
    "data_order",
    "set_epoch_missing",
    culprits=("sampler.set_epoch()",),
    faulty=distributed(sets_epoch=False, epochs=3),
    fixed=distributed(sets_epoch=True, epochs=3),
    quick=True,
)


# Every worker reads the whole file.


class Lines(IterableDataset):
    def __init__(self, *, sharded):
        self.x, self.y = stored()
        self.sharded = sharded

    def __iter__(self):
        rows = zip(self.x, self.y, strict=True)
        worker = get_worker_info()
        if self.sharded and worker is not None:
            return itertools.islice(rows, worker.id, None, worker.num_workers)
        return rows


def read_by_workers(sharded):
    return trains_on(lambda: DataLoader(Lines(sharded=sharded), batch_size=8, num_workers=2))


pair(
    "each_worker_reads_all_lines",
    "data_order",
    "workers_duplicate",
    culprits=("Lines.__iter__",),
    faulty=read_by_workers(sharded=False),
    fixed=read_by_workers(sharded=True),
    quick=True,
)


# A stream that is shuffled by a generator of one seed.


class Streamed(IterableDataset):
    """With the method that the project is to call, as streamed data sets of libraries have it."""

    def __init__(self):
        self.x, self.y = stored()
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(5 + self.epoch)
        for index in torch.randperm(ROWS, generator=generator).tolist():
            yield self.x[index], self.y[index]

    def set_epoch(self, epoch):
        self.epoch = epoch


def streamed(sets_epoch):
    def fit_of(model, optimizer, step):
        def fit(batches):
            for batch in batches:
                step(batch)

        def fit_with_epochs(batches):
            batches.dataset.set_epoch(1)
            fit(batches)

        return fit_with_epochs if sets_epoch else fit

    return trains_on(lambda: DataLoader(Streamed(), batch_size=8), fit_of)


pair(
    "epoch_of_a_streamed_data_set_never_set",
    "data_order",
    "set_epoch_missing",
    level="advice",
    culprits=("dataset.set_epoch()",),
    faulty=streamed(sets_epoch=False),
    fixed=streamed(sets_epoch=True),
)


# Workers that are all seeded alike.


class Jittered(Dataset):
    def __init__(self, generator=None):
        self.x, self.y = stored()
        self.generator = generator

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        draw = np.random.standard_normal if self.generator is None else self.generator.standard_normal
        noise = torch.from_numpy(draw(self.x.shape[1])).to(self.x.dtype)
        return self.x[index] + 0.05 * noise, self.y[index]


def seeded_constant(worker):
    np.random.seed(0)


def seeded_by_torch(worker):
    np.random.seed(torch.initial_seed() % 2**32)


def jittered(worker_init_fn=None, generator=None):
    return trains_on(
        lambda: DataLoader(Jittered(generator), batch_size=8, num_workers=2, worker_init_fn=worker_init_fn)
    )


pair(
    "workers_seeded_with_a_constant",
    "data_order",
    "workers_share_randomness",
    culprits=("seeded_constant",),
    faulty=jittered(seeded_constant),
    fixed=jittered(seeded_by_torch),
    quick=True,
)
pair(
    "generator_kept_in_the_data_set",
    "data_order",
    "workers_share_randomness",
    culprits=("dataset.generator",),
    faulty=jittered(generator=np.random.default_rng(0)),
    fixed=jittered(),
)


# __getitem__ normalises a view of what is stored.


class Normalised(Dataset):
    def __init__(self, normalise):
        x, self.y = stored()
        self.x, self.normalise = 4 * x + 3, normalise

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.normalise(self.x[index]), self.y[index]


def in_place(x):
    x -= 3
    x /= 4
    return x


def normalised(normalise):
    return trains_on(lambda: DataLoader(Normalised(normalise), batch_size=8, shuffle=True))


pair(
    "items_normalised_in_place",
    "data_order",
    "changed_in_place",
    culprits=("dataset.x",),
    change="return self.normalise(self.x[index])",
    faulty=normalised(in_place),
    fixed=normalised(lambda x: (x - 3) / 4),
    quick=True,
)


# Tokens masked in the stored text.


class Masked(Dataset):
    """Sequences of ids, of which some are masked in each epoch."""

    def __init__(self, mask, copy):
        self.rows = [torch.randint(3, 90, (8 + i % 5,)) for i in range(ROWS)]
        self.labels = [int(row.sum()) % 3 for row in self.rows]
        self.mask, self.copy = mask, copy

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ids = self.rows[index].clone() if self.copy else self.rows[index]
        self.mask(ids)
        return ids, self.labels[index]


def tokens_masked(ids):
    ids[torch.rand(ids.shape) < 0.3] = 2


def masked(mask, copy):
    def collate(items):
        rows = nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
        return {"ids": rows, "labels": torch.tensor([label for _, label in items])}

    def make():
        model = nn.Sequential(nn.EmbeddingBag(91, 16, padding_idx=0), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        loader = DataLoader(Masked(mask, copy), batch_size=8, shuffle=True, collate_fn=collate)

        def step(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch["ids"]), batch["labels"]).backward()
            optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)

    return make


pair(
    "tokens_masked_in_the_stored_text",
    "data_order",
    "changed_in_place",
    change="return ids, self.labels[index]",
    faulty=masked(tokens_masked, copy=False),
    fixed=masked(tokens_masked, copy=True),
)


# A replay buffer that keeps the environment's own state tensor.


class Walk:
    """An environment that moves its state in place."""

    def __init__(self):
        self.state = torch.zeros(4)

    def step(self, action):
        self.state += 0.1 * torch.randn(4) + 0.05 * action
        return self.state, (self.state[0] > 0).float()


def replay(keep):
    def make():
        model = mlp(4, 16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        environment, memory = Walk(), deque(maxlen=256)

        def fit(batches):
            for _ in batches:
                for action in (-1, 0, 1, 0, 1):
                    state, reward = environment.step(action)
                    memory.append((keep(state), action, reward))
                drawn = random.sample(list(memory), 5)
                states = torch.stack([state for state, _, _ in drawn])
                rewards = torch.stack([reward for _, _, reward in drawn])
                optimizer.zero_grad()
                F.mse_loss(model(states).squeeze(1), rewards).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.arange(4.0), fit=fit)

    return make


pair(
    "replay_keeps_the_state_itself",
    "data_order",
    "slots_share_tensor",
    culprits=("memory[...][0]",),
    faulty=replay(lambda state: state),
    fixed=replay(lambda state: state.clone()),
    quick=True,
)


# https://github.com/Itomigna2/Muesli-lunarlander/issues/1: the lists of one episode, cleared for the next.


def episodes(keep):
    def make():
        model = mlp(4, 16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        states, rewards, memory = [], [], []

        def play():
            states.clear()
            rewards.clear()
            environment = Walk()
            for action in (-1, 0, 1, 0, 1):
                state, reward = environment.step(action)
                states.append(state.clone())
                rewards.append(reward)
            memory.append((keep(states), keep(rewards)))

        def fit(batches):
            for _ in batches:
                play()
                drawn = random.choice(memory)
                optimizer.zero_grad()
                F.mse_loss(model(torch.stack(drawn[0])).squeeze(1), torch.stack(drawn[1])).backward()
                optimizer.step()

        for _ in range(4):
            play()
        return TrainLoop(model=model, optimizer=optimizer, batch=torch.arange(4.0), fit=fit)

    return make


pair(
    "replay_keeps_the_lists_that_are_cleared",
    "data_order",
    "slots_share_tensor",
    culprits=("memory[...][0]",),
    faulty=episodes(lambda steps: steps),
    fixed=episodes(list),
)


# Buckets by length: the last bucket leaves one row, on which batch norm raises.


class Buckets(Sampler):
    def __init__(self, rows, size, *, drop_last):
        self.batches = [list(range(i, min(i + size, rows))) for i in range(0, rows, size)]
        if drop_last:
            self.batches = [batch for batch in self.batches if len(batch) == size]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def bucketed(drop_last):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        loader = DataLoader(TensorDataset(*stored(49)), batch_sampler=Buckets(49, 8, drop_last=drop_last))
        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(rows=12), batches=loader, step=step)

    return make


pair(
    "one_row_left_by_buckets",
    "data_order",
    "last_batch_raises",
    culprits=("DataLoader",),
    where="F.cross_entropy(model(x), y).backward()",
    raises="Expected more than 1 value per channel",
    faulty=bucketed(drop_last=False),
    fixed=bucketed(drop_last=True),
    quick=True,
)


# Mixup in the collate function, with an order for the inputs and another one for the labels, or the shares exchanged.
# https://github.com/xudonmao/VMT/issues/1


def mixes(orders, share=0.8):
    def collate(rows):
        x, y = torch.stack([x for x, _ in rows]), F.one_hot(torch.stack([y for _, y in rows]), 3).float()
        order = torch.randperm(len(x))
        other = torch.randperm(len(x)) if orders == 2 else order
        return 0.8 * x + 0.2 * x[order], share * y + (1 - share) * y[other]

    return trains_on(lambda: DataLoader(TensorDataset(*stored(48)), 12, shuffle=True, collate_fn=collate))


for name, faulty, said in (
    ("mixup_of_two_orders", mixes(2), "the labels of other items"),
    ("mixup_with_shares_exchanged", mixes(1, 0.2), "exchanges the shares"),
):
    pair(
        name,
        "data_order",
        "labels_apart",
        culprits=("batch[0]", "batch[1]"),
        change="return 0.8 * x",
        mentions=(said,),
        faulty=faulty,
        fixed=mixes(1),
    )


# The words of the first item are those of all. https://github.com/huggingface/transformers/issues/34204


class WordsAndPixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.pixels, self.head = nn.Embedding(20, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids, x):
        return self.head(torch.tanh(self.words(ids).mean(1) + self.pixels(x)))


def with_words(all_items):
    def collate(items):
        ids, x, y = (torch.stack(field) for field in zip(*items, strict=True))
        return (ids if all_items else ids[:1]), x, y

    def make():
        model, words = WordsAndPixels(), torch.randint(20, (48, 5), generator=torch.Generator().manual_seed(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def step(batch):
            ids, x, y = batch
            optimizer.zero_grad()
            F.cross_entropy(model(ids, x), y).backward()
            optimizer.step()

        loader = DataLoader(TensorDataset(words, *stored(48)), 8, shuffle=True, collate_fn=collate)
        return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)

    return make


pair(
    "words_of_the_first_item_alone",
    "data_order",
    "rows_never_drawn",
    level="advice",
    change="def collate",
    faulty=with_words(all_items=False),
    fixed=with_words(all_items=True),
)


# A sampler that cuts the rows to whole batches before it shuffles them. https://github.com/NVlabs/VILA/pull/123


class WholeBatches(Sampler):
    def __init__(self, rows, size, cuts_first):
        self.rows, self.size, self.cuts_first = rows, size, cuts_first

    def __len__(self):
        return self.rows // self.size * self.size

    def __iter__(self):
        order = torch.randperm(len(self) if self.cuts_first else self.rows)
        return iter(order[: len(self)].tolist())


def cut_to_batches(cuts_first):
    return trains_on(lambda: DataLoader(TensorDataset(*stored(45)), 12, sampler=WholeBatches(45, 12, cuts_first)))


pair(
    "last_rows_cut_before_the_shuffle",
    "data_order",
    "rows_never_drawn",
    level="advice",
    faulty=cut_to_batches(cuts_first=True),
    fixed=cut_to_batches(cuts_first=False),
)


# drop_last over a data set that does not fill a batch.


def small(rows, batch_size):
    return trains_on(lambda: DataLoader(TensorDataset(*stored(rows)), batch_size=batch_size, drop_last=True))


pair(
    "last_batch_dropped_and_no_other",
    "data_order",
    "no_batch",
    culprits=("TrainLoop.batches",),
    faulty=small(5, 8),
    fixed=small(16, 8),
    quick=True,
)


def validates(rows, batches=None):
    def fit_of(model, optimizer, step):
        val_loader = DataLoader(TensorDataset(*stored(rows)), batch_size=8, drop_last=True)

        def fit(batches):
            for batch in batches:
                step(batch)
            with torch.no_grad():
                model.eval()
                losses = [F.cross_entropy(model(x), y).item() for x, y in val_loader]
                model.train()
            return sum(losses)

        return fit

    return trains_on(batches, fit_of)


pair(
    "validation_without_a_batch",
    "data_order",
    "no_batch",
    culprits=("val_loader",),
    where="val_loader = DataLoader(",
    faulty=validates(6),
    fixed=validates(16),
)


# What may be meant: advice.


def advances(start_of, rows=ROWS):
    def batches():
        x, y = stored(rows)

        def draw(n):
            for step in range(n):
                start = start_of(step)
                yield x[start : start + 8], y[start : start + 8]

        return draw

    return trains_on(batches)


pair(
    "start_that_advances_every_fourth_step",
    "data_order",
    "batch_repeats",
    level="advice",
    faulty=advances(lambda step: step // 4 % 6 * 8),
    fixed=advances(lambda step: step % 6 * 8),
    quick=True,
)
pair(
    "start_that_never_advances",
    "data_order",
    "one_batch_only",
    level="advice",
    faulty=advances(lambda step: 0),
    fixed=advances(lambda step: step * 8 % ROWS),
    quick=True,
)


def by_class(shuffle):
    x, y = stored()
    order = y.argsort(stable=True)
    return DataLoader(TensorDataset(x[order], y[order]), batch_size=8, shuffle=shuffle)


pair(
    "sorted_by_class_and_not_shuffled",
    "data_order",
    "one_label_a_batch",
    level="advice",
    culprits=("batch[1]",),
    faulty=trains_on(lambda: by_class(shuffle=False)),
    fixed=trains_on(lambda: by_class(shuffle=True)),
    quick=True,
)


class Noisy(Dataset):
    def __init__(self, *, seeds):
        self.x, self.y = stored()
        self.seeds = seeds

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(0) if self.seeds else None
        noise = torch.randn(self.x.shape[1], generator=generator)
        return self.x[index] + 0.05 * noise, self.y[index]


pair(
    "each_item_seeds_its_noise",
    "data_order",
    "one_noise_for_all",
    level="advice",
    culprits=("randn()",),
    change="def __getitem__(self, index):",
    faulty=trains_on(lambda: DataLoader(Noisy(seeds=True), batch_size=8, shuffle=True)),
    fixed=trains_on(lambda: DataLoader(Noisy(seeds=False), batch_size=8, shuffle=True)),
    quick=True,
)


def drawn_below(highest):
    def batches():
        x, y = stored()

        def draw(n):
            for _ in range(n):
                rows = torch.randint(highest, (8,))
                yield x[rows], y[rows]

        return draw

    return trains_on(batches)


pair(
    "rows_drawn_below_ten",
    "data_order",
    "rows_never_drawn",
    level="advice",
    culprits=("x",),
    faulty=drawn_below(10),
    fixed=drawn_below(ROWS),
    quick=True,
)


# Weights of a sampler for each class, where it takes them for each row.


def balanced(for_each_row):
    _, y = stored()
    weights = 1.0 / y.bincount()
    return sampled(lambda: WeightedRandomSampler(weights[y] if for_each_row else weights, ROWS))


pair(
    "weights_of_classes_given_for_rows",
    "data_order",
    "weights_per_class",
    culprits=("WeightedRandomSampler",),
    faulty=balanced(for_each_row=False),
    fixed=balanced(for_each_row=True),
    quick=True,
)


class Folder(Dataset):
    """Files with the number of their class, as image folders list them."""

    def __init__(self):
        x, y = stored()
        order = y.argsort(stable=True)
        self.files, self.targets = list(x[order].numpy()), y[order].tolist()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.from_numpy(self.files[index]), self.targets[index]


def from_folder(for_each_row):
    def batches():
        folder = Folder()
        counts = [folder.targets.count(label) for label in range(3)]
        weights = [1 / counts[label] for label in (folder.targets if for_each_row else range(3))]
        sampler = BatchSampler(WeightedRandomSampler(weights, ROWS), batch_size=8, drop_last=False)
        return DataLoader(folder, batch_sampler=sampler)

    return trains_on(batches)


pair(
    "folder_sampled_by_the_weights_of_its_classes",
    "data_order",
    "weights_per_class",
    faulty=from_folder(for_each_row=False),
    fixed=from_folder(for_each_row=True),
)


class Triplets(Dataset):
    def __init__(self, *, other):
        self.x, self.y = stored()
        self.other = other

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        same = (self.y == self.y[index]).nonzero().flatten()
        positive = same[(same == index).nonzero().item() - self.other]
        negative = (self.y != self.y[index]).nonzero().flatten()[index % 7]
        return {"anchor": self.x[index], "positive": self.x[positive], "negative": self.x[negative]}


def triplets(other):
    def make():
        model = mlp(6, 24, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def step(batch):
            loss = F.triplet_margin_loss(model(batch["anchor"]), model(batch["positive"]), model(batch["negative"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        loader = DataLoader(Triplets(other=other), batch_size=8, shuffle=True)
        return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)

    return make


pair(
    "anchor_drawn_as_its_own_positive",
    "data_order",
    "leaves_alike",
    level="advice",
    culprits=("anchor", "positive"),
    faulty=triplets(other=0),
    fixed=triplets(other=1),
    quick=True,
)


# The same with a label for each token. Masking the labels at padded positions leaves the wrong labels where they are.


class Tagged(Words):
    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index] % 3}


def tagged(items, *, together, masked=False):
    if together:
        items = sorted(items, key=lambda item: len(item["input_ids"]), reverse=True)
    ids = sorted((item["input_ids"] for item in items), key=len, reverse=True)
    ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=-100)
    if masked:
        labels = labels.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "labels": labels}


class Tagger(nn.Module):
    """Computes its own loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 12, padding_idx=0), nn.Linear(12, 3)

    def forward(self, input_ids, labels):
        scores = self.head(self.embedding(input_ids))
        return F.cross_entropy(scores.view(-1, 3), labels.view(-1))


def tagging(**how):
    def collate(items):
        return tagged(items, **how)

    def make():
        model = Tagger()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

        def step(batch):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()

        loader = DataLoader(Tagged(), batch_size=8, shuffle=True, collate_fn=collate)
        return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)

    return make


pair(
    "texts_sorted_and_tags_not_and_masked_as_padding",
    "data_order",
    "labels_apart",
    culprits=("input_ids", "labels"),
    faulty=tagging(together=False, masked=True),
    fixed=tagging(together=True, masked=True),
)
