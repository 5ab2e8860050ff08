"""Runs without dropout, without a mode: the functions of ``torch.nn.functional`` are replaced by Python functions that
a compiler reads like those of the project."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from pytest_trainloop import members
from pytest_trainloop.recording.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import TrainLoop

FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextlib.contextmanager
def dropout_off(loop: TrainLoop) -> Iterator[None]:
    """Dropout returns its input, in the functions, in attention, and in recurrent modules."""
    recurrent = [m for top in loop.modules.values() for m in members.modules(top) if isinstance(m, nn.RNNBase)]
    kept = [module.dropout for module in recurrent]
    with Patches() as patches:
        for name in FUNCTIONS:
            patches.put(functional, name, _gives_its_input)
        patches.put(torch, "dropout", _gives_its_input)
        patches.put(functional, "scaled_dot_product_attention", _without_dropout)
        for module in recurrent:
            module.dropout = 0.0
        try:
            yield
        finally:
            for module, dropout in zip(recurrent, kept, strict=True):
                module.dropout = dropout


def _gives_its_input(_original: Callable[..., Any]) -> Callable[..., Any]:
    def given(input: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return input

    return given


def _without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("dropout_p", None)
        return original(query, key, value, attn_mask, 0.0, *args[1:], **kwargs)

    return attention
