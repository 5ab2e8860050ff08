"""Tensors of a batch that do not count as what they are declared to be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, Roles, TrainLoop
from tests.loops.pairs import pair

PAD, EOS, VOCAB, LENGTH = 0, 1, 16, 10
CHECK = "batch_roles_hold"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def answers(rows=6, seed=0):
    """Prompts and answers that count upwards, the end of the text behind them, then padding."""
    ends = torch.tensor([LENGTH, 7, 5, 8, 6, 9])[:rows, None]
    place = torch.arange(LENGTH)[None]
    ids = 2 + (torch.randint(VOCAB - 2, (rows, 1), generator=generator(seed)) + place) % (VOCAB - 2)
    ids = ids.where(place < ends - 1, torch.tensor(EOS)) * (place < ends)
    return {"input_ids": ids, "loss_mask": ((place >= 3) & (place < ends)).float()}


class Causal(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def loop(model, batch, loss_of, *, batches=None, **declared):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, batches=batches, fit=fit, **declared)


def answer_loss(cut):
    def loss_of(model, batch):
        ids, mask = batch["input_ids"], batch["loss_mask"][:, cut]
        nll = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return (nll * mask).sum() / mask.sum()

    return loss_of


pair(
    "loss_mask_cut_at_the_other_end",
    CHECK,
    "left_out_places_count",
    quick=True,
    culprits=("input_ids", "loss_mask"),
    where="loss_of(model, item).backward()",
    faulty=lambda: loop(Causal(), answers(), answer_loss(slice(None, -1)), padding=Padding(pad_id=PAD)),
    fixed=lambda: loop(Causal(), answers(), answer_loss(slice(1, None)), padding=Padding(pad_id=PAD)),
)


# Frames with a class for each row, and a mask of frames that may have holes.


def frames(rows=6, seed=0):
    x = torch.randn(rows, LENGTH, 8, generator=generator(seed))
    seen = torch.rand(rows, LENGTH, generator=generator(seed + 1)) < 0.7
    seen[:, :2] = True
    return {"frames": x, "seen": seen, "labels": (x * seen[..., None]).sum((1, 2)).gt(0).long()}


class Pooled(nn.Module):
    def __init__(self, weigh):
        super().__init__()
        self.body, self.score, self.head = nn.Linear(8, 24), nn.Linear(24, 1), nn.Linear(24, 2)
        self.weigh = weigh

    def forward(self, x, seen):
        hidden = self.body(x).tanh()
        return self.head((self.weigh(self.score(hidden)[..., 0], seen)[..., None] * hidden).sum(1))


def frame_loss(model, batch):
    return F.cross_entropy(model(batch["frames"], batch["seen"]), batch["labels"])


def over_frames(scores, seen):
    return scores.masked_fill(~seen, -torch.inf).softmax(1)


def behind_the_softmax(scores, seen):
    """The sum of the softmax holds the frames that are not seen."""
    return scores.softmax(1) * seen


def inverted(scores, seen):
    return scores.masked_fill(seen, -1e9).softmax(1)


for name, weigh in {"mask_behind_the_softmax": behind_the_softmax, "mask_the_wrong_way_round": inverted}.items():
    pair(
        name,
        CHECK,
        "left_out_places_count",
        culprits=("frames", "seen"),
        mentions=("the wrong way round",) if weigh is inverted else (),
        faulty=lambda weigh=weigh: loop(Pooled(weigh), frames(), frame_loss, roles=Roles(mask="seen")),
        fixed=lambda: loop(Pooled(over_frames), frames(), frame_loss, roles=Roles(mask="seen")),
    )


# Rows with a weight for each.


def weighted(rows=8):
    x = torch.randn(rows, 6, generator=generator())
    counts = torch.tensor([1, 4, 2, 8, 1, 2, 4, 2])
    return {"x": x, "y": x.sum(1, keepdim=True).sin(), "w": counts / counts.sum(), "counts": counts}


def regression(reduced):
    def loss_of(model, batch):
        return reduced(F.mse_loss(model(batch["x"]), batch["y"], reduction="none")[:, 0], batch["w"])

    return loss_of


def net(inputs=6, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, outputs))


def by_weight(loss, w):
    return (loss * w).sum() / w.sum()


def without_w(batch):
    return {key: value for key, value in batch.items() if key != "counts"}


pair(
    "weights_that_cancel",
    CHECK,
    "role_without_effect",
    quick=True,
    culprits=("w",),
    faulty=lambda: loop(
        net(),
        without_w(weighted()),
        regression(lambda loss, w: loss.mean() * w.sum() / w.sum()),
        roles=Roles(weights="w"),
    ),
    fixed=lambda: loop(net(), without_w(weighted()), regression(by_weight), roles=Roles(weights="w")),
)


def conditions(rows=8):
    x, noise = torch.randn(2, rows, 6, generator=generator())
    return {"x": x, "noise": noise, "t": torch.rand(rows, generator=generator(1)), "c": torch.arange(rows) % 3}


class Guided(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.embed, self.body, self.reads = nn.Embedding(3, 7), net(7, 6), reads

    def forward(self, x, c):
        return self.body(x + self.embed(c if self.reads else torch.zeros_like(c)))


def guided_loss(model, batch):
    noisy = batch["x"] + batch["t"][:, None] * batch["noise"]
    return F.mse_loss(model(torch.cat([noisy, batch["t"][:, None]], 1), batch["c"]), batch["noise"])


pair(
    "condition_set_to_zero_on_the_way",
    CHECK,
    "role_without_effect",
    culprits=("c",),
    faulty=lambda: loop(Guided(False), conditions(), guided_loss, roles=Roles(inputs=("t", "c"))),
    fixed=lambda: loop(Guided(True), conditions(), guided_loss, roles=Roles(inputs=("t", "c"))),
)


def cast(rounded):
    batch = weighted()
    batch["w"] = (batch["counts"] // batch["counts"].sum()).float() if rounded else batch["w"]
    return without_w(batch)


pair(
    "weights_by_whole_division",
    CHECK,
    "nothing_counts",
    quick=True,
    culprits=("w",),
    faulty=lambda: loop(net(), cast(True), regression(lambda loss, w: (loss * w).mean()), roles=Roles(weights="w")),
    fixed=lambda: loop(net(), cast(False), regression(lambda loss, w: (loss * w).mean()), roles=Roles(weights="w")),
)


def of_frames(kept):
    batch = frames()
    seen = batch["seen"]
    share = seen.sum(1, keepdim=True) // (LENGTH + 1)  # 0 of each row
    batch["seen"] = seen if kept else seen & (torch.arange(LENGTH) < share * LENGTH)
    return batch


def mean_loss(model, batch):
    hidden, seen = model[0](batch["frames"]).tanh(), batch["seen"][..., None]
    return F.cross_entropy(model[2]((hidden * seen).sum(1) / seen.sum(1).clamp(min=1)), batch["labels"])


pair(
    "mask_of_no_frame",
    CHECK,
    "nothing_counts",
    culprits=("seen",),
    faulty=lambda: loop(net(8, 2), of_frames(False), mean_loss, roles=Roles(mask="seen")),
    fixed=lambda: loop(net(8, 2), of_frames(True), mean_loss, roles=Roles(mask="seen")),
)


# Graphs of which each batch has its own.


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, cached):
        super().__init__()
        self.weight, self.cached, self._norm = nn.Linear(inputs, outputs), cached, None

    def forward(self, x, adjacency):
        if self._norm is None or not self.cached:
            with_loops = adjacency + torch.eye(len(adjacency))
            self._norm = with_loops / with_loops.sum(1, keepdim=True)
        return self._norm @ self.weight(x)


class Graphs(nn.Module):
    def __init__(self, cached):
        super().__init__()
        self.first, self.second = Convolution(3, 24, cached), Convolution(24, 1, cached)

    def forward(self, x, adjacency):
        return self.second(self.first(x, adjacency).tanh(), adjacency)


def graph(seed, nodes=7):
    one_way = (torch.rand(nodes, nodes, generator=generator(seed)) < 0.4).float().triu(1)
    x = torch.randn(4, nodes, 3, generator=generator(seed + 1))
    adjacency = one_way + one_way.T
    return {"x": x, "adjacency": adjacency, "y": (adjacency @ x).sum(-1, keepdim=True).tanh()}


def graph_loss(model, batch):
    return F.mse_loss(model(batch["x"], batch["adjacency"]), batch["y"])


def of_graphs(cached, **declared):
    return loop(Graphs(cached), graph(0), graph_loss, batches=lambda n: [graph(i) for i in range(n)], **declared)


pair(
    "adjacency_of_the_first_graph",
    CHECK,
    "first_value_kept",
    quick=True,
    culprits=("adjacency",),
    faulty=lambda: of_graphs(True),
    fixed=lambda: of_graphs(False),
)


class Smoothness:
    """A penalty on differences along edges. The Laplacian is made once for each number of nodes."""

    def __init__(self, cached):
        self.cached, self._known = cached, {}

    def __call__(self, out, adjacency):
        laplacian = self._known.get(len(adjacency)) if self.cached else None
        if laplacian is None:
            laplacian = self._known[len(adjacency)] = adjacency.sum(1).diag() - adjacency
        return torch.einsum("bnf,nm,bmf->", out, laplacian, out) / out.numel()


def smoothed(cached):
    smooth = Smoothness(cached)

    def loss_of(model, batch):
        out = model(batch["x"])
        return F.mse_loss(out, batch["y"]) + 0.1 * smooth(out, batch["adjacency"])

    return loop(net(3, 1), graph(0), loss_of, batches=lambda n: [graph(i) for i in range(n)])


pair(
    "laplacian_kept_for_its_size",
    CHECK,
    "first_value_kept",
    culprits=("adjacency",),
    faulty=lambda: smoothed(True),
    fixed=lambda: smoothed(False),
)


# A penalty whose mean counts what is behind the end of each answer, where the policy's term leaves it out.


def rollout(seed=0):
    batch = answers(seed=seed)
    seen = batch.pop("input_ids")
    place, numbers = torch.arange(LENGTH - 1), torch.randn(2, len(seen), LENGTH - 1, generator=generator(seed + 1))
    old, reference = numbers * 0.1 - 2.7
    return {"ids": seen, "old": old, "reference": reference, "padding_mask": place >= (seen != PAD).sum(1)[:, None] - 1}


def policy_loss(penalised):
    def loss_of(model, batch):
        ids, keep = batch["ids"], ~batch["padding_mask"]
        logp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        policy = -torch.linspace(-1, 1, len(ids))[:, None] * (logp - batch["old"]).exp()
        away = batch["reference"] - logp
        penalty = 0.05 * (away.expm1() - away)
        if penalised == "kept":
            return ((policy + penalty) * keep).sum() / keep.sum()
        return (policy * keep).sum() / keep.sum() + penalty.mean()

    return loss_of


pair(
    "penalty_counts_behind_the_end_of_answers",
    CHECK,
    "left_out_places_count",
    level="advice",
    mentions=("reference", "padding_mask"),
    faulty=lambda: loop(Causal(), rollout(), policy_loss("all")),
    fixed=lambda: loop(Causal(), rollout(), policy_loss("kept")),
)
