"""The losses of ``torch.nn.functional``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.losses.table.entry import Chance

_PAGE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.{}.html"
_SIGNS = (-1.0, 1.0)


def _loss(
    name: str,
    arguments: Mapping[str, str],
    chance: Chance = "",
    *,
    degree: int = 1,
    labels: tuple[float, float] = (0.0, 1.0),
    ignore_index: str | None = None,
) -> Entry:
    contract = CallContract(arguments=arguments, labels=labels, ignore_index=ignore_index)
    names = (f"torch.nn.functional.{name}",)
    return Entry(names=names, contracts=(contract,), page=_PAGE.format(name), chance=chance, degree=degree)


ENTRIES = (
    _loss("cross_entropy", {"input": "logits", "target": "index"}, "zeros", ignore_index="ignore_index"),
    _loss("nll_loss", {"input": "log_probabilities", "target": "index"}, "log_uniform", ignore_index="ignore_index"),
    _loss("binary_cross_entropy", {"input": "probabilities", "target": "binary"}, "halves"),
    _loss("binary_cross_entropy_with_logits", {"input": "logits", "target": "binary"}, "zeros"),
    _loss("multilabel_soft_margin_loss", {"input": "logits", "target": "binary"}, "zeros"),
    _loss("multi_margin_loss", {"input": "logits", "target": "index"}, "zeros"),
    _loss("multilabel_margin_loss", {"input": "logits", "target": "index"}),
    _loss("soft_margin_loss", {"input": "logits", "target": "binary"}, "zeros", labels=_SIGNS),
    _loss("hinge_embedding_loss", {"input": "values", "target": "binary"}, labels=_SIGNS),
    _loss("cosine_embedding_loss", {"input1": "embeddings", "input2": "embeddings", "target": "binary"}, labels=_SIGNS),
    _loss("margin_ranking_loss", {"input1": "values", "input2": "values", "target": "binary"}, labels=_SIGNS),
    _loss("kl_div", {"input": "log_probabilities", "target": "distribution"}),
    _loss("mse_loss", {"input": "values", "target": "value"}, "constants", degree=2),
    _loss("l1_loss", {"input": "values", "target": "value"}, "constants"),
    _loss("smooth_l1_loss", {"input": "values", "target": "value"}, "constants"),
    _loss("huber_loss", {"input": "values", "target": "value"}, "constants"),
    _loss("gaussian_nll_loss", {"input": "values", "var": "variance", "target": "value"}),
    _loss("poisson_nll_loss", {"input": "values", "target": "value"}),
    _loss("ctc_loss", {"log_probs": "log_probabilities", "targets": "labels"}, "log_uniform_last"),
    _loss("triplet_margin_loss", {"anchor": "embeddings", "positive": "embeddings", "negative": "embeddings"}),
    _loss(
        "triplet_margin_with_distance_loss",
        {"anchor": "embeddings", "positive": "embeddings", "negative": "embeddings"},
    ),
)
