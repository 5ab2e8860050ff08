"""What a loop meets once in an epoch: one row, the loader's last batch, rows without labels, the padding's own id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.loop import Padding, TrainLoop

from . import _data as data
from ._nets import GPT, CharLSTM, mlp
from ._pair import pair

CHECK = "edge_batches"


# One row, and squeeze() without a dim.


class Pooled(nn.Module):
    """Features pooled to one pixel, which is then squeezed away."""

    def __init__(self, norm, squeeze):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.Tanh()
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)
        self.squeeze = squeeze

    def forward(self, x):
        return self.head(self.squeeze(self.pool(self.features(x))))


def squeeze_all(x):
    return x.squeeze()


def squeeze_pixels(x):
    return x.squeeze(-1).squeeze(-1)


class Trainer:
    def __init__(self, model, rate=0.02):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, images, labels):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, batches):
        return [self.train_step(images, labels) for images, labels in batches]


def pooled(norm, squeeze):
    def make():
        trainer = Trainer(Pooled(norm, squeeze))
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.images(), fit=trainer.fit)

    return make


for norm, title in ((False, "plain"), (True, "normed")):
    pair(
        f"pooled_features_of_one_image_lose_their_row_{title}",
        "E1",
        CHECK,
        "row_axis_squeezed",
        culprits=("squeeze()",),
        where="return x.squeeze()",
        mentions=("(1, 8, 1, 1) becomes (8,)", "RuntimeError"),
        faulty=pooled(norm, squeeze_all),
        fixed=pooled(norm, squeeze_pixels),
    )


class LitScorer(nn.Module):
    """As a LightningModule would be written; a batch is a dict."""

    def __init__(self, squeeze):
        super().__init__()
        self.net = mlp(6, 16, 1)
        self.squeeze = squeeze

    def training_step(self, batch, batch_idx):
        logits = self.squeeze(self.net(batch["features"]))
        return F.binary_cross_entropy_with_logits(logits, batch["label"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def lit(squeeze):
    def make():
        module = LitScorer(squeeze)
        optimizer = module.configure_optimizers()
        x, y = data.labelled(rows=12, classes=2)

        def fit(batches):
            for index, batch in enumerate(batches):
                loss = module.training_step(batch, index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=module, optimizer=optimizer, batch={"features": x, "label": y.float()}, fit=fit)

    return make


pair(
    "one_score_is_no_vector",
    "E1",
    CHECK,
    "row_axis_squeezed",
    culprits=("squeeze()",),
    mentions=("(1, 1) becomes ()", "ValueError"),
    faulty=lit(lambda x: torch.squeeze(x)),
    fixed=lit(lambda x: torch.squeeze(x, -1)),
)


class Student(nn.Module):
    """As in transformers: the model gives its loss. The teacher's logits stand in the batch."""

    def __init__(self, squeeze):
        super().__init__()
        self.net = mlp(6, 24, 5)
        self.squeeze = squeeze

    def forward(self, inputs, teacher_logits):
        student = F.log_softmax(self.squeeze(self.net(inputs)), dim=-1)
        teacher = F.softmax(self.squeeze(teacher_logits), dim=-1)
        return {"loss": F.kl_div(student, teacher, reduction="batchmean"), "logits": student}


def distilled(squeeze):
    def make():
        model = Student(squeeze)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, _ = data.table(rows=8)
        teacher = torch.stack([x[:, :5].roll(1, 1) * 2, x[:, 1:]], 1)[:, :1]

        def fit(batches):
            for batch in batches:
                model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()

        batch = {"inputs": x[:, None], "teacher_logits": teacher}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "batchmean_of_one_row_divides_by_the_classes",
    "E1",
    CHECK,
    "row_axis_squeezed",
    culprits=("squeeze()",),
    mentions=("nothing is raised", "0.2 times as long"),
    faulty=distilled(squeeze_all),
    fixed=distilled(lambda x: x.squeeze(1)),
)


def summed(squeeze):
    """A mean over rows that is taken by hand."""

    def make():
        model = CharLSTM(width=12)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        ids, following = data.tokens(rows=5)

        def fit(batches):
            for ids, following in batches:
                losses = F.cross_entropy(model(ids).transpose(1, 2), following, reduction="none")
                each = squeeze(losses)
                optimizer.zero_grad()
                (each.sum() / len(each)).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(ids, following), fit=fit)

    return make


pair(
    "one_sentence_is_divided_by_its_tokens",
    "E1",
    CHECK,
    "row_axis_squeezed",
    culprits=("squeeze(0)",),
    mentions=("(1, 12) becomes (12,)",),
    faulty=summed(lambda losses: losses.squeeze(0)),
    fixed=summed(lambda losses: losses),
)


# The loader's own last batch.


def epochs(model, loss_of, batch, loader, rate=0.01, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, batches=loader, fit=fit, **fields)


def with_batch_norm(drop_last):
    def make():
        x, y = data.labelled(rows=401)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        loader = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=drop_last)
        return epochs(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x[:8], y[:8]), loader)

    return make


pair(
    "batch_norm_meets_a_leftover_row",
    "E2",
    CHECK,
    "leftover_batch",
    culprits=("DataLoader",),
    mentions=("1 row", "401 rows of data in batches of 8"),
    faulty=with_batch_norm(drop_last=False),
    fixed=with_batch_norm(drop_last=True),
)


def policy(normalised):
    """Advantages normalised over the minibatch, which at times is one row."""

    def make():
        generator = torch.Generator().manual_seed(3)
        states, actions = data.labelled(rows=301, classes=4)
        returns = torch.randn(301, generator=generator) + (actions == 1)
        rows = [{"state": s, "action": a, "return": r} for s, a, r in zip(states, actions, returns, strict=True)]
        model = mlp(6, 24, 4)

        def loss_of(model, batch):
            chosen = F.log_softmax(model(batch["state"]), -1).gather(1, batch["action"][:, None])[:, 0]
            return -(normalised(batch["return"]) * chosen).mean()

        loader = DataLoader(rows, batch_size=12, shuffle=True, generator=generator)
        first = {name: torch.stack([row[name] for row in rows[:12]]) for name in rows[0]}
        return epochs(model, loss_of, first, loader, stochastic=False)

    return make


def by_deviation(advantages):
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


pair(
    "advantages_of_one_row_have_no_deviation",
    "E2",
    CHECK,
    "leftover_batch",
    culprits=("DataLoader", "std"),
    where="return (advantages - advantages.mean())",
    mentions=("not finite",),
    faulty=policy(by_deviation),
    fixed=policy(lambda a: by_deviation(a) if len(a) > 1 else a),
)


# Rows in which nothing counts.


def conversations(rows=6, length=12):
    """Ids, and labels of the answers only: one row is all question."""
    ids, following = data.tokens(rows=rows, length=length)
    asked = torch.tensor([3, 12, 6, 4, 5, 2] * (rows // 6 + 1))[:rows]
    labels = following.masked_fill(torch.arange(length)[None] < asked[:, None], -100)
    return ids, labels


def likelihoods(model, batch):
    """Of each label, zero where there is none."""
    labels = batch["labels"]
    kept = (labels != -100).float()
    chosen = F.log_softmax(model(batch["input_ids"]), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * kept, kept


def mean_of_answers(model, batch):
    chosen, kept = likelihoods(model, batch)
    return -chosen.sum() / kept.sum()


def mean_of_answers_if_any(model, batch):
    chosen, kept = likelihoods(model, batch)
    return -chosen.sum() / kept.sum().clamp(min=1)


def mean_by_torch(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def finetuning(loss_of):
    def make():
        ids, labels = conversations(301)
        loader = DataLoader([{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)], 6, shuffle=True)
        return epochs(GPT(), loss_of, {"input_ids": ids[:6], "labels": labels[:6]}, loader)

    return make


pair(
    "a_question_without_an_answer_is_left_over",
    "E3",
    CHECK,
    "nan_when_all_ignored",
    culprits=("div",),
    where="return -chosen.sum() / kept.sum()",
    mentions=("1 of 6 rows", "weights NaN"),
    faulty=finetuning(mean_of_answers),
    fixed=finetuning(mean_of_answers_if_any),
)
pair(
    "the_loss_of_a_question_without_an_answer_is_logged",
    "E3",
    CHECK,
    "nan_when_all_ignored",
    level="advice",
    culprits=("cross_entropy",),
    where="return F.cross_entropy(model(batch",
    mentions=("the loss NaN",),
    faulty=finetuning(mean_by_torch),
    fixed=finetuning(mean_of_answers_if_any),
)


def frames(rows=8, length=10):
    """Values, and a mask of those frames that count: two rows are silent."""
    waves, _ = data.series(rows=rows, length=length)
    heard = torch.tensor([10, 0, 7, 9, 0, 8, 10, 6])
    return waves, torch.arange(length)[None] < heard[:, None]


def recognition(mean):
    def make(accumulate=1):
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def fit(batches):
            for number, (waves, mask) in enumerate(batches, 1):
                errors = (model(waves) - waves.roll(1, 1)).squeeze(-1) ** 2
                (mean(errors, mask) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=frames(), fit=fit)

    return make


def mean_of_frames(errors, mask):
    return (errors * mask).sum() / mask.sum()


def mean_of_frames_if_any(errors, mask):
    return (errors * mask).sum() / mask.sum().clamp(min=1)


pair(
    "silent_frames_fill_a_micro_batch",
    "E3",
    CHECK,
    "nan_when_all_ignored",
    culprits=("div",),
    where="return (errors * mask).sum() / mask.sum()",
    mentions=("2 of 8 rows",),
    faulty=recognition(mean_of_frames),
    fixed=recognition(mean_of_frames_if_any),
)


# A row of length one.


def padded(sentences):
    """A collate function that pads to the longest."""
    width = max(len(s) for s in sentences)
    ids = torch.stack([F.pad(s, (0, width - len(s))) for s in sentences])
    return {"ids": ids, "lengths": torch.tensor([len(s) for s in sentences])}


def languages(model_of, loss_of):
    def make():
        ids, _ = data.tokens(rows=241, length=10, vocab=15)
        sizes = [6, 1, 4, 3, 5, 2, 7, 1, 3, 9, 8, 2]
        rows = [row[: sizes[n % 12]] + 1 for n, row in enumerate(ids)]
        loader = DataLoader(rows, batch_size=6, shuffle=True, collate_fn=padded)
        return epochs(model_of(), loss_of, padded(rows[:6]), loader, padding=Padding(pad_id=0))

    return make


class Speaker(nn.Module):
    """Tells two kinds of sentences apart by the spread of what it hears over time."""

    def __init__(self, spread):
        super().__init__()
        self.embed = nn.Embedding(16, 12, padding_idx=0)
        self.head = nn.Linear(24, 2)
        self.spread = spread

    def forward(self, ids, lengths):
        heard = self.embed(ids)
        kept = (torch.arange(ids.shape[1])[None] < lengths[:, None])[..., None]
        mean = (heard * kept).sum(1) / lengths[:, None]
        return self.head(torch.cat([mean, self.spread(heard)], 1))


def kind_of_sentence(spread):
    return lambda: Speaker(spread), lambda model, batch: F.cross_entropy(
        model(batch["ids"], batch["lengths"]), batch["ids"][:, 0] % 2
    )


def by_time(heard):
    return heard.std(1)


def by_time_or_none(heard):
    return heard.std(1, correction=0).clamp(min=0) if heard.shape[1] > 1 else torch.zeros_like(heard[:, 0])


class Meter(nn.Module):
    """Readings of each device, in units of their own spread over time; the class Trainer takes tuples."""

    def __init__(self, scaled):
        super().__init__()
        self.rnn = nn.GRU(1, 12, batch_first=True)
        self.head = nn.Linear(12, 2)
        self.scaled = scaled

    def forward(self, readings):
        values, lengths = readings
        hidden, _ = self.rnn(self.scaled(values))
        return self.head(hidden[torch.arange(len(values)), lengths - 1])


def read(devices):
    width = max(len(values) for values, _ in devices)
    values = torch.stack([F.pad(values, (0, 0, 0, width - len(values))) for values, _ in devices])
    return (values, torch.tensor([len(v) for v, _ in devices])), torch.stack([label for _, label in devices])


def metering(scaled):
    def make():
        waves, _ = data.series(rows=151, length=9)
        sizes = [9, 3, 1, 4, 7, 2, 1, 8, 5, 6]
        devices = [(w[: sizes[n % 10]], (w[0, 0] > 0).long()) for n, w in enumerate(waves)]
        trainer = Trainer(Meter(scaled))
        loader = DataLoader(devices, batch_size=6, collate_fn=read)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=read(devices[:6]),
            batches=loader,
            fit=trainer.fit,
        )

    return make


def by_spread(values):
    return values / (values.std(1, keepdim=True) + 1e-3)


def by_spread_about_zero(values):
    return values / (values.square().mean(1, keepdim=True).sqrt() + 1e-3)


pair(
    "a_sentence_of_one_word_has_no_spread",
    "E4",
    CHECK,
    "nan_at_length_one",
    culprits=("std",),
    where="return heard.std(1)",
    faulty=languages(*kind_of_sentence(by_time)),
    fixed=languages(*kind_of_sentence(by_time_or_none)),
)
pair(
    "a_meter_that_was_read_once_has_no_spread",
    "E4",
    CHECK,
    "nan_at_length_one",
    level="advice",
    culprits=("std",),
    mentions=("row 2",),
    faulty=metering(by_spread),
    fixed=metering(by_spread_about_zero),
)


# The padding has no row in the table.


def classifying(rows):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(rows, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask, labels):
            x = self.embed(input_ids) * attention_mask[..., None]
            return F.cross_entropy(self.head(x.sum(1) / attention_mask.sum(1, keepdim=True)), labels)

    def make():
        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        ids, _ = data.tokens(rows=9, length=8)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(9) % 3}

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                model(**batch).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, padding=Padding(pad_id=16))

    return make


pair(
    "table_without_the_padding_token",
    "E5",
    CHECK,
    "index_out_of_table",
    culprits=("embed",),
    where="x = self.embed(input_ids)",
    mentions=("16",),
    faulty=classifying(16),
    fixed=classifying(17),
)


def continuing(vocabulary):
    def make():
        ids, following = data.tokens(rows=5)
        trainer = Trainer(GPT(vocab=vocabulary))
        trainer.criterion = lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-1)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=(ids, following),
            fit=trainer.fit,
            padding=Padding(pad_id=17, ignore_index=-1),
        )

    return make


pair(
    "language_model_of_one_word_too_few",
    "E5",
    CHECK,
    "index_out_of_table",
    culprits=("token",),
    faulty=continuing(17),
    fixed=continuing(18),
)
