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


def distilled(mean_of_kl):
    def loss_of(models, batch):
        student = models["student"](batch["ids"], batch["mask"])
        with torch.no_grad():
            teacher = models["teacher"](batch["ids"], batch["mask"]).softmax(-1)
        labels = batch["ids"][:, 1:].masked_fill(batch["mask"][:, 1:] == 0, -100)
        apart = F.kl_div(student.log_softmax(-1), teacher, reduction="none").sum(-1)
        return F.cross_entropy(student[:, :-1].transpose(1, 2), labels) + mean_of_kl(apart, batch["mask"])

    def make():
        models = nn.ModuleDict({"student": CausalModel(), "teacher": CausalModel()})
        models["teacher"].requires_grad_(False)
        ids, mask = padded_text((9, 6, 5, 7), seed=7)
        return trained(models, {"ids": ids, "mask": mask}, loss_of, frozen=("teacher.",))

    return make


pair(
    "student_follows_the_teacher_at_padded_positions",
    "padding_invariance",
    "padded_targets",
    where="apart = F.kl_div(",
    change="return values.mean()",
    faulty=distilled(over_all),
    fixed=distilled(masked_mean),
)


class Speaker(nn.Module):
    """Frames and a stop score by frame, from the frames before."""

    def __init__(self):
        super().__init__()
        self.body, self.frame, self.stop = nn.Linear(5, 16), nn.Linear(16, 5), nn.Linear(16, 1)

    def forward(self, frames):
        x = self.body(F.pad(frames[:, :-1], (0, 0, 1, 0))).tanh()
        return self.frame(x), self.stop(x).squeeze(-1)


def speech(stops_of_real):
    def loss_of(model, batch):
        frames, stop = model(batch["mel"])
        kept = torch.arange(frames.shape[1])[None] < batch["mel_lengths"][:, None]
        loss = F.mse_loss(frames[kept], batch["mel"][kept])
        if stops_of_real:
            return loss + F.binary_cross_entropy_with_logits(stop[kept], batch["stop"][kept])
        return loss + F.binary_cross_entropy_with_logits(stop, batch["stop"])

    def make():
        lengths = torch.tensor([14, 9, 11, 7])
        place = torch.arange(14)[None]
        mel = torch.randn(4, 14, 5) * (place < lengths[:, None]).unsqueeze(-1)
        stop = (place >= lengths[:, None] - 1).to(mel.dtype)
        return trained(Speaker(), {"mel": mel, "mel_lengths": lengths, "stop": stop}, loss_of)

    return make


pair(
    "stop_scores_of_padded_frames_count",
    "padding_invariance",
    "padded_targets",
    where="F.binary_cross_entropy_with_logits(stop, ",
    faulty=speech(stops_of_real=False),
    fixed=speech(stops_of_real=True),
)
