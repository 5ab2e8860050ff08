"""What becomes of the groups that ``Optimizer.state_dict()`` gives, once a rate was written to one: a further run."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer
from torch.serialization import safe_globals

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.ours import StandsIn
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence


class Written:
    """One copy of a group that a rate was written to."""

    def __init__(self, *, alone: bool) -> None:
        self.line = str(here()[0])
        self.alone = alone
        """Whether the dict that holds all groups was gone already: nobody could save or load it."""
        self.used = False
        """Whether anything read the copy after that, or its end found it alive."""


class CopiedGroups:
    """The copies are dicts that note who reads them, while ``fit`` runs. Copies of these are plain."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.seen = False
        """Whether the run could be made."""

    @classmethod
    def of(cls, evidence: Evidence) -> CopiedGroups:
        found = cls()
        if evidence.repeatable:
            with contextlib.suppress(CannotDecide, UsageError, UserCodeError):
                evidence.rerun(contexts=found._contexts)
                found.seen = True
        return found

    def _contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._noting(),)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        given: list[weakref.ref[_Copied]] = []

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                out = original(optimizer, *args, **kwargs)
                if type(out) is not dict or not isinstance(out.get("param_groups"), list):
                    return out
                held = _Held(out)
                groups = [_Copied(group) if type(group) is dict else group for group in out["param_groups"]]
                held["param_groups"] = groups
                for group in groups:
                    if isinstance(group, _Copied):
                        group.notes, group.holder, group.last = self.written, weakref.ref(held), None
                        given.append(weakref.ref(group))
                return held

            return state_dict

        with patched(Optimizer, "state_dict", around), safe_globals([dict]):  # their pickles call it
            yield
        for reference in given:
            alive = reference()
            if alive is not None and alive.last is not None:
                alive.last.used = True


class _Held(dict[str, Any], StandsIn):
    """What ``state_dict()`` gives, which can be referred to weakly; a pickle of it is plain."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self),)


class _Copied(dict[str, Any], StandsIn):
    """A group of a state dict that notes what is written to it, and whether it is read after that."""

    notes: list[Written]
    holder: weakref.ref[_Held]
    last: Written | None

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(key)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key in dict(*args, **kwargs):
            self._write(key)
        super().update(*args, **kwargs)

    def _write(self, key: str) -> None:
        if key == "lr":
            self.last = Written(alone=self.holder() is None)
            self.notes.append(self.last)

    def _read(self) -> None:
        if getattr(self, "last", None) is not None:
            self.last.used = True  # type: ignore[union-attr]

    def __getitem__(self, key: str) -> Any:
        self._read()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read()
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read()
        return super().__iter__()

    def keys(self) -> Any:
        self._read()
        return super().keys()

    def values(self) -> Any:
        self._read()
        return super().values()

    def items(self) -> Any:
        self._read()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        import copy

        return copy.deepcopy(dict(self.items()), memo)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self.items()),)
