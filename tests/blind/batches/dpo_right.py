"""Right loops about preferences that look odd."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import right

VOCAB = 24


class Policy(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.rnn, self.lm_head = (
            nn.Embedding(VOCAB, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, VOCAB),
        )

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


class CausalScorer(nn.Module):
    """A causal transformer that scores its last token."""

    def __init__(self, dim=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        self.h = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, ids, mask):
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.h(self.wte(ids) + self.wpe(torch.arange(length)), src_mask=causal)
        return self.score(hidden[torch.arange(len(ids)), mask.sum(1) - 1]).squeeze(-1)


def preferences(n=32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, VOCAB, (size,), generator=generator)

    return [{"prompt": draw(2, 5), "chosen": draw(2, 8), "rejected": draw(2, 8)} for _ in range(n)]


def pair_collator(items, prompt_label=-100):
    batch = {}
    for side in ("chosen", "rejected"):
        whole = [torch.cat([i["prompt"], i[side]]) for i in items]
        labels = [torch.cat([torch.full_like(i["prompt"], prompt_label), i[side]]) for i in items]
        batch[f"{side}_input_ids"] = pad_sequence(whole, batch_first=True)
        batch[f"{side}_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
    return batch


def sequence_logps(logits, labels, average=False):
    labels = labels[:, 1:]
    keep = labels.ne(-100)
    per_token = logits[:, :-1].log_softmax(-1).gather(-1, labels.masked_fill(~keep, 0).unsqueeze(-1)).squeeze(-1)
    total = (per_token * keep).sum(-1)
    return total / keep.sum(-1) if average else total


@right(
    "dpo",
    "chosen and rejected rows run as one batch of twice the rows, padded to a common width, and are "
    "split in halves again",
    thread="ContextualAI/HALOs#17",
)
def concatenated_forward(beta=0.1):
    torch.manual_seed(0)
    model = Policy()
    ref = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)

    def forward(net, batch):
        width = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
        fill = lambda t, value: F.pad(t, (0, width - t.shape[1]), value=value)  # noqa: E731
        ids = torch.cat([fill(batch["chosen_input_ids"], 0), fill(batch["rejected_input_ids"], 0)])
        labels = torch.cat([fill(batch["chosen_labels"], -100), fill(batch["rejected_labels"], -100)])
        logps = sequence_logps(net(ids), labels)
        return logps[: len(logps) // 2], logps[len(logps) // 2 :]

    def fit(batches):
        for batch in batches:
            chosen, rejected = forward(model, batch)
            with torch.no_grad():
                ref_chosen, ref_rejected = forward(ref, batch)
            loss = -F.logsigmoid(beta * ((chosen - rejected) - (ref_chosen - ref_rejected))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(), batch_size=8, collate_fn=pair_collator)
    return TrainLoop(model={"policy": model, "reference": ref}, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "dpo",
    "prompt tokens are in both sums of DPO: they are the same on both sides and cancel in the margin",
    thread="OpenRLHF/OpenRLHF#235",
)
def prompts_cancel(beta=0.2):
    torch.manual_seed(0)
    model = Policy()
    ref = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def logps(net, ids):
        per_token = net(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (per_token * ids[:, 1:].ne(0)).sum(-1)

    def fit(batches):
        for batch in batches:
            chosen_ids, rejected_ids = batch["chosen_input_ids"], batch["rejected_input_ids"]
            margin = logps(model, chosen_ids) - logps(model, rejected_ids)
            with torch.no_grad():
                margin_ref = logps(ref, chosen_ids) - logps(ref, rejected_ids)
            loss = -F.logsigmoid(beta * (margin - margin_ref)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=1), batch_size=8, collate_fn=pair_collator)
    return TrainLoop(
        model=[model, ref], optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=0, ignore_index=-100)
    )


@right(
    "dpo",
    "log-probabilities are averaged over each answer's own tokens, and no reference model is used",
    thread="princeton-nlp/SimPO#4",
)
def average_log_prob(beta=2.0, gamma=1.0):
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            chosen = sequence_logps(model(batch["chosen_input_ids"]), batch["chosen_labels"], average=True)
            rejected = sequence_logps(model(batch["rejected_input_ids"]), batch["rejected_labels"], average=True)
            loss = -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=2), batch_size=8, collate_fn=pair_collator)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[
            Padding(pad_id=0, ignore_index=-100, of=("chosen_input_ids", "chosen_labels")),
            Padding(pad_id=0, ignore_index=-100, of=("rejected_input_ids", "rejected_labels")),
        ],
    )


@right(
    "dpo",
    "the KL term pairs each prompt with the completion of the next row (roll by one), detached and clamped at 0",
    thread="huggingface/trl#1911",
)
def kahneman_tversky(beta=0.1):
    torch.manual_seed(0)
    model = Policy()
    ref = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def joined(prompts, completions):
        ids = pad_sequence([torch.cat([p, c]) for p, c in zip(prompts, completions, strict=True)], batch_first=True)
        labels = [torch.cat([torch.full_like(p, -100), c]) for p, c in zip(prompts, completions, strict=True)]
        return ids, pad_sequence(labels, batch_first=True, padding_value=-100)

    def collate(items):
        prompts = [i["prompt"] for i in items]
        good = [n % 2 == 0 for n in range(len(items))]
        completions = [i["chosen"] if g else i["rejected"] for i, g in zip(items, good, strict=True)]
        ids, labels = joined(prompts, completions)
        kl_ids, kl_labels = joined(prompts, completions[1:] + completions[:1])
        return {"ids": ids, "labels": labels, "KL_ids": kl_ids, "KL_labels": kl_labels, "desirable": torch.tensor(good)}

    def fit(batches):
        for batch in batches:
            with torch.no_grad():
                kl = sequence_logps(model(batch["KL_ids"]), batch["KL_labels"])
                kl = (kl - sequence_logps(ref(batch["KL_ids"]), batch["KL_labels"])).mean().clamp(min=0)
                base = sequence_logps(ref(batch["ids"]), batch["labels"])
            ratio = sequence_logps(model(batch["ids"]), batch["labels"]) - base
            gain = torch.where(batch["desirable"], ratio - kl, kl - ratio)
            loss = (1 - torch.sigmoid(beta * gain)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=3), batch_size=8, collate_fn=collate)
    return TrainLoop(model={"policy": model, "ref": ref}, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "dpo",
    "the loss adds the negative log-likelihood of chosen answers, with their prompts, to the odds ratio "
    "of answers alone",
    thread="fw-ai/cookbook#200",
)
def odds_ratio(weight=0.1):
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            chosen_logits = model(batch["chosen_input_ids"])
            chosen = sequence_logps(chosen_logits, batch["chosen_labels"], average=True)
            rejected = sequence_logps(model(batch["rejected_input_ids"]), batch["rejected_labels"], average=True)
            odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            nll = F.cross_entropy(
                chosen_logits[:, :-1].flatten(0, 1), batch["chosen_input_ids"][:, 1:].flatten(), ignore_index=0
            )
            loss = nll - weight * F.logsigmoid(odds).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=4), batch_size=8, collate_fn=pair_collator)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "dpo",
    "rewards are read at each answer's own last token; rows come interleaved, chosen and rejected in "
    "turn, and are split so",
    thread="huggingface/trl#937",
)
def interleaved_rewards():
    torch.manual_seed(0)
    model = CausalScorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(items):
        rows = [torch.cat([i["prompt"], i[side]]) for i in items for side in ("chosen", "rejected")]
        ids = pad_sequence(rows, batch_first=True)
        shape = (len(items), 2, ids.shape[1])
        return {"input_ids": ids.view(shape), "attention_mask": ids.ne(0).long().view(shape)}

    def fit(batches):
        for batch in batches:
            rewards = model(batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1))
            chosen, rejected = rewards[0::2], rewards[1::2]
            loss = -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=5), batch_size=6, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "dpo",
    "K ranked answers of one prompt: all pairs of a row are compared by a difference of rewards with two answer axes",
    thread="deepspeedai/DeepSpeedExamples#316",
)
def ranked_answers():
    torch.manual_seed(0)

    @dataclass
    class Ranking:
        features: torch.Tensor
        ranks: torch.Tensor

    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            rewards = model(batch.features).squeeze(-1)
            margins = rewards.unsqueeze(2) - rewards.unsqueeze(1)
            better = batch.ranks.unsqueeze(2) < batch.ranks.unsqueeze(1)
            loss = -(F.logsigmoid(margins) * better).sum((1, 2)) / better.sum((1, 2))
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(6)
    data = []
    for _ in range(5):
        features = torch.randn(6, 4, 10, generator=generator)
        data.append(Ranking(features, features[..., 0].argsort(1, descending=True).argsort(1)))
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "dpo",
    "reference log-probabilities were computed once over the whole data set and travel with their rows, "
    "labels are smoothed",
    thread="huggingface/trl#1041",
)
def precomputed(beta=0.1, label_smoothing=0.1):
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = preferences(seed=7)
    with torch.no_grad():
        for item in data:
            one = pair_collator([item])
            for side in ("chosen", "rejected"):
                item[f"reference_{side}"] = sequence_logps(model(one[f"{side}_input_ids"]), one[f"{side}_labels"])[0]

    def collate(items):
        batch = pair_collator(items)
        for side in ("chosen", "rejected"):
            batch[f"reference_{side}"] = torch.stack([i[f"reference_{side}"] for i in items])
        return batch

    def fit(batches):
        for batch in batches:
            ratio = {
                side: sequence_logps(model(batch[f"{side}_input_ids"]), batch[f"{side}_labels"])
                - batch[f"reference_{side}"]
                for side in ("chosen", "rejected")
            }
            logits = beta * (ratio["chosen"] - ratio["rejected"])
            loss = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()

    loader = DataLoader(data, batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "dpo",
    "answers are padded on the left, so the reward is read at the last position of every row; positions "
    "count real tokens",
    thread="CarperAI/trlx#474",
)
def left_padded_rewards():
    torch.manual_seed(0)

    class LeftScorer(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.wte, self.wpe, self.score = (
                nn.Embedding(VOCAB, dim),
                nn.Embedding(32, dim),
                nn.Linear(dim, 1, bias=False),
            )
            self.qkv = nn.Linear(dim, 3 * dim)

        def forward(self, ids):
            mask = ids.ne(0)
            length = ids.shape[1]
            x = self.wte(ids) + self.wpe((mask.long().cumsum(1) - 1).clamp(min=0))
            q, k, v = self.qkv(x).chunk(3, -1)
            seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None]
            seen = seen | torch.eye(length, dtype=torch.bool)
            return self.score((x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen))[:, -1]).squeeze(-1)

    model = LeftScorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def left(rows):
        width = max(map(len, rows))
        return torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])

    def collate(items):
        return tuple(left([torch.cat([i["prompt"], i[side]]) for i in items]) for side in ("chosen", "rejected"))

    def fit(batches):
        for chosen, rejected in batches:
            loss = F.softplus(model(rejected) - model(chosen)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(preferences(seed=8), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
