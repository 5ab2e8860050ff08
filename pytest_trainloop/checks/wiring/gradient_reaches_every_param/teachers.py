"""Whether a whole module that runs without gradients gives nothing but targets: the teacher of a distillation."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from pytest_trainloop.gradients.dependence import until_stepped
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, SUBTRACTIONS
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pytest_trainloop.runs.evidence import Evidence

MOST_KEPT = 256
"""Results that are followed."""

_COMPARISONS = DISTANCE_LOSSES | SUBTRACTIONS | {"kl_div", "cross_entropy", "cosine_similarity"}
"""What takes the side that is to be learned first, and its target second."""


class _Meetings(WatchingMode):
    """Where what these parameters gave without a history meets what has one: as a target, or otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._results: list[torch.Tensor] = []
        self.as_target: list[bool] = []

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        given = list(tensors_in(args, kwargs))
        mine = [t for t in given if any(t is r for r in self._results)]
        if mine and any(t.requires_grad for t in tensors_in(out)):
            second = args[1] if len(args) > 1 else kwargs.get("target", kwargs.get("other"))
            self.as_target.append(name_of(func) in _COMPARISONS and all(t is second for t in mine))
        elif mine or any(self._is_of_them(t) for t in given):
            results = [t for t in tensors_in(out) if not t.requires_grad]
            self._results = [*self._results, *results][-MOST_KEPT:]
        return out

    def _is_of_them(self, tensor: torch.Tensor) -> bool:
        index = self.watch.table.index(tensor)
        return index is not None and self.watch.table.entries[index].name in self._names


class Teachers:
    """The search for teachers. Finds none where the loop cannot be run again."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def holding(self, names: Sequence[str]) -> str:
        """The path of the widest module that holds these parameters and none that a gradient reaches, if all that it
        gives is a target of what trains; "" otherwise. It may hold idle parameters: a bias before a batch norm, a
        pooler that is not used."""
        evidence = self._evidence
        record = evidence.run()
        reached = [p.name for p in record.parameters if record.reached(p.index)]
        path = _common([name.split(".")[:-1] for name in names])
        prefix = ""
        while path and not any(name.startswith(f"{path}.") for name in reached):
            prefix, path = path, path.rpartition(".")[0]
        if not prefix or not evidence.repeatable:
            return ""
        met = _Meetings(names)
        evidence.rerun(enough=until_stepped(evidence, names), contexts=met.contexts)
        return prefix if met.as_target and all(met.as_target) else ""


def _common(paths: Sequence[Sequence[str]]) -> str:
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in same)
