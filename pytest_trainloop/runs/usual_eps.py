"""A run with the usual eps: what Adam and its kin divide by is then the gradient's own size."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

    from pytest_trainloop.recording.watch import Watch

USUAL = 1e-8
"""The default of torch's Adam (Kingma & Ba, section 2)."""

LARGE = 1e-3
"""The largest in common use apart from 1.0, with which Inception was trained."""


def with_usual_eps(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    return (_lowered(),)


@contextlib.contextmanager
def _lowered() -> Iterator[None]:
    def enter(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and eps > LARGE:
                group["eps"] = USUAL

    with hooked(register_optimizer_step_pre_hook(enter)):
        yield
