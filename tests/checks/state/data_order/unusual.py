"""Data in an order that breaks a textbook rule, and comes as it should."""

from __future__ import annotations

import itertools
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.loaders import ROWS, stored, trains_on
from tests.loops.nets import mlp
from tests.loops.odd import odd


def loaded(dataset=None, **options):
    """A project that trains on a DataLoader of these options."""
    return trains_on(lambda: DataLoader(dataset or TensorDataset(*stored()), **{"batch_size": 8, **options}))()


# Orders that are chosen and not drawn for each epoch.


@odd(notes="nothing is shuffled: the order of the data set, in every epoch")
def order_of_the_data_set():
    return loaded()


@odd(notes="shuffled once, before the first epoch, and then always in that order")
def shuffled_once_before_training():
    def batches():
        x, y = stored()
        order = torch.randperm(ROWS)
        return DataLoader(TensorDataset(x[order], y[order]), batch_size=8)

    return trains_on(batches)()


@odd(notes="a function that draws one order and goes through it again and again")
def one_order_drawn_by_hand():
    def batches():
        x, y = stored()

        def draw(n):
            order = torch.randperm(ROWS)
            for step in range(n):
                rows = order[step * 8 % ROWS :][:8]
                yield x[rows], y[rows]

        return draw

    return trains_on(batches)()


class Buckets(Sampler):
    """Batches of rows that are alike, in another order each epoch."""

    def __init__(self, keys, size):
        order = keys.argsort().tolist()
        self.batches = [order[i : i + size] for i in range(0, len(order), size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for place in torch.randperm(len(self.batches)).tolist():
            yield self.batches[place]


@odd(notes="buckets of fixed members; the order of the buckets is drawn")
def fixed_buckets_in_a_drawn_order():
    return loaded(batch_sampler=Buckets(stored()[0][:, 0], 8), batch_size=1)


class Distributed(Sampler):
    def __init__(self, rows, *, shuffle):
        self.rows, self.shuffle, self.epoch = rows, shuffle, 0

    def __len__(self):
        return self.rows

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if not self.shuffle:
            return iter(range(self.rows))
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.rows, generator=generator).tolist())


@odd(notes="a sampler with set_epoch that does not shuffle")
def distributed_without_shuffle():
    return loaded(sampler=Distributed(ROWS, shuffle=False))


@odd(notes="the epoch is set by a helper that fit calls")
def epoch_set_by_a_helper():
    def fit_of(model, optimizer, step):
        sampler = Distributed(ROWS, shuffle=True)
        loader = DataLoader(TensorDataset(*stored()), batch_size=8, sampler=sampler)

        def begin(epoch):
            for part in (sampler,):
                part.set_epoch(epoch)

        def fit(batches):
            for epoch, _ in enumerate(batches):
                begin(epoch)
                for batch in loader:
                    step(batch)

        return fit

    return trains_on(None, fit_of)()


# Orders that are drawn, and are no permutation.


@odd(notes="rows are drawn with replacement: some come twice an epoch, some never")
def drawn_with_replacement():
    dataset = TensorDataset(*stored())
    return loaded(dataset, sampler=RandomSampler(dataset, replacement=True))


@odd(notes="rare classes are drawn more often")
def drawn_by_weight():
    _, y = stored()
    return loaded(sampler=WeightedRandomSampler((1.0 + (y == 0)).tolist(), ROWS))


@odd(notes="a third of the rows has labels and comes first: these are drawn by weight, and no others")
def labelled_rows_drawn_by_weight():
    return loaded(sampler=WeightedRandomSampler((1.0 + torch.arange(16) % 2).tolist(), ROWS))


@odd(notes="one labelled row of each class comes first, and these are drawn by weight; the others have no label")
def one_labelled_row_of_each_class():
    x, y = stored()
    order = y.argsort(stable=True).view(3, -1).t().flatten()
    labels = torch.where(torch.arange(ROWS) < 3, y[order], -1)
    return loaded(TensorDataset(x[order], labels), sampler=WeightedRandomSampler([1.0, 2.0, 1.0], ROWS))


class OfAClass(Dataset):
    """An item for each class: one of its rows, drawn each time."""

    def __init__(self):
        self.x, self.y = stored()

    def __len__(self):
        return 3

    def __getitem__(self, label):
        rows = (self.y == label).nonzero().flatten()
        return self.x[rows[torch.randint(len(rows), ())]], label


@odd(notes="classes are drawn by weight, and then one of the rows of each")
def classes_drawn_by_weight():
    return loaded(OfAClass(), sampler=WeightedRandomSampler([1.0, 2.0, 1.0], ROWS))


@odd(notes="one generator with a fixed seed, made once: each epoch goes on with it")
def generator_made_once():
    return loaded(shuffle=True, generator=torch.Generator().manual_seed(0))


class Again:
    """A batch sampler that begins again, so that workers live on."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    """As detection trainers have it: one iterator for all epochs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@odd(notes="a loader that keeps one iterator for all epochs")
def one_iterator_for_all_epochs():
    return trains_on(lambda: InfiniteDataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True))()


# cycle() that repeats nothing drawn.


@odd(notes="cycle() of a loader that does not shuffle")
def cycle_of_a_loader_in_order():
    def batches():
        loader = DataLoader(TensorDataset(*stored()), batch_size=8)
        return lambda n: itertools.islice(itertools.cycle(loader), n)

    return trains_on(batches)()


@odd(notes="cycle() of a shuffled loader, of which less than an epoch is taken")
def cycle_that_never_comes_round():
    def fit_of(model, optimizer, step):
        own = itertools.cycle(DataLoader(TensorDataset(*stored(480)), batch_size=2, shuffle=True))

        def fit(batches):
            for _ in batches:
                step(next(own))

        return fit

    return trains_on(None, fit_of)()


@odd(notes="a validation loader is shuffled by one seed in every pass, and nothing trains on it")
def validation_in_one_drawn_order():
    def fit_of(model, optimizer, step):
        x, y = stored()

        def validate():
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for rows, labels in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator):
                    F.cross_entropy(model(rows), labels)

        def fit(batches):
            for batch in batches:
                step(batch)
                validate()

        return fit

    return trains_on(lambda: DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True), fit_of)()


@odd(notes="fit seeds by the epoch, so that a run can be resumed at any")
def seeded_by_the_epoch():
    def fit_of(model, optimizer, step):
        def fit(batches):
            for epoch in range(3):
                torch.manual_seed(100 + epoch)
                for batch in batches:
                    step(batch)

        return fit

    return trains_on(lambda: DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True), fit_of)()


# Rows that come again, or never.


@odd(notes="all data in one batch, at each step")
def full_batch():
    return loaded(batch_size=ROWS)


@odd(notes="each batch is used for two steps in a row, since reading is slow")
def data_echoing():
    class Echo:
        def __init__(self, loader):
            self.loader = loader

        def __iter__(self):
            for batch in self.loader:
                yield batch
                yield batch

    return trains_on(lambda: Echo(DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True)))()


@odd(notes="several epochs over each rollout, in an order drawn for each")
def epochs_over_rollouts():
    def batches():
        def draw(n):
            given = 0
            while given < n:
                x, y = data.labelled(rows=24, seed=given)
                for _ in range(3):
                    order = torch.randperm(24)
                    for part in order.split(8):
                        yield x[part], y[part]
                        given += 1

        return draw

    return trains_on(batches)()


@odd(notes="easy rows first: more of the data come in with each epoch")
def curriculum():
    class Easy(Sampler):
        def __init__(self):
            self.epoch = 0

        def __len__(self):
            return ROWS

        def __iter__(self):
            self.epoch += 1
            return iter(torch.randperm(min(ROWS, 16 * self.epoch)).tolist())

    return loaded(sampler=Easy())


@odd(notes="tasks one after the other: each batch has one class")
def classes_in_increments():
    x, y = stored()
    order = y.argsort(stable=True)
    return loaded(TensorDataset(x[order], y[order]))


@odd(notes="data made on the fly: no row ever comes twice")
def synthetic_stream():
    return trains_on(lambda: lambda n: (data.labelled(rows=8, seed=int(torch.randint(10**6, ()))) for _ in range(n)))()


@odd(notes="the last batch is smaller, and is dropped")
def last_batch_dropped():
    return loaded(TensorDataset(*stored(50)), drop_last=True, shuffle=True)


@odd(notes="the last batch is one row, which the loop leaves out openly")
def one_row_left_out_openly():
    def make_step():
        model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def step(batch):
            x, y = batch
            if len(x) < 2:
                return
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return model, optimizer, step

    model, optimizer, step = make_step()
    loader = DataLoader(TensorDataset(*stored(49)), batch_sampler=Buckets(stored(49)[0][:, 0], 8))
    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(rows=12), batches=loader, step=step)


# Pairs that differ from epoch to epoch.


@odd(notes="rows are paired with times that are drawn in strata: another time in each epoch, fed to the model")
def stratified_times():
    model = mlp(7, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, times = stored()[0], torch.arange(ROWS)

    def batches(n):
        for step in range(n):
            if step % 6 == 0:
                rows, drawn = torch.randperm(ROWS), torch.randperm(ROWS)
            at = slice(step % 6 * 8, step % 6 * 8 + 8)
            yield x[rows[at]], times[drawn[at]]

    def fit(given):
        for clean, t in given:
            optimizer.zero_grad()
            noised = torch.cat([clean, t[:, None] / ROWS], dim=1)
            (model(noised).squeeze(1) - clean.mean(1)).square().mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(x[:8], times[:8]), batches=batches, fit=fit)


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.net = nn.Embedding(3, 6), mlp(12, 24, 6)

    def forward(self, noise, label):
        return self.net(torch.cat([noise, self.classes(label)], dim=1))


@odd(notes="a generator is conditioned on labels that are drawn apart from the real rows")
def labels_drawn_apart_as_a_condition():
    model = Conditioned()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = stored()

    def batches(n):
        for step in range(n):
            if step % 6 == 0:
                rows, labels = torch.randperm(ROWS), torch.randperm(ROWS)
            at = slice(step % 6 * 8, step % 6 * 8 + 8)
            yield x[rows[at]], y[labels[at]]

    def fit(given):
        for real, label in given:
            made = model(torch.zeros_like(real), label)
            optimizer.zero_grad()
            (made.mean(0) - real.mean(0)).square().sum().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(x[:8], y[:8]), batches=batches, fit=fit)


@odd(notes="two domains without pairs, each shuffled by itself")
def unpaired_domains():
    model = mlp(6, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    left, right = stored()[0], data.labelled(rows=ROWS, seed=5)[0]

    class Unpaired:
        def __init__(self):
            self.loaders = [DataLoader(part, batch_size=8, shuffle=True) for part in (left, right)]

        def __iter__(self):
            return zip(*self.loaders, strict=True)

    def fit(given):
        for a, b in given:
            optimizer.zero_grad()
            (model(a).mean(0) - b.mean(0)).square().sum().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=(left[:8], right[:8]), batches=Unpaired(), fit=fit)


@odd(notes="labels are mixed with those of other rows on purpose, in the collate function")
def mixed_up_in_collate():
    def mix(rows):
        x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
        share = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(x))
        return share * x + (1 - share) * x[order], y if share > 0.5 else y[order]

    return loaded(shuffle=True, collate_fn=mix)


@odd(notes="the collate function adds negatives from other rows, beside each row's own")
def negatives_in_collate():
    model = mlp(6, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def with_negatives(rows):
        x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
        return {"anchor": x, "positive": y, "negative": y.roll(1, 0)}

    def step(batch):
        optimizer.zero_grad()
        F.triplet_margin_loss(model(batch["anchor"]), batch["positive"], batch["negative"]).backward()
        optimizer.step()

    dataset = TensorDataset(stored()[0], data.labelled(rows=ROWS, seed=7)[0])
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=with_negatives)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)


# Items that are other ones each time.


class Jittered(Dataset):
    def __init__(self, generator=None):
        self.x, self.y = stored()
        self.generator = generator

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.x[index] + 0.05 * torch.randn(6, generator=self.generator), self.y[index]


@odd(notes="augmented: no row comes twice with the same bits")
def augmented_rows():
    return loaded(Jittered(), shuffle=True)


@odd(notes="augmented by two workers, each with torch's own seed")
def augmented_by_workers():
    return loaded(Jittered(), shuffle=True, num_workers=2)


def seeded_by_torch(worker):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


@odd(notes="workers seed numpy by torch's seed, as the docs say")
def workers_seeded_as_documented():
    class Numpy(Jittered):
        def __getitem__(self, index):
            return self.x[index] + 0.05 * torch.from_numpy(np.random.randn(6)).to(self.x.dtype), self.y[index]

    return loaded(Numpy(), shuffle=True, num_workers=2, worker_init_fn=seeded_by_torch)


class Counted(Jittered):
    """Gives each row a weight that falls as it comes again."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(ROWS)

    def __getitem__(self, index):
        self.seen[index] += 1
        return self.x[index] / self.seen[index].sqrt(), self.y[index]


@odd(notes="rows are weighted by how often they came, counted in a tensor in place")
def rows_counted_in_place():
    return loaded(Counted(), shuffle=True)


class Cached(Jittered):
    """Decodes an item when it is first asked for, into the place of the raw one."""

    def __init__(self):
        super().__init__()
        self.decoded = [False] * ROWS

    def __getitem__(self, index):
        if not self.decoded[index]:
            self.x[index] *= 0.5
            self.decoded[index] = True
        return self.x[index].clone(), self.y[index]


@odd(notes="items are normalised in place once, and kept so")
def cache_in_place():
    return loaded(Cached(), shuffle=True)


class DrawnOnce(Jittered):
    """Draws each item's noise when it is first asked for, and keeps it."""

    def __init__(self):
        super().__init__()
        self.noise = torch.full((ROWS, 6), torch.inf)

    def __getitem__(self, index):
        if self.noise[index].isinf().any():
            self.noise[index] = 0.1 * torch.randn(6)
        return self.x[index] + self.noise[index], self.y[index]


@odd(notes="noise drawn once for each item, and cached in a tensor in place")
def noise_cached():
    return loaded(DrawnOnce(), shuffle=True)


class LastView(Jittered):
    """Gives a new view of an item beside the one given before, which it keeps."""

    def __init__(self):
        super().__init__()
        self.last = self.x.clone()

    def __getitem__(self, index):
        view = self.x[index] + 0.05 * torch.randn(6)
        before = self.last[index].clone()
        self.last[index] = view
        return (view + before) / 2, self.y[index]


@odd(notes="the last view of each item is kept in place, and given with the next")
def last_view_kept():
    return loaded(LastView(), shuffle=True)


class Projected(Jittered):
    """Every item through one fixed random projection."""

    def __getitem__(self, index):
        fixed = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
        return self.x[index] @ fixed, self.y[index]


@odd(notes="a fixed random projection, drawn from one seed for every item")
def fixed_projection():
    return loaded(Projected(), shuffle=True)


# Iterable data sets.


class Cropped(IterableDataset):
    """Gives each row a shift that its number seeds: the same in every epoch."""

    def __iter__(self):
        for number, (x, y) in enumerate(zip(*stored(), strict=True)):
            generator = np.random.default_rng(number)
            shift = int(torch.randint(6, (), generator=torch.Generator().manual_seed(number)))
            yield x.roll(shift) + 0.01 * float(generator.standard_normal()), y


@odd(notes="a stream in its own order, whose augmentation is seeded by the row's number")
def augmentation_seeded_by_the_row():
    return trains_on(lambda: DataLoader(Cropped(), batch_size=8))()


class Windows(IterableDataset):
    """Random windows without end: every worker draws its own."""

    def __iter__(self):
        x, y = stored()
        while True:
            index = int(torch.randint(ROWS, ()))
            yield x[index], y[index]


@odd(notes="random windows without end, drawn by every worker from all data")
def random_windows_by_workers():
    return trains_on(lambda: DataLoader(Windows(), batch_size=8, num_workers=2))()


class Buffered(IterableDataset):
    """A shuffle buffer."""

    def __iter__(self):
        held = []
        for row in zip(*stored(), strict=True):
            held.append(row)
            if len(held) > 16:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


@odd(notes="shuffled by a buffer, so that a row never comes long before its place")
def shuffle_buffer():
    return trains_on(lambda: DataLoader(Buffered(), batch_size=8))()


# Other forms.


class Prefetcher:
    """Reads one batch ahead, as loaders for a device do."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        ahead = None
        for batch in self.loader:
            if ahead is not None:
                yield ahead
            ahead = batch
        yield ahead


@odd(notes="a prefetcher around a shuffled loader")
def prefetched():
    return trains_on(lambda: Prefetcher(DataLoader(TensorDataset(*stored()), batch_size=8, shuffle=True)))()


@odd(notes="a list of batches, always in one order")
def list_of_batches():
    x, y = stored()
    return trains_on(lambda: list(zip(x.split(8), y.split(8), strict=True)))()


class Reused:
    """Gives one buffer again and again, filled anew."""

    def __iter__(self):
        x, y = stored()
        rows, labels = x[:8].clone(), y[:8].clone()
        for part in torch.randperm(ROWS).split(8):
            rows.copy_(x[part])
            labels.copy_(y[part])
            yield rows, labels


@odd(notes="every batch is the same tensors, filled anew")
def buffers_filled_anew():
    return trains_on(Reused)()


class Environment:
    """Moves its state, and gives a new tensor of it."""

    def __init__(self):
        self.state, self.goal, self.count = torch.zeros(4), torch.ones(4), torch.zeros(1)

    def step(self):
        self.state = self.state + 0.1 * torch.randn(4)
        self.count += 1
        return self.state


@odd(notes="records share the goal, which nothing writes, and are stored by reference")
def records_share_a_goal():
    model = mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    environment, memory = Environment(), deque(maxlen=256)

    def fit(batches):
        for _ in batches:
            for _ in range(8):
                memory.append((environment.step(), environment.goal))
            drawn = random.sample(list(memory), 8)
            states = torch.stack([torch.cat(record) for record in drawn])
            optimizer.zero_grad()
            (model(states).squeeze(1) - states[:, 0]).square().mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.arange(4.0), fit=fit)


@odd(notes="an auto-encoder's target is its input, beside a mask")
def input_is_the_target():
    model = mlp(6, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x = stored()[0]

    def step(batch):
        clean, target, mask = batch
        optimizer.zero_grad()
        ((model(clean) - target).square() * mask).mean().backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(x, x.clone(), (x > 0).to(x.dtype)), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)


# Trainers that keep what they are given.


def padded(rows):
    """Rows of several lengths in one tensor, which is written once for each row."""
    longest = max(len(row) for row, _ in rows)
    values, lengths = torch.zeros(len(rows), longest), torch.tensor([len(row) for row, _ in rows])
    for number, (row, _) in enumerate(rows):
        values[number, : len(row)] = row
    return values, lengths, torch.stack([label for _, label in rows])


class Series(Dataset):
    """Made when it is asked for, and kept."""

    def __init__(self, rows=48):
        self.rows = []
        for _ in range(rows):
            row = torch.randn(int(torch.randint(3, 9, ())))
            self.rows.append((row, row.mean()))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Engine:
    """The state of a training: its data set, the batches of the epoch, an iterator over them, and what it has seen."""

    def __init__(self):
        self.model = mlp(2, 16, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.dataset, self.history = Series(), []

    def fit(self, batches):
        self.train_dataloader = batches
        for values, lengths, means in batches:
            given = torch.stack([values.sum(1) / lengths, lengths / 8], dim=1)
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(given).squeeze(1), means)
            loss.backward()
            self.optimizer.step()
            self.history.append(loss.item())


@odd(notes="the batches that fit is given are kept, and hold one padded tensor again and again")
def trainer_keeps_its_batches():
    engine = Engine()
    first = padded([engine.dataset[number] for number in range(16)])
    return TrainLoop(model=engine.model, optimizer=engine.optimizer, batch=first, fit=engine.fit)


# Data that are made again from the same seeds in every epoch.


class Bags:
    """Bags of words with labels, batch by batch from seeds of their own."""

    def __iter__(self):
        for seed in range(4):
            draw = torch.Generator().manual_seed(seed)
            words = torch.randint(1, 20, (12, 5), generator=draw)
            labels = torch.randint(3, (12,), generator=draw)
            yield F.one_hot(words, 20).sum(1).float(), labels


def on_bags(batches):
    model = mlp(20, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


@odd(notes="batches are drawn from fixed seeds, words and labels: nothing is shuffled")
def stream_of_rows_from_fixed_seeds():
    return on_bags(Bags())
