"""Rates that are written to the groups which ``Optimizer.state_dict()`` gives: these are copies."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from pytest_trainloop.recording.events import CopiedLRs
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.protocol import Observed

MOST_COPIES = 8
"""Copies that are looked at, at most, between two steps."""


@dataclass(slots=True)
class _Copy:
    optimizer: Any
    groups: list[dict[str, Any]]
    """Without the state, which holds tensors."""
    lrs: tuple[float, ...]
    at: int
    place: Place
    site: Site


class StateDicts:
    """Patches of ``state_dict`` and ``load_state_dict``; copies are kept until the next step only."""

    def __init__(self, watch: Observed, patches: Patches) -> None:
        self._watch = watch
        self._copies: list[_Copy] = []
        patches.put(Optimizer, "state_dict", self._giving)
        patches.put(Optimizer, "load_state_dict", self._loading)
        self._handle = before_steps(lambda optimizer, args, kwargs: self.look())

    def remove(self) -> None:
        self._handle.remove()
        self._copies.clear()

    def look(self) -> None:
        """Note the copies whose rates were written since."""
        watch = self._watch
        for copy in self._copies:
            written = _lrs(copy.groups)
            own = _lrs(copy.optimizer.param_groups)
            if len(written) == len(copy.lrs) and written not in (copy.lrs, own):
                watch.record.copied_lrs.append(
                    CopiedLRs(
                        at=copy.at,
                        place=copy.place,
                        site=copy.site,
                        optimizer=watch.optimizers.index(copy.optimizer),
                        before=copy.lrs,
                        written=written,
                    )
                )
        self._copies.clear()

    def _giving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(optimizer, *args, **kwargs)
            watch = self._watch
            groups = out.get("param_groups") if isinstance(out, dict) else None
            if not watch.is_suspended and isinstance(groups, list) and len(self._copies) < MOST_COPIES:
                with watch.suspended():
                    lrs = _lrs(groups)
                    if len(lrs) == len(optimizer.param_groups):
                        self._copies.append(_Copy(optimizer, list(groups), lrs, watch.tick(), *here()))
            return out

        return state_dict

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._copies.clear()  # whatever was written may be what is loaded, here or as a copy
            return original(optimizer, *args, **kwargs)

        return load_state_dict


def _lrs(groups: Any) -> tuple[float, ...]:
    """The rates that are plain numbers."""
    lrs = [group.get("lr") for group in groups if isinstance(group, dict)]
    return tuple(float(lr) for lr in lrs if isinstance(lr, (int, float)))
