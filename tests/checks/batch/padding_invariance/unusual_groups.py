"""Right loops over batches of several padded sequences, or with targets by position beside padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops.odd import odd
from tests.loops.several_texts import VOCAB, CausalModel, answers, padded_text, trained


def counted(scores, ids, mask):
    each = scores[:, :-1].log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (each * mask[:, 1:]).sum(1)


@odd(notes="prompts are padded on the left and answers on the right, and joined before the model")
def prompts_on_the_left_and_answers_on_the_right() -> TrainLoop:
    prompts, prompt_mask = padded_text((6, 4, 3, 5), seed=1)
    texts, text_mask = padded_text((5, 6, 4, 3), seed=2)

    def loss_of(model, batch):
        ids = torch.cat([batch["prompt"], batch["answer"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["answer_mask"]], 1)
        position = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = model["embed"](ids) + model["position"](position)
        seen = (torch.ones(ids.shape[1], ids.shape[1]).tril() == 1) & (mask[:, None, :] == 1)
        scores = (hidden @ hidden.mT).masked_fill(~(seen | (torch.eye(ids.shape[1]) == 1)), float("-inf"))
        out = model["head"](hidden + scores.softmax(-1) @ hidden)
        width = batch["answer"].shape[1]
        labels = batch["answer"].masked_fill(batch["answer_mask"] == 0, -100)
        return F.cross_entropy(out[:, -width - 1 : -1].transpose(1, 2), labels)

    model = nn.ModuleDict(
        {"embed": nn.Embedding(VOCAB, 16), "position": nn.Embedding(32, 16), "head": nn.Linear(16, VOCAB)}
    )
    batch = {"prompt": prompts.flip(1), "prompt_mask": prompt_mask.flip(1), "answer": texts, "answer_mask": text_mask}
    return trained(model, batch, loss_of)


@odd(notes="the first mask is of prompts and answers, the second one of answers: one padding, two regions")
def a_mask_of_answers_beside_that_of_padding() -> TrainLoop:
    ids, mask = padded_text((9, 6, 5, 7), seed=3)
    answer = mask.clone()
    answer[:, :3] = 0

    def loss_of(model, batch):
        labels = batch["ids"][:, 1:].masked_fill(batch["answer_mask"][:, 1:] == 0, -100)
        return F.cross_entropy(model(batch["ids"], batch["mask"])[:, :-1].transpose(1, 2), labels)

    return trained(CausalModel(), {"ids": ids, "mask": mask, "answer_mask": answer}, loss_of)


@odd(notes="both answers are joined to one batch, so that they can only be of one width")
def answers_joined_to_one_batch() -> TrainLoop:
    def loss_of(model, batch):
        ids, mask = (
            torch.cat([batch[f"{side}_{key}"] for side in ("chosen", "rejected")])
            for key in ("input_ids", "attention_mask")
        )
        chosen, rejected = counted(model(ids, mask), ids, mask).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return trained(CausalModel(), answers(), loss_of)


@odd(notes="likelihoods are taken against those of a reference that were computed before, and zero in padding")
def rewards_against_reference_log_probabilities() -> TrainLoop:
    ids, mask = padded_text((9, 6, 5, 7), seed=4)
    before = -torch.rand(ids.shape) * mask

    def loss_of(model, batch):
        logits = model(batch["ids"], batch["mask"])[:, :-1]
        each = logits.log_softmax(-1).gather(2, batch["ids"][:, 1:].unsqueeze(2)).squeeze(2)
        apart = (each - batch["before"][:, 1:]) * batch["mask"][:, 1:]
        return (apart.exp() - apart - 1).sum() / batch["mask"][:, 1:].sum()

    return trained(CausalModel(), {"ids": ids, "mask": mask, "before": before}, loss_of)


@odd(notes="slots that hold no object are a class of their own: all of them count, and boxes of objects only")
def detection_with_a_class_for_no_object() -> TrainLoop:
    kept = torch.arange(6)[None] < torch.tensor([6, 3, 2, 4])[:, None]
    batch = {
        "image": torch.randn(4, 12), "boxes": torch.rand(4, 6, 4) * kept.unsqueeze(-1),
        "labels": torch.randint(1, 5, (4, 6)) * kept, "objects": kept.sum(1),
    }  # fmt: skip

    class Slots(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes, self.box = nn.Linear(12, 6 * 8), nn.Linear(8, 5), nn.Linear(8, 4)

        def forward(self, image):
            x = self.body(image).relu().view(len(image), 6, 8)
            return self.classes(x), self.box(x)

    def loss_of(model, batch):
        classes, boxes = model(batch["image"])
        kept = torch.arange(6)[None] < batch["objects"][:, None]
        return F.cross_entropy(classes.transpose(1, 2), batch["labels"]) + F.l1_loss(boxes[kept], batch["boxes"][kept])

    return trained(Slots(), batch, loss_of)


@odd(notes="the attention of a decoder sees padding of its own under a causal mask, and the source under its mask")
def source_and_target_of_equal_and_declared_width() -> TrainLoop:
    source, source_mask = padded_text((8, 4, 5, 6), seed=5)
    target, target_mask = padded_text((5, 8, 4, 4), seed=6)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.decoder = nn.Embedding(VOCAB, 16), CausalModel()
            self.cross, self.head = (
                nn.MultiheadAttention(VOCAB, 2, kdim=16, vdim=16, batch_first=True),
                nn.Linear(24, 24),
            )

        def forward(self, source, hidden, target):
            x, memory = self.decoder(target, torch.ones_like(target)), self.source(source)
            return self.head(x + self.cross(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0])

    def loss_of(model, batch):
        labels = batch["tgt"][:, 1:].masked_fill(batch["tgt_mask"][:, 1:] == 0, -100)
        scores = model(batch["src"], batch["src_mask"] == 0, batch["tgt"][:, :-1])
        return F.cross_entropy(scores.transpose(1, 2), labels)

    batch = {"src": source, "src_mask": source_mask, "tgt": target, "tgt_mask": target_mask}
    both = [Padding(pad_id=0, of=("src", "src_mask")), Padding(pad_id=0, of=("tgt", "tgt_mask"))]
    return trained(Translator(), batch, loss_of, padding=both)


@odd(notes="words of a sentence are compared with those of another under both masks")
def words_compared_under_both_masks() -> TrainLoop:
    first, first_mask = padded_text((8, 4, 5, 6), seed=7)
    second, second_mask = padded_text((5, 8, 4, 4), seed=8)

    def loss_of(model, batch):
        a, b = model[0](batch["a"]), model[0](batch["b"])
        seen = (batch["a_mask"][:, :, None] * batch["b_mask"][:, None, :]).to(a.dtype)
        near = ((a @ b.mT).tanh() * seen).sum((1, 2)) / seen.sum((1, 2))
        return F.mse_loss(model[1](near.unsqueeze(1)).squeeze(1), batch["y"])

    batch = {"a": first, "a_mask": first_mask, "b": second, "b_mask": second_mask, "y": torch.rand(4)}
    return trained(nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(1, 1)), batch, loss_of)


@odd(notes="inputs end before the targets do: a forecast reads nothing but zeros then, and counts to the targets' end")
def inputs_end_before_their_targets() -> TrainLoop:
    place, ends = torch.arange(10)[None], torch.tensor([8, 4, 5, 6])
    known, asked = place < ends[:, None], place < (ends + 2)[:, None]
    batch = {
        "x": torch.randn(4, 10, 3) * known.unsqueeze(-1), "y": torch.randn(4, 10) * asked, "known": ends,
        "asked": ends + 2,
    }  # fmt: skip

    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0]).squeeze(-1)

    def loss_of(model, batch):
        kept = torch.arange(batch["y"].shape[1])[None] < batch["asked"][:, None]
        return F.mse_loss(model(batch["x"])[kept], batch["y"][kept])

    return trained(Forecast(), batch, loss_of)


@odd(notes="values of states after the end of an episode are trained towards zero: it is absorbing")
def absorbing_states_after_the_end() -> TrainLoop:
    alive = (torch.arange(8)[None] < torch.tensor([8, 5, 3, 6])[:, None]).to(torch.get_default_dtype())
    batch = {
        "observations": torch.randn(4, 8, 4) * alive.unsqueeze(-1), "returns": torch.randn(4, 8) * alive,
        "actions": torch.randint(0, 3, (4, 8)) * alive.long(), "alive": alive,
    }  # fmt: skip

    def loss_of(model, batch):
        scores = model[1](batch["observations"]).log_softmax(-1)
        value = model[0](batch["observations"]).squeeze(-1)
        chosen = scores.gather(2, batch["actions"].unsqueeze(2)).squeeze(2)
        gain = (batch["returns"] - value.detach()) * chosen * batch["alive"]
        return (value - batch["returns"]).square().mean() - gain.sum() / batch["alive"].sum()

    return trained(nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 3)]), batch, loss_of)
