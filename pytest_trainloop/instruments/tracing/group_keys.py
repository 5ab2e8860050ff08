"""Who reads a key of a parameter group, while a further loop is built and runs.

The key itself tells: in the optimizers' groups it is a ``str`` that equals and hashes as it did, and that notes each
comparison with an equal one. Every look-up of a dict makes that comparison, in the group as in any copy of it, so the
groups stay the objects that they are. To go through all items makes none.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer
from torch.serialization import safe_globals

from pytest_trainloop.core.ours import StandsIn, is_our_file
from pytest_trainloop.instruments.tracing.given_groups import GivenGroups
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

_WRITES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})


class GroupKeys:
    """Which of these keys are read by others than torch, in one further run of the loop."""

    def __init__(self, names: Iterable[str]) -> None:
        self._keys = {name: _Key.made(name, self) for name in names}
        self.read: set[str] = set()
        self.lost: set[str] = set()
        """Keys that are another string in a group at the end: nobody knows who reads these."""
        self.whole = False
        """Whether fit came to its end, or began its batches again: what it reads once a pass has then been read."""
        self.groups = GivenGroups(added=self._put_on)

    def run(self, evidence: Evidence) -> None:
        """Raises as ``Evidence.rerun`` does."""
        record = evidence.rerun(around=self._watching, contexts=lambda watch: (self._numbering(watch),))
        self.whole = record.ended or len(record.passes) > 1

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Around building and ``fit``."""
        with self.groups.watching(), Patches() as patches:
            patches.put(Optimizer, "load_state_dict", self._loading)
            handle = before_steps(lambda optimizer, args, kwargs: self._put_on(optimizer))
            try:
                with safe_globals([str]):  # what the pickle of a key calls, in a file that the loop loads again
                    yield
            finally:
                handle.remove()

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(optimizer, *args, **kwargs)
            self._put_on(optimizer)
            return out

        return load_state_dict

    def _put_on(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if type(group) is dict and any(self._is_plain(key) for key in group):
                items = [(self._keys[key] if self._is_plain(key) else key, value) for key, value in group.items()]
                group.clear()
                group.update(items)

    def _is_plain(self, key: Any) -> bool:
        return type(key) is str and key in self._keys

    @contextlib.contextmanager
    def _numbering(self, watch: Watch) -> Iterator[None]:
        try:
            with self.groups.numbering(watch):
                yield
        finally:
            for _, optimizer in watch.optimizers.indexed():
                for group in getattr(optimizer, "param_groups", None) or ():
                    self.lost.update(key for key in group if self._is_plain(key))

    def note(self, name: str, frame: FrameType) -> None:
        """A dict was asked for a key from this frame."""
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] in _WRITES:
            return
        reader: FrameType | None = frame
        while reader is not None:
            file = reader.f_code.co_filename
            if layer(file):
                self.read.add(name)
                return
            if is_our_file(file) or reader.f_globals.get("__name__", "").partition(".")[0] == "torch":
                return
            reader = reader.f_back  # the standard library reads for whoever calls it


class _Key(str, StandsIn):
    __slots__ = ("_notes",)
    _notes: GroupKeys

    @classmethod
    def made(cls, text: str, notes: GroupKeys) -> _Key:
        made = cls(text)
        made._notes = notes
        return made

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        if equal is True:
            self._notes.note(str.__str__(self), sys._getframe(1))
        return equal

    def __ne__(self, other: object) -> bool:
        different = super().__ne__(other)
        if different is False:
            self._notes.note(str.__str__(self), sys._getframe(1))
        return different

    def __deepcopy__(self, memo: Any) -> _Key:
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return str, (str.__str__(self),)
