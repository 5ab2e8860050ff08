"""Splits of one data set that are each given a transform of their own: the data set keeps the last."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Subset

from pytest_trainloop.checks.state.data_order.causes import found
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.events import Place


@dataclass
class Assigned:
    """What is assigned to attributes of data sets through something that holds them, in the order of time."""

    values: dict[tuple[int, str], list[tuple[Any, Place]]] = field(default_factory=dict)
    """By the ``id`` of the data set and the attribute; forgotten where an item is fetched in between."""
    splits: dict[int, int] = field(default_factory=dict)
    """The number of subsets of each data set."""
    _held: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        with Patches() as patches:
            patches.put(Dataset, "__setattr__", self._assigning)
            patches.put(Subset, "__init__", self._splitting)
            for name in ("__getitem__", "__getitems__"):
                patches.put(Subset, name, self._fetching)
            yield

    def _assigning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign(dataset: Any, name: str, value: Any) -> None:
            original(dataset, name, value)
            place = here()[0]
            if f".dataset.{name} =" in place.code or f".dataset.{name}=" in place.code:
                self._held.append(dataset)
                self.values.setdefault((id(dataset), name), []).append((value, place))

        return assign

    def _splitting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(subset: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            original(subset, dataset, *args, **kwargs)
            self.splits[id(dataset)] = self.splits.get(id(dataset), 0) + 1

        return init

    def _fetching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(subset: Any, *args: Any) -> Any:
            self.values = {key: assigned for key, assigned in self.values.items() if key[0] != id(subset.dataset)}
            return original(subset, *args)

        return fetch

    def overwritten(self, loader: Any) -> Iterator[Finding]:
        """An attribute that was assigned again through another split before any item was fetched with it."""
        split = getattr(loader, "dataset", None)
        for (number, name), assigned in self.values.items():
            if not isinstance(split, Subset) or id(split.dataset) != number or self.splits.get(number, 0) < 2:
                continue
            (first, at), (last, change) = assigned[0], assigned[-1]
            # one split may get its second choice (odd: one_split_with_two_choices)
            other_split = at == change or at.code.partition(".dataset.")[0] != change.code.partition(".dataset.")[0]
            if first is not last and other_split:
                facts: dict[str, Any] = {"name": name, "splits": self.splits[number], "change": str(change)}
                yield found("split_overwrites", change, (f"dataset.{name}",), first=f"{at.file}:{at.line}", **facts)
