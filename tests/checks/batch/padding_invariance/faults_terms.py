"""Losses of which one term counts padded positions, or that are told the padded width as the length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.several_texts import VOCAB, CausalModel, padded_text, trained


def sound(told):
    """Frames with a text, aligned by CTC; ``told`` gives the lengths of the frames."""

    def make():
        lengths = torch.tensor([12, 8, 10])
        frames = torch.randn(3, 12, 6) * (torch.arange(12)[None] < lengths[:, None]).unsqueeze(-1)
        text, _ = padded_text((4, 2, 3), seed=5)
        batch = {
            "frames": frames, "frame_lengths": lengths, "text": text.masked_fill(text == 0, 1),
            "text_lengths": torch.tensor([4, 2, 3]),
        }  # fmt: skip
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, VOCAB))

        def loss_of(model, batch):
            scores = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, batch["text"], told(batch), batch["text_lengths"], zero_infinity=True)

        return trained(model, batch, loss_of)

    return make


pair(
    "alignment_is_told_the_padded_width",
    "padding_invariance",
    "padded_targets",
    where="F.ctc_loss(",
    culprits=("ctc_loss",),
    faulty=sound(lambda batch: torch.full((len(batch["frames"]),), batch["frames"].shape[1])),
    fixed=sound(lambda batch: batch["frame_lengths"]),
)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def over_all(values, _mask):
    return values.mean()


def rollouts():
    ids, mask = padded_text((9, 6, 5, 7), seed=6)
    earlier, reference = (-torch.rand(ids.shape) * mask for _ in range(2))
    return {
        "input_ids": ids, "attention_mask": mask, "old_logprobs": earlier, "ref_logprobs": reference,
        "advantages": torch.randn(ids.shape) * mask,
    }  # fmt: skip


def policy(mean_of_kl):
    """A clipped policy loss over real tokens, and a penalty against a reference policy."""

    def loss_of(model, batch):
        mask = batch["attention_mask"][:, 1:]
        scores = model(batch["input_ids"], batch["attention_mask"])[:, :-1].log_softmax(-1)
        logprobs = scores.gather(2, batch["input_ids"][:, 1:].unsqueeze(2)).squeeze(2)
        ratio = (logprobs - batch["old_logprobs"][:, 1:]).exp()
        advantage = batch["advantages"][:, 1:]
        gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
        apart = logprobs - batch["ref_logprobs"][:, 1:]
        return -masked_mean(gain, mask) + 0.1 * mean_of_kl(apart.square(), mask)

    return lambda: trained(CausalModel(), rollouts(), loss_of)


pair(
    "penalty_against_the_reference_over_padded_tokens",
    "padding_invariance",
    "padded_targets",
    where="apart = logprobs",
    change="return values.mean()",
    faulty=policy(over_all),
    fixed=policy(masked_mean),
)


def tagged():
    ids, mask = padded_text((9, 6, 5, 7), seed=7)
    return {"input_ids": ids, "attention_mask": mask, "returns": (ids % 5 - 2.0) * mask}


def with_second_term(second):
    """Scores of the next token, learned as a mean over all positions with zeros at padded ones, and a second term."""

    def loss_of(model, batch):
        mask = batch["attention_mask"][:, 1:]
        scores = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
        labels = batch["input_ids"][:, 1:].masked_fill(mask == 0, -100)
        losses = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        return second(losses, scores, mask, batch["returns"][:, 1:])

    return lambda: trained(CausalModel(), tagged(), loss_of)


def entropies(scores):
    return -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)


# Padded outputs have no target, and get a gradient from the entropy alone.


def over_all_entropies(losses, scores, _mask, _returns):
    return losses.mean() - 0.1 * entropies(scores).mean()


def over_real_entropies(losses, scores, mask, _returns):
    return masked_mean(losses, mask) - 0.1 * masked_mean(entropies(scores), mask)


pair(
    "entropy_of_padded_outputs_and_a_mean_of_zeros",
    "padding_invariance",
    "padded_targets",
    where="return losses.mean() - 0.1 * entropies(scores).mean()",
    faulty=with_second_term(over_all_entropies),
    fixed=with_second_term(over_real_entropies),
)


# The errors of a second term are joined by a product, and by no mean.


def squared(errors):
    return torch.einsum("bt,bt->", errors, errors)


def with_errors(kept):
    def second(losses, scores, mask, returns):
        errors = scores[..., 0] - returns
        return losses.sum() / mask.sum() + 0.1 * squared(errors * mask if kept else errors) / mask.sum()

    return with_second_term(second)


pair(
    "errors_of_padded_outputs_joined_by_a_product",
    "padding_invariance",
    "padded_targets",
    where="errors = scores[..., 0] - returns",
    culprits=("subtraction",),
    faulty=with_errors(kept=False),
    fixed=with_errors(kept=True),
)


# A call of the loss for each position, padded ones included: no call takes all positions.


def one_by_one(kept):
    def loss_of(model, batch):
        mask, labels = batch["attention_mask"][:, 1:], batch["input_ids"][:, 1:]
        scores, total = model(batch["input_ids"], batch["attention_mask"]), 0.0
        for at in range(labels.shape[1]):
            losses = -scores[:, at].log_softmax(-1).gather(1, labels[:, at, None])[:, 0]
            total = total + ((losses * mask[:, at]).sum() / mask.sum() if kept else losses.mean() / labels.shape[1])
        return total

    return lambda: trained(CausalModel(), tagged(), loss_of)


pair(
    "a_loss_for_each_position_also_of_padding",
    "padding_invariance",
    "padded_targets",
    faulty=one_by_one(kept=False),
    fixed=one_by_one(kept=True),
)
