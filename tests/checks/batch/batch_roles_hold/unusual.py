"""Correct loops whose masks, weights and graphs seem to have no effect, or to leave out what counts."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_trainloop import Padding, Roles, TrainLoop
from tests.checks.batch.batch_roles_hold.faults import (
    EOS,
    LENGTH,
    PAD,
    VOCAB,
    Causal,
    Graphs,
    answer_loss,
    answers,
    by_weight,
    conditions,
    frame_loss,
    frames,
    generator,
    graph,
    graph_loss,
    loop,
    net,
    over_frames,
    policy_loss,
    regression,
    rollout,
    weighted,
    without_w,
)
from tests.checks.batch.batch_roles_hold.faults import Pooled as PooledFrames
from tests.loops.odd import odd


def texts(rows=6, pad=PAD, end=EOS):
    """Texts of different lengths, and where they stand."""
    lengths = torch.tensor([LENGTH, 7, 5, 8, 6, 9])[:rows]
    place = torch.arange(LENGTH)[None]
    ids = 2 + (torch.randint(VOCAB - 2, (rows, 1), generator=generator()) + place) % (VOCAB - 2)
    ids = ids.where(place < lengths[:, None] - 1, torch.tensor(end)).where(place < lengths[:, None], torch.tensor(pad))
    return {"input_ids": ids, "attention_mask": (place < lengths[:, None]).long(), "lengths": lengths}


class Attending(Causal):
    """Causal, with a mask of the keys that are read."""

    def forward(self, ids, mask=None):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        earlier = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        keys = earlier if mask is None else earlier & (mask[:, None, :].bool() | torch.eye(ids.shape[1]).bool())
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=keys))


def next_token(ids, scores, keep):
    nll = F.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (nll * keep[:, 1:]).sum() / keep[:, 1:].sum()


@odd(notes="the mask of a causal model, padded on the right, whose last key is read by no one")
def a_mask_that_only_earlier_keys_need() -> TrainLoop:
    def loss_of(model, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return next_token(ids, model(ids, mask), mask)

    batch = {key: texts()[key] for key in ("input_ids", "attention_mask")}
    return loop(Attending(), batch, loss_of, roles=Roles(mask="attention_mask"), padding=Padding(pad_id=PAD))


@odd(notes="a loss mask over answers is declared as weights: prompts are read, and not trained on")
def prompts_without_a_weight() -> TrainLoop:
    roles, padding = Roles(weights="loss_mask"), Padding(pad_id=PAD)
    return loop(Causal(), answers(), answer_loss(slice(1, None)), roles=roles, padding=padding)


@odd(notes="the mask is used as lengths only, by packed sequences")
def a_mask_that_is_counted_for_packing() -> TrainLoop:
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x, mask):
            packed = pack_padded_sequence(x, mask.sum(1), batch_first=True, enforce_sorted=False)
            return self.head(self.gru(packed)[1][-1])

    x, mask = torch.randn(6, LENGTH, 8, generator=generator()), texts()["attention_mask"]
    labels = (x * mask[..., None]).sum((1, 2)).gt(0).long()
    return loop(
        Packed(),
        {"x": x, "mask": mask, "labels": labels},
        lambda model, batch: F.cross_entropy(model(batch["x"], batch["mask"]), batch["labels"]),
        roles=Roles(mask="mask"),
    )


@odd(notes="the model tells padding by its id; the mask next to it says the same")
def padding_told_by_its_id() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch["input_ids"]
        return next_token(ids, model(ids, ids != PAD), (ids != PAD) & batch["attention_mask"].bool())

    batch = {key: texts()[key] for key in ("input_ids", "attention_mask")}
    return loop(Attending(), batch, loss_of, padding=Padding(pad_id=PAD))


@odd(notes="document numbers, weights and lengths that are only printed")
def numbers_for_the_log() -> TrainLoop:
    logged = []

    def loss_of(model, batch):
        loss = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")[:, 0]
        logged.append((batch["doc"][0].item(), float((loss.detach() * batch["sample_weight"]).mean())))
        return loss.mean()

    batch = {"x": weighted()["x"], "y": weighted()["y"], "doc": torch.arange(8), "sample_weight": weighted()["w"]}
    return loop(net(), batch, loss_of)


@odd(notes="all weights are 1, and the sum is divided by their sum")
def weights_of_one() -> TrainLoop:
    batch = without_w(weighted()) | {"w": torch.ones(8)}
    return loop(net(), batch, regression(by_weight), roles=Roles(weights="w"))


@odd(notes="weights that rows are drawn by: none multiplies a loss")
def weights_of_a_draw() -> TrainLoop:
    def drawn(loss, w):
        return loss[torch.multinomial(w, 6, replacement=True)].mean()

    return loop(net(), without_w(weighted()), regression(drawn), roles=Roles(weights="w"))


@odd(notes="weights and a mask next to dropout; most rows are beyond the margin, and have no gradient")
def weights_of_a_margin_with_dropout() -> TrainLoop:
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 1))

    def loss_of(model, batch):
        side = batch["y"][:, 0].sign()
        return (F.relu(0.02 - side * model(batch["x"])[:, 0]) * batch["w"] * batch["valid"]).sum()

    valid = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])
    return loop(model, without_w(weighted()) | {"valid": valid}, loss_of, roles=Roles(weights=("w", "valid")))


@odd(notes="one graph for all batches, and its normalised adjacency is kept")
def the_same_graph_in_every_batch() -> TrainLoop:
    def of_one_graph(seed):
        return graph(seed) | {"adjacency": graph(0)["adjacency"]}

    batches = lambda n: [of_one_graph(i) for i in range(n)]  # noqa: E731
    return loop(Graphs(True), of_one_graph(0), graph_loss, batches=batches, roles=Roles(graph="adjacency"))


@odd(notes="a term that needs the graph is added at every other step, from the first on")
def a_penalty_on_edges_at_every_other_step() -> TrainLoop:
    model = net(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            out = model(batch["x"])
            loss = F.mse_loss(out, batch["y"])
            if number % 2 == 0:
                apart = (out - out.mT).square() * batch["adjacency"]
                loss = loss + 0.1 * apart.mean()
            loss.backward()
            optimizer.step()

    batches = lambda n: [graph(i) for i in range(n)]  # noqa: E731
    return TrainLoop(model=model, optimizer=optimizer, batch=graph(0), batches=batches, fit=fit)


@odd(notes="a convolution reads the zeros behind the end, and a mask leaves its outputs there out of the mean")
def convolution_over_padded_frames() -> TrainLoop:
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(16, 2)

        def forward(self, x, lengths):
            inside = (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
            hidden = self.conv(x.mT).mT.tanh() * inside
            return self.head(hidden.sum(1) / lengths[:, None])

    made = texts()
    x = torch.randn(6, LENGTH, 8, generator=generator()) * made["attention_mask"][..., None]
    return loop(
        Convolved(),
        {"x": x, "lengths": made["lengths"], "labels": x.sum((1, 2)).gt(0).long()},
        lambda model, batch: F.cross_entropy(model(batch["x"], batch["lengths"]), batch["labels"]),
    )


@odd(notes="source and target are padded to one width, each under its own mask")
def two_sequences_of_one_width() -> TrainLoop:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Bilinear(16, 16, 2)

        def mean(self, ids, mask):
            return (self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

        def forward(self, batch):
            return self.head(self.mean(batch["a"], batch["a_mask"]), self.mean(batch["b"], batch["b_mask"]))

    one = texts()
    other = {key: value.flip(0) for key, value in one.items()}
    batch = {"a": one["input_ids"], "a_mask": one["attention_mask"], "b": other["input_ids"] % 15}
    batch |= {"b_mask": other["attention_mask"], "labels": torch.arange(6) % 2}
    return loop(
        Pair(),
        batch,
        lambda model, batch: F.cross_entropy(model(batch), batch["labels"]),
        padding=Padding(pad_id=PAD),
        roles=Roles(mask=("a_mask", "b_mask")),
    )


@odd(notes="frames that are not seen hold noise, and a mask with holes leaves them out")
def frames_with_holes() -> TrainLoop:
    return loop(PooledFrames(over_frames), frames(), frame_loss, roles=Roles(mask="seen"))


@odd(notes="a convolution reads the first padded id, and a mask leaves its outputs there out of the mean")
def convolution_over_padded_ids() -> TrainLoop:
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.conv, self.head = nn.Embedding(VOCAB, 8), nn.Conv1d(8, 16, 3, padding=1), nn.Linear(16, 2)

        def forward(self, ids, mask):
            hidden = self.conv(self.embed(ids).mT).mT.tanh() * mask[..., None]
            return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))

    made = texts()
    return loop(
        Convolved(),
        {"ids": made["input_ids"], "mask": made["attention_mask"], "labels": made["input_ids"][:, 0] % 2},
        lambda model, batch: F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"]),
        padding=Padding(pad_id=PAD),
    )


@odd(notes="a causal model, padded on the right, does not read the mask: the loss leaves out what is behind the end")
def a_mask_that_a_causal_model_does_not_need() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch["input_ids"]
        inside = torch.arange(ids.shape[1]) < batch["lengths"][:, None]
        return next_token(ids, model(ids), inside.float())

    return loop(Attending(), texts(), loss_of, padding=Padding(pad_id=PAD), roles=Roles(lengths="lengths"))


@odd(notes="the condition is dropped for half of the rows, drawn anew in every step")
def a_condition_that_is_dropped() -> TrainLoop:
    model = nn.ModuleDict({"label": nn.Embedding(4, 7), "body": net(7, 6)})

    def loss_of(model, batch):
        noisy = torch.cat([batch["x"] + batch["t"][:, None] * batch["noise"], batch["t"][:, None]], 1)
        kept = torch.where(torch.rand(len(noisy)) < 0.5, torch.tensor(3), batch["c"])
        return F.mse_loss(model["body"](noisy + model["label"](kept)), batch["noise"])

    return loop(model, conditions(), loss_of, roles=Roles(inputs=("t", "c")))


@odd(notes="weights count from the second step on")
def weights_from_the_second_step_on() -> TrainLoop:
    steps = []

    def reduced(loss, w):
        steps.append(len(loss))
        return loss.mean() if len(steps) == 1 else by_weight(loss, w)

    return loop(net(), without_w(weighted()), regression(reduced), roles=Roles(weights="w"))


@odd(notes="no key is padded in this batch, and the mask that is added to scores is 0")
def an_added_mask_of_zeros() -> TrainLoop:
    def over_added(scores, mask):
        return (scores + mask).softmax(1)

    batch = frames() | {"seen": torch.zeros(6, LENGTH)}
    return loop(PooledFrames(over_added), batch, frame_loss, roles=Roles(mask="seen"))


@odd(notes="a penalty on edges at every other step, and each loss is divided by a running mean of them")
def losses_divided_by_their_running_mean() -> TrainLoop:
    model = net(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        mean = None
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            out = model(batch["x"])
            loss = F.mse_loss(out, batch["y"])
            if number % 2 == 0:
                loss = loss + 0.1 * ((out - out.mT).square() * batch["adjacency"]).mean()
            mean = loss.detach() if mean is None else 0.5 * mean + 0.5 * loss.detach()
            (loss / mean).backward()
            optimizer.step()

    batches = lambda n: [graph(i) for i in range(n)]  # noqa: E731
    return TrainLoop(model=model, optimizer=optimizer, batch=graph(0), batches=batches, fit=fit)


@odd(notes="two steps on each batch: the second is still on the first one, and reads its mask")
def two_steps_on_a_batch() -> TrainLoop:
    loss_of = policy_loss("kept")
    batches = [rollout(), {name: tensor.flip(0) for name, tensor in rollout(3).items()}]
    given = loop(Causal(), None, loss_of, batches=batches, roles=Roles(padding_mask="padding_mask"))
    once = given.fit

    def fit(batches):
        for batch in batches:
            once([batch, batch])

    return replace(given, fit=fit)
