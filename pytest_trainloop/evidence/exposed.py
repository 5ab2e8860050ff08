"""Which results that the loss does not use are still given out by a component to its user.

A library's encoder returns a pooled output beside the hidden states, and the project takes only the latter: nothing
is wrong. A result that its own module's
parent drops, or that the outermost module returns and the loop leaves out of the loss, is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_trainloop import batch as nests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.evidence import Evidence
    from pytest_trainloop.observe.watch import Watch


class _Exposure:
    """For each parameter: how many of the modules around it returned something that was computed with it, and how
    many there were."""

    def __init__(self, watch: Watch, wanted: set[int]) -> None:
        self._watch = watch
        self._wanted = wanted
        self._depth = 0
        self.inside: set[str] = set()
        self.outermost: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        holds = {self._watch.book.index(p) for p in module.parameters()} & self._wanted
        direct = {self._watch.book.index(p) for p in module.parameters(recurse=False)}
        if not holds or holds <= direct or self._watch.backward is not None:
            return
        with self._watch.quietly():
            given_out = {self._watch.book.entries[i].name for i in holds & self._optional(output) if i is not None}
        if self._depth:
            self.inside |= given_out
        else:
            self.outermost |= given_out

    def _optional(self, output: Any) -> set[int | None]:
        """The parameters behind some of several results, but not behind all of them."""
        behind: list[set[int | None]] = [self._leaves(t) for t in nests.tensors(output) if t.grad_fn is not None]
        return behind[0].union(*behind) - behind[0].intersection(*behind) if len(behind) > 1 else set()

    def _leaves(self, output: Any) -> set[int | None]:
        """The parameters that an output was computed with, read off its graph."""
        todo = [t.grad_fn for t in nests.tensors(output) if t.grad_fn is not None]
        seen, leaves = set(todo), set()
        while todo:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                leaves.add(self._watch.book.index(variable))
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return leaves


def exposed(evidence: Evidence, names: Sequence[str]) -> set[str]:
    """Those of the parameters whose result some inner component returned and its user, a module further out, left
    unused."""
    made: list[_Exposure] = []

    def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
        wanted = {e.index for e in watch.book.entries if e.name in set(names)}
        made.append(_Exposure(watch, wanted))
        yield made[0].watching()

    evidence.short_run(lambda watch: None, names, contexts)
    return made[0].inside - made[0].outermost
