"""Every loss module of torch, used as its documentation says, breaks no contract; in float32, bfloat16 and float16."""

import pytest
import torch
from torch import nn

from pytest_trainloop.checks.loss.loss_contract.calls import LossCalls
from pytest_trainloop.runs.evidence import Evidence
from tests.loops.plain import loop

ROWS, CLASSES, FRAMES = 12, 5, 9


def labels():
    return torch.arange(ROWS) % CLASSES


def signs():
    return (torch.arange(ROWS) % 2 * 2 - 1).float()


def hot(out):
    return nn.functional.one_hot(labels(), CLASSES).to(out.dtype)


def shares(out):
    return (hot(out) * 3).softmax(1)


def distances(out):
    return (out[:, :2] - out[:, 2:4]).square().sum(1)


def listed():
    lists = torch.full((ROWS, CLASSES), -1)
    lists[:, 0] = labels()
    return lists


USES = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda out: (out, labels())),
    "CrossEntropyLoss of probabilities": (
        nn.CrossEntropyLoss(),
        lambda out: (out, shares(out)),
    ),
    "NLLLoss": (nn.NLLLoss(), lambda out: (out.log_softmax(1), labels())),
    "BCELoss": (nn.BCELoss(), lambda out: (out.sigmoid(), hot(out))),
    "BCEWithLogitsLoss": (
        nn.BCEWithLogitsLoss(),
        lambda out: (out, hot(out)),
    ),
    "KLDivLoss": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda out: (out.log_softmax(1), shares(out)),
    ),
    "KLDivLoss of logarithms": (
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        lambda out: (out.log_softmax(1), shares(out).log()),
    ),
    "MSELoss": (nn.MSELoss(), lambda out: (out, hot(out))),
    "L1Loss": (nn.L1Loss(), lambda out: (out, hot(out))),
    "SmoothL1Loss": (nn.SmoothL1Loss(), lambda out: (out, hot(out))),
    "HuberLoss": (nn.HuberLoss(), lambda out: (out, hot(out))),
    "GaussianNLLLoss": (
        nn.GaussianNLLLoss(),
        lambda out: (out, hot(out), nn.functional.softplus(out) + 0.1),
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), lambda out: (out, hot(out))),
    "PoissonNLLLoss of rates": (nn.PoissonNLLLoss(log_input=False), lambda out: (out.exp(), hot(out))),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss(), lambda out: (out[:, :2], out[:, 2:4], signs().to(out.dtype))),
    "MarginRankingLoss": (nn.MarginRankingLoss(), lambda out: (out[:, 0], out[:, 1], signs().to(out.dtype))),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), lambda out: (distances(out), signs().to(out.dtype))),
    "SoftMarginLoss": (nn.SoftMarginLoss(), lambda out: (out[:, 0], signs().to(out.dtype))),
    "TripletMarginLoss": (nn.TripletMarginLoss(), lambda out: (out[:4], out[4:8], out[8:])),
    "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss(), lambda out: (out[:4], out[4:8], out[8:])),
    "MultiMarginLoss": (nn.MultiMarginLoss(), lambda out: (out.float(), labels())),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), lambda out: (out.float(), listed())),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), lambda out: (out, hot(out))),
    "CTCLoss": (
        nn.CTCLoss(),
        lambda out: (
            out.float().unsqueeze(0).expand(FRAMES, -1, -1).log_softmax(-1),
            torch.stack([labels() % 4 + 1, (labels() + 1) % 4 + 1], 1),
            torch.full((ROWS,), FRAMES),
            torch.full((ROWS,), 2),
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", USES)
def test_a_loss_of_torch_used_right_breaks_nothing(name, dtype):
    criterion, arguments = USES[name]

    def make():
        model = nn.Linear(6, CLASSES).to(dtype)
        return loop(model, torch.randn(ROWS, 6), lambda model, x: criterion(*arguments(model(x.to(dtype)))))

    if name == "SmoothL1Loss" and dtype is torch.float16:
        try:
            criterion(*arguments(torch.zeros(ROWS, CLASSES, dtype=dtype, requires_grad=True))).backward()
        except RuntimeError as error:
            pytest.skip(f"this torch has no such loss: {error}")  # torch 2.6 on a CPU
    calls = Evidence(make).shared(LossCalls.of)
    assert [finding.cause for finding in calls.findings()] == []
    assert calls.unread == []
    assert any(site.judged for site in calls.sites.values())
