"""The causes of ``padding_invariance``: the observation that proves each, and what to write."""

from __future__ import annotations

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.registry import Cause

_SETTLE = "padding=Padding(...) makes it a fault"

CAUSES = {
    "padded_keys_attended": Cause(
        proof="with padded keys left out of attention both gradients are equal",
        repair="give attention the mask: key_padding_mask (true at padding), attn_mask, or attention_mask of Hugging "
        "Face models",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "padding_pooled": Cause(
        proof="with pooling, and reading at the ends, over real positions only both gradients are equal",
        repair="pool by the mask: (x * mask).sum(1) / mask.sum(1); pack sequences, or read each row at its own last "
        "position",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "positions_shifted": Cause(
        proof="with positions counted from the first real one both gradients are equal",
        repair="position_ids = (mask.cumsum(1) - 1).clamp(min=0), or pad on the right",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "mean_over_padding": Cause(
        proof="the gradient is exactly the share of real positions times that without padding, or with a mean of the "
        "loss over real positions only both gradients are equal",
        repair="divide by the number of real positions: (loss * mask).sum() / mask.sum()",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "padded_targets": Cause(
        proof="without the gradient of outputs at padded positions, only that of the real positions is left",
        repair="take padded positions out before the mean: ignore_index, or (loss * mask).sum() / mask.sum()",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "other_pad_id": Cause(
        proof="with the id that the model takes for padding in place of the one that fills the rows both gradients are "
        "equal",
        repair="fill rows with the id that the model takes for padding: pad_sequence(..., padding_value=pad_id)",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "mask_of_another": Cause(
        proof="padded positions count exactly where the mask of another sequence says that they are real",
        repair="read each sequence under its own mask",
        explains=LEARNING,
        change=("seen",),
        settle=_SETTLE,
    ),
    "padding_counts": Cause(
        proof="the gradient changes with padding, and no single path explains it",
        repair="mask padded positions before positions are mixed",
        change=("seen",),
        settle=_SETTLE,
    ),
}
