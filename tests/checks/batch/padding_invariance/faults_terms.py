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
