"""Faulty loops about preferences: pairs, reward models, prompts and masks."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import fault

VOCAB = 24


class Policy(nn.Module):
    """A causal language model of one recurrent layer."""

    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def preferences(n=32, seed=0):
    """Prompts with a chosen and a rejected completion each."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: torch.randint(  # noqa: E731
        1, VOCAB, (int(torch.randint(low, high, (1,), generator=generator)),), generator=generator
    )
    return [{"prompt": draw(2, 5), "chosen": draw(2, 8), "rejected": draw(2, 8)} for _ in range(n)]


def joined(item, side):
    return torch.cat([item["prompt"], item[side]])


def labelled(item, side):
    return torch.cat([torch.full_like(item["prompt"], -100), item[side]])


def pair_collator(items):
    batch = {}
    for side in ("chosen", "rejected"):
        batch[f"{side}_input_ids"] = pad_sequence([joined(i, side) for i in items], batch_first=True)
        batch[f"{side}_labels"] = pad_sequence([labelled(i, side) for i in items], batch_first=True, padding_value=-100)
    return batch


def token_logps(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def sequence_logps(logits, labels):
    labels = labels[:, 1:]
    keep = labels.ne(-100)
    per_token = logits[:, :-1].log_softmax(-1).gather(-1, labels.masked_fill(~keep, 0).unsqueeze(-1)).squeeze(-1)
    return (per_token * keep).sum(-1), keep.sum(-1)


@fault(
    "dpo",
    "get_log_prob adds the log-probabilities of padding tokens: no mask before the sum",
    thread="0xallam/Direct-Preference-Optimization#4",
    check="padding_invariance",
)
def preference_optimization(beta=0.1):
    torch.manual_seed(0)
    model = Policy()
    ref = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def get_log_prob(logits, labels, start):
        per_token = token_logps(logits, labels)
        response = torch.arange(1, labels.shape[1]) >= start[:, None]
        return (per_token * response).sum(-1)

    def collate(items):
        chosen = pad_sequence([joined(i, "chosen") for i in items], batch_first=True)
        rejected = pad_sequence([joined(i, "rejected") for i in items], batch_first=True)
        return chosen, rejected, torch.tensor([len(i["prompt"]) for i in items])

    def fit(batches):
        for chosen, rejected, start in batches:
            with torch.no_grad():
                base = get_log_prob(ref(chosen), chosen, start) - get_log_prob(ref(rejected), rejected, start)
            ratio = get_log_prob(model(chosen), chosen, start) - get_log_prob(model(rejected), rejected, start)
            loss = -F.logsigmoid(beta * (ratio - base)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model={"policy": model, "reference": ref},
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=Padding(pad_id=0),
    )


@fault(
    "dpo",
    "completion masks come with the batch and are not used: the average log-probability is taken over the prompt too",
    thread="princeton-nlp/SimPO#13",
    check="input_dependence",
)
def simple_preferences(beta=2.0, gamma=0.5):
    torch.manual_seed(0)

    class SimPO(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = Policy()

        def average(self, ids, attention_mask, completion_mask):
            per_token = token_logps(self.policy(ids), ids)
            keep = attention_mask[:, 1:].to(per_token.dtype)
            return (per_token * keep).sum(-1) / keep.sum(-1)

        def forward(
            self, chosen_ids, chosen_mask, chosen_completion_mask, rejected_ids, rejected_mask, rejected_completion_mask
        ):
            chosen = self.average(chosen_ids, chosen_mask, chosen_completion_mask)
            rejected = self.average(rejected_ids, rejected_mask, rejected_completion_mask)
            return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()

    def collate(items):
        batch = {}
        for side in ("chosen", "rejected"):
            rows = [joined(i, side) for i in items]
            batch[f"{side}_ids"] = pad_sequence(rows, batch_first=True)
            batch[f"{side}_mask"] = pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
            done = [torch.cat([torch.zeros_like(i["prompt"]), torch.ones_like(i[side])]) for i in items]
            batch[f"{side}_completion_mask"] = pad_sequence(done, batch_first=True)
        return batch

    model = SimPO()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=1), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "dpo",
    "chosen and rejected rows are stacked as two halves and split as neighbours (scores[::2], "
    "scores[1::2]): pairs of other prompts",
    thread="CarperAI/trlx#474",
    check="batch_independence",
)
def reward_pairs():
    torch.manual_seed(0)

    class RewardModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
            self.v_head = nn.Linear(32, 1, bias=False)

        def forward(self, features):
            return self.v_head(self.backbone(features)).squeeze(-1)

    model = RewardModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for chosen, rejected in batches:
            scores = model(torch.cat([chosen, rejected]))
            loss = -F.logsigmoid(scores[::2] - scores[1::2]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(2)
    chosen, rejected = torch.randn(32, 10, generator=generator) + 0.5, torch.randn(32, 10, generator=generator)
    loader = DataLoader(list(zip(chosen, rejected, strict=True)), batch_size=8)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, ordered=False)


@fault(
    "dpo",
    "the reward is read at the last position, which is padding for shorter answers, in place of the last token",
    thread="huggingface/trl#937",
    check="padding_invariance",
)
def sequence_reward():
    torch.manual_seed(0)

    class SequenceClassifier(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
            self.h = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.score = nn.Linear(dim, 1, bias=False)

        def forward(self, ids, mask):
            length = ids.shape[1]
            x = self.wte(ids) + self.wpe(torch.arange(length))
            causal = torch.ones(length, length, dtype=torch.bool).triu(1)
            return self.score(self.h(x, src_mask=causal))[:, -1, 0]

    model = SequenceClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(items):
        out = {}
        for side, key in (("chosen", "j"), ("rejected", "k")):
            ids = pad_sequence([joined(i, side) for i in items], batch_first=True)
            out[f"input_ids_{key}"], out[f"attention_mask_{key}"] = ids, ids.ne(0).long()
        return out

    def fit(batches):
        for inputs in batches:
            rewards_j = model(inputs["input_ids_j"], inputs["attention_mask_j"])
            rewards_k = model(inputs["input_ids_k"], inputs["attention_mask_k"])
            loss = -F.logsigmoid(rewards_j - rewards_k).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=3), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "dpo",
    "log-probabilities of the rejected answers are summed under the mask of the chosen ones",
    thread="OpenRLHF/OpenRLHF#465",
    check="padding_invariance",
)
def concatenated_pairs(beta=0.2):
    torch.manual_seed(0)
    model = Policy()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    class Pair(NamedTuple):
        chosen: torch.Tensor
        rejected: torch.Tensor
        c_mask: torch.Tensor
        r_mask: torch.Tensor

    def collate(items, width=14):
        side = lambda name: torch.stack([F.pad(joined(i, name), (0, width - len(joined(i, name)))) for i in items])  # noqa: E731
        chosen, rejected = side("chosen"), side("rejected")
        return Pair(chosen, rejected, chosen.ne(0), rejected.ne(0))

    def concatenated_forward(net, batch):
        ids = torch.cat([batch.chosen, batch.rejected])
        keep = torch.cat([batch.c_mask, batch.c_mask])[:, 1:]
        sums = (token_logps(net(ids), ids) * keep).sum(-1)
        return sums.chunk(2)

    def fit(batches):
        for batch in batches:
            chosen, rejected = concatenated_forward(model, batch)
            with torch.no_grad():
                ref_chosen, ref_rejected = concatenated_forward(reference, batch)
            logits = (chosen - ref_chosen) - (rejected - ref_rejected)
            loss = -F.logsigmoid(beta * logits).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=4), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model={"model": model, "reference": reference},
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[Padding(pad_id=0, of=("chosen", "c_mask")), Padding(pad_id=0, of=("rejected", "r_mask"))],
    )


@fault(
    "dpo",
    "IPO divides each answer's sum by the padded width (logps.mean(-1)) and not by its own number of tokens",
    thread="modelscope/ms-swift#9925",
    check="padding_invariance",
)
def identity_preferences(tau=0.1):
    torch.manual_seed(0)
    model = Policy()
    ref = copy.deepcopy(model).eval()
    for parameter in ref.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def logps(net, ids, labels):
        keep = labels[:, 1:].ne(-100)
        per_token = token_logps(net(ids), ids) * keep
        return per_token.mean(-1)

    def ratio(net, batch):
        chosen = logps(net, batch["chosen_input_ids"], batch["chosen_labels"])
        return chosen - logps(net, batch["rejected_input_ids"], batch["rejected_labels"])

    def fit(batches):
        for batch in batches:
            with torch.no_grad():
                base = ratio(ref, batch)
            loss = (ratio(model, batch) - base - 1 / (2 * tau)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=5), batch_size=8, collate_fn=pair_collator)
    return TrainLoop(
        model={"policy": model, "ref": ref},
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[
            Padding(pad_id=0, ignore_index=-100, of=("chosen_input_ids", "chosen_labels")),
            Padding(pad_id=0, ignore_index=-100, of=("rejected_input_ids", "rejected_labels")),
        ],
    )


@fault(
    "dpo",
    "the rows are sorted by length before the policy's forward pass, the precomputed reference "
    "log-probabilities are not",
    thread="huggingface/trl#2368",
    check="batch_independence",
)
def precomputed_reference(beta=0.1):
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = preferences(seed=6)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for item in data:
            one = pair_collator([item])
            for side in ("chosen", "rejected"):
                sums, _ = sequence_logps(reference(one[f"{side}_input_ids"]), one[f"{side}_labels"])
                item[f"reference_{side}_logps"] = sums[0] + 0.1 * len(item[side])

    def collate(items):
        batch = pair_collator(items)
        for side in ("chosen", "rejected"):
            batch[f"reference_{side}_logps"] = torch.stack([i[f"reference_{side}_logps"] for i in items])
        return batch

    def forward(ids, labels):
        order = labels.ne(-100).sum(-1).argsort(descending=True)
        sums, _ = sequence_logps(model(ids[order]), labels[order])
        return sums

    def fit(batches):
        for batch in batches:
            chosen = forward(batch["chosen_input_ids"], batch["chosen_labels"])
            rejected = forward(batch["rejected_input_ids"], batch["rejected_labels"])
            margin = (chosen - batch["reference_chosen_logps"]) - (rejected - batch["reference_rejected_logps"])
            loss = -F.logsigmoid(beta * margin).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(data, batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
