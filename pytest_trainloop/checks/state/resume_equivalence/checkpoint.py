"""One checkpoint: what ``save`` gave or wrote, kept as it was at that moment, for every ``load``."""

from __future__ import annotations

import copy
import io
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.fields import is_folder, path_parameter
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.whose import present, reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.loop import TrainLoop

MOST = 20_000
"""Entries of a checkpoint that are looked at."""


class Uncopied(Exception):
    """What ``save`` returned can neither be copied nor pickled."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint: the tensor itself, and its values when it was saved."""

    path: str
    live: torch.Tensor
    saved: torch.Tensor


@dataclass(slots=True)
class Checkpoint:
    """What ``save`` made. ``remove`` deletes the folder that it wrote to."""

    entries: list[Entry] = field(default_factory=list)
    random_states: dict[str, str] = field(default_factory=dict)
    """Of torch, numpy and python those whose random state is in the checkpoint, each with its entry."""
    seen: bool = False
    """Whether its entries are known: the state was returned, or written by ``torch.save``."""
    _parameter: str = ""
    bare: bool = False
    """Whether a file is named without an ending, which the project may put there itself."""
    _given: Path | None = None
    _text: bool = False
    """Whether the path is handed over as a string, since the project takes no other."""
    _folder: Path | None = None
    _state: Any = None

    def take(self, loop: TrainLoop) -> None:
        """Call ``save``. Raises what that raises."""
        save, load = present(loop.save, "TrainLoop.save"), present(loop.load, "TrainLoop.load")
        self._parameter = path_parameter(save, load)
        written: list[Any] = []
        with patched(torch, "save", lambda original: _noting(original, written)):
            state = self._written(save) if self._parameter else save()
        roots = [("state", state), *((f"state{f' ({n})' if n else ''}", made) for n, made in enumerate(written))]
        self._look_at([(path, root) for path, root in roots if isinstance(root, (Mapping, list, tuple))])
        if self._given is None:
            self._state = copied(state)
        else:
            self._keep()

    def give(self, loop: TrainLoop) -> None:
        """Call ``load`` with a copy of its own. Raises what that raises."""
        load = present(loop.load, "TrainLoop.load")
        if self._given is not None and self._folder is not None:
            _replace(self._folder / "kept", self._folder / "given")
            self._give_path(load, self._given)
        else:
            load(copied(self._state))

    @property
    def given(self) -> Path | None:
        """The path that ``save`` was given; None where it returns a state."""
        return self._given

    def files(self) -> list[str]:
        """What ``save`` wrote into the folder of the path, each as a path within it."""
        if self._folder is None:
            return []
        kept = self._folder / "kept"
        return sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())

    def missing(self, path: Any) -> str:
        """A path where there is nothing, relative to the folder that ``save`` was given; empty for others."""
        if self._given is None or not isinstance(path, (str, Path)) or Path(path).exists():
            return ""
        try:
            return str(Path(path).relative_to(self._given.parent))
        except ValueError:
            return ""

    def changed(self) -> list[Entry]:
        """Entries whose tensor is no longer what it was when it was saved."""
        return [entry for entry in self.entries if not _same_bits(entry.live, entry.saved)]

    def holds(self, value: Any) -> str:
        """The path of the entry with just these values; empty where there is none."""
        if not isinstance(value, torch.Tensor):
            return ""
        return next((e.path for e in self.entries if e.saved.dtype == value.dtype and _same_bits(e.saved, value)), "")

    def remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._state, self.entries = None, []

    def _written(self, save: Callable[..., Any]) -> Any:
        """Call ``save`` with a path; with one of the other kind, folder or file, or with a string, where that is what
        it wants."""
        self._folder = Path(tempfile.mkdtemp(prefix="trainloop-"))
        place = self._folder / "given"
        folder = first = is_folder(self._parameter)
        raised: Exception | None = None
        self._text = False
        while True:
            path = self._path(place, folder=folder)
            try:
                return save(str(path) if self._text else path)
            except Exception as error:  # of the project's save: it may want another kind of path
                reraise_ours(error)
                raised = raised or error
                if isinstance(error, (TypeError, AttributeError)) and not self._text:
                    self._text = True
                elif (isinstance(error, OSError) or "directory" in str(error).lower()) and folder is first:
                    folder = not first
                else:
                    raise raised from None

    def _give_path(self, load: Callable[..., Any], path: Path) -> None:
        """Call ``load`` with the path, as a string where ``save`` or the error says so."""
        try:
            load(str(path) if self._text else path)
        except (TypeError, AttributeError) as error:
            if self._text or type(path).__name__ not in str(error):
                raise
            self._text = True
            self._give_path(load, path)

    def _path(self, place: Path, *, folder: bool) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        self._given = place / ("checkpoint" if folder or self.bare else "checkpoint.pt")
        if folder:
            self._given.mkdir()
        return self._given

    def _keep(self) -> None:
        folder = present(self._folder, "the folder of the checkpoint")
        _replace(folder / "given", folder / "kept")

    def _look_at(self, roots: list[tuple[str, Any]]) -> None:
        self.seen = bool(roots)
        states = random_states()
        found: dict[str, str] = {}
        for number, (path, value) in enumerate(_entries(roots)):
            if number >= MOST:
                break
            for name, state in states.items():
                if _is_state(value, state):
                    found.setdefault(name, path)
            if isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
                self.entries.append(Entry(path, value, value.detach().clone()))
        self.random_states = found


def copied(state: Any) -> Any:
    """A state of its own: torch's optimizers keep references to what they load, and would train it on."""
    try:
        return copy.deepcopy(state)
    except Exception as error:  # tensors with a history
        reraise_ours(error)
        buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)
    except Exception as error:  # of the project's own classes
        reraise_ours(error)
        raise Uncopied(
            f"the state that save returns can be neither copied nor pickled ({type(error).__name__}: {error}); return "
            "state_dict() of each part, or write it: save(path)"
        ) from None


def random_states_are(kept: Mapping[str, Any]) -> frozenset[str]:
    """The generators that stand where they stood in ``kept``."""
    now = random_states()
    return frozenset(name for name, state in kept.items() if name in now and _is_state(now[name], state))


def states_among(values: Iterable[Any], states: Mapping[str, Any]) -> frozenset[str]:
    """Whose random state is one of these values."""
    given = list(values)
    return frozenset(name for name, state in states.items() if any(_is_state(value, state) for value in given))


def random_states() -> dict[str, Any]:
    """Where torch's, numpy's and python's own generators stand."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()[1]
    return states


def _noting(original: Callable[..., Any], written: list[Any]) -> Callable[..., Any]:
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        written.append(obj)
        return original(obj, *args, **kwargs)

    return save


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def _entries(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Everything that nested containers hold, the tuples and dicts that are random states included."""
    todo, seen = list(reversed(roots)), set()
    while todo:
        path, value = todo.pop()
        yield path, value
        if isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            plain = isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value)
            if not plain:
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                todo.extend(reversed([(f"{path}[{key!r}]", item) for key, item in items]))


def _is_state(value: Any, state: Any) -> bool:
    """Whether a value is this random state, as the library gives it or in lists."""
    if isinstance(state, torch.Tensor):
        return isinstance(value, torch.Tensor) and value.dtype == state.dtype and _same_bits(value.cpu(), state)
    if isinstance(state, tuple):
        shaped = isinstance(value, (tuple, list)) and len(value) == 3 and type(value[0]) is int
        return shaped and isinstance(value[1], (tuple, list)) and _plain(value) == _plain(state)
    if isinstance(value, torch.Tensor):
        return bool(value.shape == state.shape and value.tolist() == state.tolist())
    return bool(getattr(value, "shape", None) == state.shape and (value == state).all())


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.detach(), b.to(a.device)))
