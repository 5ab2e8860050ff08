"""Gradients that are not those of the value."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.losses.pairs import pair

CHECK = "loss_gradient"


def listed(output, target):
    return torch.tensor([float((o - t) ** 2) for o, t in zip(output, target, strict=True)], requires_grad=True).mean()


def stacked(output, target):
    return torch.stack([(o - t) ** 2 for o, t in zip(output, target, strict=True)]).mean()


pair(CHECK, "graph_cut", listed, stacked, expects="values", target="value")


def through_data(logits, target):
    return F.cross_entropy(logits.data, target)


pair(CHECK, "graph_cut", through_data, F.cross_entropy, expects="logits", num_classes=3)


def squares(backward):
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output, target):
            ctx.save_for_backward(output, target)
            return ((output - target) ** 2).mean()

        @staticmethod
        def backward(ctx, grad_output):
            return backward(grad_output, *ctx.saved_tensors), None

    def loss(output, target):
        if output.shape != target.shape:
            raise ValueError("shapes differ")
        return Squares.apply(output, target)

    loss.__name__ = backward.__name__
    return loss


def right(g, output, target):
    return g * 2 * (output - target) / output.numel()


def sign_lost(g, output, target):
    return g * 2 * (output - target).abs() / output.numel()


def grad_output_left_out(g, output, target):
    return 2 * (output - target) / output.numel()


def two_forgotten(g, output, target):
    return g * (output - target) / output.numel()


VALUES = {"expects": "values", "target": "value"}
pair(CHECK, "wrong_backward", squares(sign_lost), squares(right), **VALUES)
pair(CHECK, "grad_output_ignored", squares(grad_output_left_out), squares(right), **VALUES)
pair(CHECK, "scaled_backward", squares(two_forgotten), squares(right), level="advice", **VALUES)


def penalty_detached(output, target):
    return F.mse_loss(output, target) + 0.1 * output.detach().abs().mean()


def penalty_kept(output, target):
    return F.mse_loss(output, target) + 0.1 * output.abs().mean()


pair(CHECK, "part_detached", penalty_detached, penalty_kept, level="advice", **VALUES)


def error_rate(logits, target):
    return (logits.argmax(1) != target).to(logits.dtype).mean()


pair(CHECK, "graph_cut", error_rate, F.cross_entropy, expects="logits", num_classes=4)
