"""What forward passes do to frozen modules: buffers that they write, and whether trained parts feed them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members, nested
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.parameters import RUNNING
from pytest_trainloop.recording.record import within
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class FrozenModules:
    """Watches modules below some paths in a run of its own."""

    def __init__(self, evidence: Evidence, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self.written: dict[str, str] = {}
        """Floating buffers that a module changes in its own forward pass, with the line of that call."""
        self.fed: set[str] = set()
        """Modules whose input has a history, so that trained parts lie before them."""
        evidence.rerun(contexts=lambda watch: (self._hooked(watch),))

    @contextlib.contextmanager
    def _hooked(self, watch: Watch) -> Iterator[None]:
        before: dict[int, dict[str, torch.Tensor]] = {}

        def enter(module: nn.Module, args: Any) -> None:
            with watch.suspended():
                if not within(watch.table.path_of(module), self._paths):
                    return
                before[id(module)] = {name: b.detach().clone() for name, b in _buffers(module)}
                if torch.is_grad_enabled() and any(t.requires_grad for t in nested.tensors(args)):
                    self.fed.add(watch.table.path_of(module))

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            old = before.pop(id(module), None)
            if not old:
                return
            with watch.suspended():
                path = watch.table.path_of(module)
                for name, buffer in _buffers(module):
                    if name in old and not torch.equal(old[name], buffer):
                        self.written.setdefault(f"{path}.{name}" if path else name, str(here()[0]))

        with hooked(
            before_modules(unless_suspended(watch, enter)),
            after_modules(unless_suspended(watch, leave), always_call=True),
        ):
            yield


def _buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Floating buffers of its own, but for the running statistics of norms."""
    found = members.named_buffers(module, recurse=False)
    return [(name, b) for name, b in found if b.is_floating_point() and name not in RUNNING and readable(b)]
