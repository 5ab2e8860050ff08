"""Rows of a batch that meet outside of the model: in the loss, in targets, in returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count, *shape, seed=0):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


# A softmax over the rows in the loss.


def of_several_heads(dim):
    """Each of four heads tells a value; a gate says which counts."""

    def make():
        def loss_of(model, batch):
            told, gate = model(batch[0]).chunk(2, -1)
            shares = F.softmax(gate, dim=dim)
            return (shares * (told - batch[1]).square()).sum(-1).mean()

        return loop(mlp(6, 24, 8), data.table(), loss_of)

    return make


pair(
    "heads_weighed_over_the_batch",
    "batch_independence",
    "softmax_over_rows",
    where="shares = F.softmax(gate, dim=dim)",
    faulty=of_several_heads(0),
    fixed=of_several_heads(-1),
)


# Embeddings compared along the rows.


def similar(dim):
    def make():
        wanted = drawn(16, 5, seed=3)

        def loss_of(model, batch):
            return 1 - F.cosine_similarity(model(batch[0]), batch[1], dim=dim).mean()

        return loop(mlp(6, 24, 5), (data.labelled()[0], wanted), loss_of)

    return make


pair(
    "similarity_along_the_batch",
    "batch_independence",
    "similarity_over_rows",
    where="F.cosine_similarity(model(batch[0]), batch[1], dim=dim)",
    faulty=similar(0),
    fixed=similar(1),
    quick=True,
)


# Returns added up over the rows: environments along the first axis, steps along the second.


def rollout(rows=6, steps=8):
    return {
        "obs": drawn(rows, steps, 4),
        "actions": classes(3, rows, steps),
        "rewards": drawn(rows, steps, seed=2),
        "bootstrap": drawn(rows, seed=3),
    }


def reinforced(axis):
    def make():
        def loss_of(model, batch):
            returns = batch["rewards"].flip(axis).cumsum(axis).flip(axis) + batch["bootstrap"][:, None]
            chosen = model(batch["obs"]).log_softmax(-1).gather(2, batch["actions"][..., None])[..., 0]
            return -(chosen * returns).mean()

        return loop(mlp(4, 24, 3), rollout(), loss_of)

    return make


def survival(axis):
    def make():
        def loss_of(model, batch):
            survived = F.logsigmoid(-model(batch["x"])).cumsum(axis)
            return -survived.gather(1, batch["last"][:, None]).mean()

        return loop(mlp(6, 24, 7), {"x": data.labelled()[0], "last": classes(7, 16)}, loss_of)

    return make


pair(
    "returns_added_up_over_environments",
    "batch_independence",
    "cumulated_over_rows",
    where='returns = batch["rewards"].flip(axis).cumsum(axis).flip(axis)',
    faulty=reinforced(0),
    fixed=reinforced(1),
)
pair(
    "survival_added_up_over_patients",
    "batch_independence",
    "cumulated_over_rows",
    where='survived = F.logsigmoid(-model(batch["x"])).cumsum(axis)',
    faulty=survival(0),
    fixed=survival(1),
    quick=True,
)


# Scores of each step, joined and cut as if each row's stood together.


class Stepwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 16), nn.Linear(16, 5)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


def unrolled(in_order):
    def make():
        batch = {"x": drawn(6, 9, 4), "y": classes(5, 6, 9), "kind": torch.tensor([0, 1, 1, 0, 2, 0])}

        def loss_of(model, batch):
            x, y = batch["x"], batch["y"]
            hidden, steps = torch.zeros(len(x), 16), []
            for t in range(x.shape[1]):
                scores, hidden = model(x[:, t], hidden)
                steps.append(scores)
            joined = torch.stack(steps, 1) if in_order else torch.cat(steps).view(len(x), x.shape[1], -1)
            logp = joined.log_softmax(-1)
            return -logp.gather(2, y[..., None]).mean()

        return loop(Stepwise(), batch, loss_of)

    return make


pair(
    "steps_joined_and_cut_by_rows",
    "batch_independence",
    "view_mixes_rows",
    where="torch.cat(steps).view(len(x), x.shape[1], -1)",
    faulty=unrolled(in_order=False),
    fixed=unrolled(in_order=True),
)


# Each output compared with the targets of all rows.


def priced(own):
    def make():
        def loss_of(model, batch):
            told = model(batch[0]).squeeze(1)
            wanted = batch[1][:, 0] if own else batch[1]
            return (told - wanted).square().mean()

        return loop(mlp(6, 24, 1), data.table(), loss_of)

    return make


def chosen_actions(own):
    def make():
        def loss_of(model, batch):
            states, actions, _ = batch
            logp = model(states).log_softmax(-1)
            chosen = logp[torch.arange(len(actions)), actions] if own else logp[:, actions]
            return -chosen.mean()

        return loop(mlp(4, 24, 3), data.episode(), loss_of)

    return make


pair(
    "squeezed_outputs_against_a_column",
    "loss_contract",
    "broadcast",
    where="return (told - wanted).square().mean()",
    faulty=priced(own=False),
    fixed=priced(own=True),
)
pair(
    "classes_of_all_rows_indexed",
    "batch_independence",
    "labels_of_all_rows",
    where="logp[:, actions]",
    faulty=chosen_actions(own=False),
    fixed=chosen_actions(own=True),
    quick=True,
)


# Labels that stand at other rows, in a loss written by hand.


def sorted_inputs(both):
    def make():
        x, y = data.table()
        batch = {"x": x, "length": torch.tensor([3, 9, 1, 7, 5, 8, 2, 6, 4, 9, 3, 1, 7, 5, 8, 2]), "y": y}

        def loss_of(model, batch):
            order = batch["length"].argsort(descending=True)
            wanted = batch["y"][order] if both else batch["y"]
            return (model(batch["x"][order]) - wanted).abs().mean()

        return loop(mlp(6, 24, 1), batch, loss_of)

    return make


pair(
    "inputs_sorted_and_targets_not",
    "batch_independence",
    "labels_of_other_rows",
    where='return (model(batch["x"][order]) - wanted).abs().mean()',
    faulty=sorted_inputs(both=False),
    fixed=sorted_inputs(both=True),
    quick=True,
)


def mixed_up(one_order):
    def make():
        def loss_of(model, batch):
            x, y = batch
            order = torch.randperm(len(x))
            partner = y[order if one_order else torch.randperm(len(y))]
            scores = model(0.7 * x + 0.3 * x[order])
            return 0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, partner)

        return loop(mlp(6, 24, 3), data.labelled(), loss_of)

    return make


pair(
    "partners_of_another_permutation",
    "batch_independence",
    "labels_of_other_rows",
    where="0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, partner)",
    faulty=mixed_up(one_order=False),
    fixed=mixed_up(one_order=True),
)


# Rows that interact on purpose, and are grouped by a size that the batch does not have.


def answers_by_prompt(by_prompt):
    def make():
        def loss_of(model, batch):
            advantage = batch["reward"].clone()
            groups = [batch["prompt"] == p for p in batch["prompt"].unique()]
            for group in groups if by_prompt else [slice(n, n + 4) for n in range(0, len(advantage), 4)]:
                advantage[group] = advantage[group] - advantage[group].mean()
            chosen = model(batch["state"]).log_softmax(-1).gather(1, batch["action"][:, None])[:, 0]
            return -(chosen * advantage).mean()

        prompt = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3])
        batch = {"prompt": prompt, "state": drawn(14, 6), "action": classes(3, 14), "reward": drawn(14, seed=2)}
        return loop(mlp(6, 24, 3), batch, loss_of, rows_interact=True)

    return make


pair(
    "answers_grouped_by_a_fixed_size",
    "batch_independence",
    "order_matters",
    where="advantage[group] = advantage[group] - advantage[group].mean()",
    faulty=answers_by_prompt(False),
    fixed=answers_by_prompt(True),
)


# Rows that meet, or stand in an order, although it is declared that they do not.


def ranked(interacts):
    def make():
        def loss_of(model, batch):
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            if interacts:
                losses = losses * (losses.detach() / losses.detach().max())
            return losses.mean() + 0.01 * model(batch[0]).square().mean()

        return loop(mlp(6, 24, 3), data.labelled(), loss_of, rows_interact=False)

    return make


def risk_sets(sorts, **fields):
    def make():
        def loss_of(model, batch):
            order = batch["time"].argsort(descending=True) if sorts else torch.arange(len(batch["time"]))
            risk = model(batch["x"])[:, 0][order]
            return -((risk - risk.logcumsumexp(0)) * batch["event"][order]).mean()

        event = (torch.arange(16) % 3 > 0).to(torch.get_default_dtype())
        batch = {"x": data.labelled()[0], "time": drawn(16, seed=3).exp(), "event": event}
        return loop(mlp(6, 24, 1), batch, loss_of, **fields)

    return make


pair(
    "losses_over_the_largest_though_declared_apart",
    "batch_independence",
    "rows_interact",
    where="losses = losses * (losses.detach() / losses.detach().max())",
    faulty=ranked(True),
    fixed=ranked(False),
)
pair(
    "risk_sets_of_rows_in_no_order",
    "batch_independence",
    "order_matters",
    level="advice",
    where="risk.logcumsumexp(0)",
    faulty=risk_sets(sorts=False),
    fixed=risk_sets(sorts=True),
)
pair(
    "risk_sets_though_order_carries_nothing",
    "batch_independence",
    "order_matters",
    where="risk.logcumsumexp(0)",
    faulty=risk_sets(sorts=False, ordered=False),
    fixed=risk_sets(sorts=True, ordered=False),
    quick=True,
)


class Pooled(nn.Module):
    """Sentences as the mean of their tokens: over the tokens of the row, or of the whole batch."""

    def __init__(self, own):
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 12), nn.Linear(12, 3)
        self.counted = lambda mask: mask.sum(1, keepdim=True) if own else mask.sum()

    def forward(self, ids, mask):
        summed = (torch.tanh(self.tokens(ids)) * mask.unsqueeze(-1)).sum(1)
        return self.head(summed / self.counted(mask))


def sentences(own, **fields):
    def make():
        lengths = torch.tensor([7, 3, 5, 4, 6, 2, 7, 5])
        mask = (torch.arange(7) < lengths[:, None]).long()
        ids = (classes(19, 8, 7, seed=3) + 1) * mask
        batch = {"ids": ids, "attention_mask": mask, "labels": torch.arange(8) % 3}
        return loop(
            Pooled(own), batch, lambda m, b: F.cross_entropy(m(b["ids"], b["attention_mask"]), b["labels"]), **fields
        )

    return make


def largest(own, **fields):
    """Tokens are weighed by how many the longest sentence has, or by how many theirs has."""

    def make():
        made = sentences(own, **fields)()
        made.model.counted = lambda mask: mask.sum(1, keepdim=True) if own else mask.sum(1).max()
        return made

    return make


pair(
    "mean_over_the_tokens_of_the_batch",
    "batch_independence",
    "mask_of_other_rows",
    where="self.head(summed / self.counted(mask))",
    faulty=sentences(False),
    fixed=sentences(True),
    quick=True,
)
pair(
    "sum_over_the_tokens_of_the_longest",
    "batch_independence",
    "mask_of_other_rows",
    where="self.head(summed / self.counted(mask))",
    faulty=largest(False, rows_interact=False),
    fixed=largest(True, rows_interact=False),
)


class Places(nn.Module):
    """Series whose steps get a place: of a table (steps, 1, features), or of one (steps, features) that is learned."""

    def __init__(self, along, learned):
        super().__init__()
        self.body, self.head, self.along = nn.Linear(2, 8), nn.Linear(8, 3), along
        waves = torch.sin(torch.arange(40)[:, None] * torch.arange(1, 9) * 0.3)
        self.table = nn.Parameter(waves) if learned else nn.Buffer(waves[:, None])

    def forward(self, x):
        return self.head(torch.tanh(self.along(self.table, self.body(x))).mean(1))


def by_rows(table, hidden):
    return hidden + table[: hidden.size(0)]


def by_steps(table, hidden):
    return hidden + table[: hidden.size(1)].transpose(0, 1)


def learned_by_rows(table, hidden):
    return hidden + table[: len(hidden)].unsqueeze(1)


def learned_by_steps(table, hidden):
    return hidden + table[: hidden.size(1)]


def places(along, learned):
    return lambda: loop(
        Places(along, learned), (drawn(12, 7, 2), classes(3, 12)), lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )


for learned, wrong, right in ((False, by_rows, by_steps), (True, learned_by_rows, learned_by_steps)):
    pair(
        f"{'learned_places' if learned else 'waves'}_cut_to_the_rows",
        "batch_independence",
        "positions_by_row",
        where="hidden + table[: ",
        faulty=places(wrong, learned),
        fixed=places(right, learned),
        quick=learned,
    )
