"""Collate functions that change labels on purpose, and leave each with its own input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.loaders import ROWS, stored, trains_on
from tests.loops.nets import mlp
from tests.loops.odd import odd


def parts(rows):
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def classifies(collate, classes=2, *, batch_size=8):
    x, y = stored()
    dataset = TensorDataset(x, torch.arange(ROWS) % classes if classes != 3 else y)
    return trains_on(lambda: DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=collate))()


@odd(notes="the collate function swaps the two labels, of which a batch may have as many each")
def labels_swapped_in_collate():
    def swapped(rows):
        x, y = parts(rows)
        return x, 1 - y

    return classifies(swapped)


@odd(notes="the classes of a data set are numbered otherwise than those of the net")
def classes_numbered_anew():
    number = torch.tensor([1, 2, 0])

    def numbered(rows):
        x, y = parts(rows)
        return x, number[y]

    return classifies(numbered, 3)


@odd(notes="the classes of each batch are numbered in a drawn order, as in few-shot learning")
def classes_of_an_episode():
    def episode(rows):
        x, y = parts(rows)
        return x, torch.randperm(3)[y]

    return classifies(episode, 3)


@odd(notes="a fifth of the labels is drawn anew in the collate function, which may keep their numbers")
def noisy_labels_in_collate():
    def noisy(rows):
        x, y = parts(rows)
        drawn = torch.rand(len(y)) < 0.2
        return x, torch.where(drawn, torch.randint(2, y.shape), y)

    return classifies(noisy)


class Texts(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        self.words = [
            torch.randint(1, 20, (int(n),), generator=draw) for n in torch.randint(4, 9, (ROWS,), generator=draw)
        ]

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "labels": words % 5}


class Tagger(nn.Module):
    def __init__(self, out=5):
        super().__init__()
        self.embedding, self.head = nn.Embedding(21, 12, padding_idx=0), nn.Linear(12, out)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def tags(collate, out=5):
    model = Tagger(out)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def step(batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"]).backward()
        optimizer.step()

    loader = DataLoader(Texts(), batch_size=8, shuffle=True, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)


def padded(values, fill=0):
    return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)


@odd(notes="tags are cut to the first three of each text: the others are ignored")
def only_the_first_tags_count():
    def collate(items):
        labels = padded([item["labels"] for item in items], -100)
        labels[:, 3:] = -100
        return {"input_ids": padded([item["input_ids"] for item in items]), "labels": labels}

    return tags(collate)


@odd(notes="the labels are shifted by one position in the collate function")
def labels_shifted_in_collate():
    def collate(items):
        labels = padded([torch.cat([item["labels"][1:], torch.tensor([-100])]) for item in items], -100)
        return {"input_ids": padded([item["input_ids"] for item in items]), "labels": labels}

    return tags(collate)


@odd(notes="tags are renamed entry by entry in the collate function, from five kinds to two")
def tags_renamed_in_collate():
    def collate(items):
        labels = padded([(item["labels"] > 2).long() for item in items], -100)
        return {"input_ids": padded([item["input_ids"] for item in items]), "labels": labels}

    return tags(collate)


@odd(notes="words are masked in the collate function, and only these have a label")
def masked_words_in_collate():
    def collate(items):
        ids = padded([item["input_ids"] for item in items])
        hidden = (torch.rand(ids.shape) < 0.3) & (ids != 0)
        hidden[:, 0] = True
        return {"input_ids": ids.masked_fill(hidden, 20), "labels": ids.masked_fill(~hidden, -100)}

    return tags(collate, 21)


@odd(notes="captions are put beside other images in the collate function, to learn which ones fit")
def captions_that_do_not_fit():
    model = mlp(12, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def pairs(rows):
        image, caption = parts(rows)
        order = torch.where(torch.rand(len(image)) < 0.5, torch.arange(len(image)).roll(1), torch.arange(len(image)))
        return {"image": image, "caption": caption[order], "fits": (order == torch.arange(len(image))).float()}

    def step(batch):
        optimizer.zero_grad()
        scores = model(torch.cat([batch["image"], batch["caption"]], 1)).squeeze(1)
        F.binary_cross_entropy_with_logits(scores, batch["fits"]).backward()
        optimizer.step()

    dataset = TensorDataset(stored()[0], data.labelled(rows=ROWS, seed=7)[0])
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=pairs)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)


@odd(notes="the labels of other rows come beside each row's own, and the rows are mixed in the step")
def mixed_in_the_step():
    model = mlp(6, 24, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def mix(rows):
        x, y = parts(rows)
        order = torch.randperm(len(x))
        return {"x": x, "y": y, "order": order, "other": y[order]}

    def step(batch):
        optimizer.zero_grad()
        scores = model(0.7 * batch["x"] + 0.3 * batch["x"][batch["order"]])
        (0.7 * F.cross_entropy(scores, batch["y"]) + 0.3 * F.cross_entropy(scores, batch["other"])).backward()
        optimizer.step()

    dataset = TensorDataset(stored()[0], torch.arange(ROWS) % 2)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=mix)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, step=step)


@odd(notes="mixup with smoothed labels: every class has a weight, and two have more")
def mixup_of_smoothed_labels():
    def mixed(rows):
        x, y = parts(rows)
        order, share = torch.randperm(len(x)), torch.distributions.Beta(0.4, 0.4).sample((len(x), 1))
        soft = 0.9 * F.one_hot(y, 3).float() + 0.1 / 3
        return share * x + (1 - share) * x[order], share * soft + (1 - share) * soft[order]

    return classifies(mixed, 3)


@odd(notes="CutMix: some features are those of another row, and the label has as large a share of it")
def features_cut_from_another_row():
    def cut(rows):
        x, y = parts(rows)
        order, soft = torch.randperm(len(x)), F.one_hot(y, 3).float()
        return torch.cat([x[:, :4], x[order][:, 4:]], 1), (4 * soft + 2 * soft[order]) / 6

    return classifies(cut, 3)


@odd(notes="another row is mixed in as background, and has no part in the label")
def another_row_as_background():
    def noisy(rows):
        x, y = parts(rows)
        return 0.9 * x + 0.1 * x[torch.randperm(len(x))], F.one_hot(y, 3).float()

    return classifies(noisy, 3)
