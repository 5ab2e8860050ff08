"""Which results that the loss does not use are there for a good reason.

A library's encoder returns a pooled output next to the hidden states, and the project takes only the latter; a
component returns attention weights that its caller drops; a model returns a head's output for a task that is not in
this batch; an energy's last bias is in the graph that ``autograd.grad`` differentiates. Or a network is called for
the features of a hidden layer, which a hook or an attribute keeps, and its own output is dropped. A result that its
module's parent drops, or a network of which nothing is used, has no such reason.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import members, nested
from pytest_trainloop.gradients.dependence import until_stepped
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.runs.hooks import unless_suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class _Exposure:
    """Gathers the names of parameters whose result is given out.

    A module returns it as one of several results, of which a batch need not use all. Or a module returns it of which
    other parameters train: these are ``taught``. Or autograd itself gets it (``autograd.grad`` of an energy; a function
    of the project's own that takes a parameter and has no gradient for it).
    """

    def __init__(self, watch: Watch, wanted: set[int], taught: set[int]) -> None:
        self._watch = watch
        self._wanted = wanted
        self._taught = taught
        self._given_out: set[int | None] = set()
        self._shapes: dict[int, set[tuple[int, ...]]] = {}

    @property
    def names(self) -> set[str]:
        return {self._watch.table.entries[i].name for i in self._given_out if i is not None}

    @property
    def shapes(self) -> dict[str, set[tuple[int, ...]]]:
        """The shapes of the results that each parameter was computed into, and others beside it were not."""
        return {self._watch.table.entries[i].name: shapes for i, shapes in self._shapes.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handle = after_modules(unless_suspended(self._watch, self._leave))
        patches = Patches()
        for name in ("grad", "backward"):
            patches.put(torch.autograd, name, self._patched)
        try:
            yield
        finally:
            patches.remove()
            handle.remove()

    def _patched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def differentiate(*args: Any, **kwargs: Any) -> Any:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            with self._watch.suspended():
                self._given_out |= self._wanted & self._leaves(roots)
            return original(*args, **kwargs)

        return differentiate

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        inside = {self._watch.table.index(p) for p in members.parameters(module)}
        holds = inside & self._wanted
        direct = {self._watch.table.index(p) for p in members.parameters(module, recurse=False)}
        if not holds or holds <= direct or self._watch.backward is not None:
            return
        with self._watch.suspended():
            optional = holds & self._optional(output)
            if inside & self._taught:
                optional |= holds & self._leaves(output)
        self._given_out |= optional

    def _optional(self, output: Any) -> set[int | None]:
        """The parameters behind some of several results, but not behind all of them."""
        results = [t for t in nested.tensors(output) if t.grad_fn is not None]
        behind: list[set[int | None]] = [self._leaves(t) for t in results]
        optional = behind[0].union(*behind) - behind[0].intersection(*behind) if len(behind) > 1 else set()
        for result, leaves in zip(results, behind, strict=True):
            for index in self._wanted & leaves & optional:
                self._shapes.setdefault(index, set()).add(tuple(result.shape))
        return optional

    def _leaves(self, output: Any) -> set[int | None]:
        """The parameters that an output was computed with, read off its graph."""
        todo = [t.grad_fn for t in nested.tensors(output) if t.grad_fn is not None]
        seen, leaves = set(todo), set()
        while todo:
            node = todo.pop()
            variable = getattr(node, "variable", None)
            if isinstance(variable, torch.Tensor):
                leaves.add(self._watch.table.index(variable))
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return leaves


class ExposedResults:
    """Which unused results of parameters are given out with good reason. None where the loop cannot be run again."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.shapes: dict[str, set[tuple[int, ...]]] = {}
        """The shapes of results given out, by the parameters of ``among`` that they were computed with."""

    def among(self, names: Sequence[str]) -> set[str]:
        """Those of the named parameters whose unused result is given out with good reason."""
        evidence = self._evidence
        if not evidence.repeatable:
            return set()
        made: list[_Exposure] = []
        record = evidence.run()
        taught = {p.name for p in record.parameters if record.reached(p.index)}

        def contexts(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
            wanted, trained = (
                {e.index for e in watch.table.entries if e.name in chosen} for chosen in (set(names), taught)
            )
            made.append(_Exposure(watch, wanted, trained))
            yield made[0].watching()

        evidence.rerun(enough=until_stepped(evidence, names), contexts=contexts)
        self.shapes |= made[0].shapes
        return made[0].names
