"""A run without weight decay: what moved by nothing else rests in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

    from pytest_trainloop.recording.watch import Watch


def without_decay(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    return (_switched_off(),)


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    def enter(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("weight_decay"):
                group["weight_decay"] = 0.0

    with hooked(register_optimizer_step_pre_hook(enter)):
        yield
