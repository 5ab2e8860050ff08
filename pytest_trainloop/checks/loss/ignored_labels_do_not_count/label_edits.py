"""Other labels at the places of a batch that are to be ignored, wherever something is computed from the labels.

A label of -100, or of a declared ``ignore_index``, marks a place that must not count. Comparisons are given the labels
as they are: they find these places. Whatever else is computed from the labels there is given the label of another
class. A loss that leaves the places out is the same, to the last bit: its gradient does not change.
"""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import (
    CASTS,
    CLAMPS,
    CLASS_LOSSES,
    CONSTANT_ATTRIBUTES,
    EMBEDDINGS,
    EQUALITIES,
    EXTREMES,
    FINITENESS_TESTS,
    JOINS,
    ORDER_COMPARISONS,
    SHAPE_ONLY,
    SIZES,
    TO_PYTHON,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MOVES = VIEWS | {"__getitem__", "flip", "roll", "repeat", "index_select", "masked_select", "repeat_interleave"}
_CASTS = CASTS | {"int", "long", "short", "bool"}
_FILLS = CLAMPS | {"masked_fill", "nan_to_num", "relu"}
_FOLLOWED = _MOVES | _CASTS | _FILLS | JOINS | {"where", "pad"}
"""What these make of labels still has a place for each of them."""

_KEPT = (
    EQUALITIES
    | ORDER_COMPARISONS
    | FINITENESS_TESTS
    | CONSTANT_ATTRIBUTES
    | SHAPE_ONLY
    | SIZES
    | TO_PYTHON
    | EXTREMES
    | EMBEDDINGS
    | {"isin", "unique", "bincount", "nonzero", "count_nonzero", "__len__", "__repr__", "__iter__"}
)
"""These are given the labels as they are: they ask which ones are to be ignored, or of which shape they are, or they
embed them as inputs of a decoder."""


class LabelEdits(WatchingMode):
    """Gives another label at the places of a batch whose label is to be ignored: ``ignored`` has that label by the name
    of each tensor of the batch. ``lines`` are the only lines where it does so; None: all. With ``others`` it does so at
    all other places instead."""

    def __init__(
        self, ignored: Mapping[str, float], lines: frozenset[str] | None = None, *, others: bool = False
    ) -> None:
        super().__init__()
        self._ignored, self._lines, self._others = ignored, lines, others
        self._places: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._labels: set[float] = set()
        self._chosen: torch.Tensor | None = None
        """What the labels choose, where they choose entries: those of a class that is dropped are all equal."""
        self.edited: collections.Counter[str] = collections.Counter()
        """The lines where other labels were given, with the number of these, in the order of the calls."""
        self.placeholders: set[str] = set()
        """Those of them where the project had put another label in the place of the one to be ignored."""
        self.compared: set[str] = set()
        """The lines that compare the labels with anything, but for those that put other labels in their place."""
        self.asked = False
        """Whether the labels were compared with the one to be ignored, or a loss has it as ``ignore_index``."""

    def take(self, _number: int, item: Any) -> None:
        """Mark the labels of a batch: for ``RunPlan.before_item``."""
        self._places.clear()
        self._labels.clear()
        for path, tensor in nested.paths(item):
            label = self._ignored.get(nested.shown(path))
            if label is not None:
                self._note(tensor, (tensor == label) != self._others)
                self._labels.update(torch.unique(tensor).tolist())

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not any(self._known(t) is not None for t in tensors_in(args, kwargs)):
            return passed_on(func, args, kwargs)
        if name in _KEPT:
            self.compared |= {str(here()[0])} if name in EQUALITIES | ORDER_COMPARISONS else set()
            self.asked = self.asked or (name in EQUALITIES and not {*self._ignored.values()}.isdisjoint(_numbers(args)))
            return passed_on(func, args, kwargs)
        if name in _FOLLOWED and not self._indexes(name, args):
            self.compared -= {str(here()[0])} if name in _FILLS | {"where"} else set()
            out = passed_on(func, args, kwargs)
            with self.watch.suspended():
                self._follow(name, func, args, kwargs, out)
            return out
        if name.endswith("_") or name == "__setitem__":  # written to in place: what stood there may be replaced
            written = args[0] if args else None
            if isinstance(written, torch.Tensor) and self._known(written) is not None:
                return passed_on(func, args, kwargs)
        with self.watch.suspended():
            spared = float(kwargs.get("ignore_index", -100)) if name in CLASS_LOSSES else None
            self.asked = self.asked or spared in self._ignored.values()
            self._chosen = passed_on(func, args, kwargs).detach() if name in ("gather", "take_along_dim") else None
            args, kwargs = self._edited(args, spared), {k: self._edited(v, spared) for k, v in kwargs.items()}
        return passed_on(func, args, kwargs)

    def _indexes(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether the labels choose entries of another tensor, and are not what is moved."""
        moved = args[:1] if name not in JOINS else ()
        return bool(moved) and isinstance(moved[0], torch.Tensor) and self._known(moved[0]) is None and name != "where"

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The places of a tensor whose label is to be ignored."""
        known = self._places.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _note(self, tensor: torch.Tensor, places: torch.Tensor) -> None:
        if places.shape == tensor.shape and bool(places.any()):
            self._places[id(tensor)] = weakref.ref(tensor), places

    def _follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        """Note the places in what a call made of the labels."""
        if name in _CASTS or name in _FILLS or name == "where":
            known = [p for t in tensors_in(args) if (p := self._known(t)) is not None and p.shape == out.shape]
            places, made = known[:1], [out]
        else:
            try:
                given = func(*self._as_places(args), **({} if name == "pad" else kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError):
                return
            places, made = ([*given], [*out]) if isinstance(out, (list, tuple)) else ([given], [out])
        for tensor, marks in zip(made, places, strict=False):
            if isinstance(tensor, torch.Tensor) and isinstance(marks, torch.Tensor) and not tensor.requires_grad:
                marks = marks.bool()
                value = kwargs.get("value", args[3] if len(args) > 3 else 0) if name == "pad" else None
                if value is not None and value in self._ignored.values():
                    marks = marks | (tensor == value)
                self._note(tensor, marks)

    def _as_places(self, given: Any) -> Any:
        """Arguments with the places of labels for the labels, and none for all else that is joined to them."""
        if isinstance(given, torch.Tensor):
            known = self._known(given)
            boolean = given.dtype == torch.bool or given.dtype == torch.long
            return known if known is not None else given if boolean else torch.zeros_like(given, dtype=torch.bool)
        if isinstance(given, (list, tuple)):
            joined = any(isinstance(one, torch.Tensor) and self._known(one) is not None for one in given)
            made = [
                torch.zeros_like(one, dtype=torch.bool)
                if joined and isinstance(one, torch.Tensor) and self._known(one) is None and one.dtype != torch.bool
                else self._as_places(one)
                for one in given
            ]
            return type(given)(made) if type(given) in (list, tuple) else made
        return given

    def _edited(self, given: Any, spared: float | None) -> Any:
        """Arguments with another label at the places; not where it is ``spared``, which the call leaves out itself."""
        if isinstance(given, torch.Tensor):
            return self._with_another_label(given, spared)
        if isinstance(given, (list, tuple)) and type(given) in (list, tuple):
            return type(given)([self._edited(one, spared) for one in given])
        return given

    def _with_another_label(self, tensor: torch.Tensor, spared: float | None) -> torch.Tensor:
        places = self._known(tensor)
        if places is None or tensor.requires_grad:
            return tensor
        places = places if spared is None else places & (tensor != spared)
        # one that the batch does not have is to be ignored in its turn (odd: a_class_for_the_ignored_that_is_dropped)
        known = torch.isin(tensor, torch.tensor(sorted(self._labels), dtype=tensor.dtype, device=tensor.device))
        if (chosen := self._chosen) is not None and chosen.shape == tensor.shape:
            others = places & ~known
            known = known | (others if len(torch.unique(chosen[others])) > 1 else torch.zeros_like(known))
        places = places & known
        line = str(here()[0])
        if not bool(places.any()) or (self._lines is not None and line not in self._lines):
            return tensor
        labels = [v for v in torch.unique(tensor)[:64].tolist() if v >= 0 and v not in self._ignored.values()]
        if len(labels) < 2:
            return tensor
        self.edited[line] += int(places.sum())
        if not any(v in self._ignored.values() for v in torch.unique(tensor[places])[:64].tolist()):
            self.placeholders.add(line)
        first, second = (torch.full_like(tensor, v) for v in (labels[0], labels[-1]))
        return torch.where(places, torch.where(tensor == second, first, second), tensor)


def _numbers(args: tuple[Any, ...]) -> list[float]:
    return [a for a in args if isinstance(a, (int, float))]
