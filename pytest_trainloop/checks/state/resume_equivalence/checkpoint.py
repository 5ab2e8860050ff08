"""What ``save`` gave or wrote, kept as it was at that moment for every ``load``, and what ``load`` does with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from pytest_trainloop.core import members
from pytest_trainloop.core.whose import present, reraise_ours
from pytest_trainloop.declare.fields import is_folder, listed, named_modules, path_parameter
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.reachable_state.snapshot import Reach
from pytest_trainloop.runs.reachable_state.stored import Stored, stored, value_of
from pytest_trainloop.runs.reachable_state.value_kinds import sort_of
from pytest_trainloop.runs.split_run import same_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

MOST_ENTRIES = 20_000
"""Entries of a checkpoint that are looked at."""


class Uncopied(Exception):
    """What ``save`` returned can neither be copied nor pickled."""


class Checkpoint:
    """What ``save`` made. ``remove`` deletes the folder that it wrote to.

    With ``bare`` a file is named without an ending, which the project may put there itself.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self.entries: dict[str, torch.Tensor | Stored] = {}
        """Copies of its tensors by path, as they were saved."""
        self.live: dict[str, torch.Tensor] = {}
        """The tensors themselves, until the run is over."""
        self.random_states: dict[str, str] = {}
        """Of torch, numpy and python those whose random state is in the checkpoint, each with its entry."""
        self.seen = False
        """Whether its entries are known: the state was returned, or written by ``torch.save``."""
        self.numbers: dict[str, list[Any]] = {}
        """The numbers in it by their key."""
        self.given: Path | None = None
        """The path that ``save`` was given; None where it returns a state."""
        self._bare = bare
        self._text = False  # whether the path is passed as a string, since the project takes no other
        self._folder: Path | None = None
        self._state: Any = None
        self._replaced: list[tuple[Stored, int]] = []
        """What is in the kept state in place of large tensors, with the addresses of their memory."""

    def take(self, loop: TrainLoop) -> None:
        """Call ``save``. Raises what that raises."""
        save = present(loop.save, "TrainLoop.save")
        parameter = path_parameter(save, present(loop.load, "TrainLoop.load"))
        written: list[Any] = []

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def save_file(obj: Any, *args: Any, **kwargs: Any) -> Any:
                written.append(obj)
                return original(obj, *args, **kwargs)

            return save_file

        with patched(torch, "save", noting):
            state = self._written(save, parameter) if parameter else save()
        roots = [("state", state), *((f"state{f' ({n})' if n else ''}", made) for n, made in enumerate(written))]
        self._look_at([(path, root) for path, root in roots if isinstance(root, (Mapping, list, tuple))])
        if self.given is None:
            self._state = copied(state, self._large())
        else:
            self._moved("given", "kept")

    def give(self, loop: TrainLoop) -> None:
        """Call ``load`` with a copy of its own. Raises what that raises."""
        load = present(loop.load, "TrainLoop.load")
        if self.given is None:
            load(copied(self._state, self._read()))
            return
        self._moved("kept", "given")
        try:
            load(str(self.given) if self._text else self.given)
        except (TypeError, AttributeError) as error:
            if self._text or type(self.given).__name__ not in str(error):
                raise
            self._text = True  # a load that wants a string, where save took either
            load(str(self.given))

    def files(self) -> list[str]:
        """What ``save`` wrote into the folder of the path, each as a path within it."""
        if self._folder is None:
            return []
        kept = self._folder / "kept"
        return sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())

    def missing(self, path: Any) -> str:
        """A path where there is nothing, relative to the folder that ``save`` was given; empty for others."""
        if self.given is None or not isinstance(path, (str, Path)) or Path(path).exists():
            return ""
        try:
            return str(Path(path).relative_to(self.given.parent))
        except ValueError:
            return ""

    def changed(self) -> list[str]:
        """Entries whose tensor is no longer what it was when it was saved; the tensors are let go of."""
        found = [path for path, live in self.live.items() if not _same_bits(live, value_of(self.entries[path]))]
        self.live = {}
        return found

    def holds(self, value: Any) -> str:
        """The path of the entry with just these values; empty where there is none."""
        if not isinstance(value, torch.Tensor):
            return ""
        wanted = stored(value)
        return next((path for path, entry in self.entries.items() if _is_copy(entry, wanted)), "")

    def remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._state, self.entries, self.live, self._replaced = None, {}, {}, []

    def _written(self, save: Callable[..., Any], parameter: str) -> Any:
        """Call ``save`` with a path; with one of the other kind, folder or file, or with a string, where that is what
        it wants."""
        self._folder, self._text = Path(tempfile.mkdtemp(prefix="trainloop-")), False
        place = self._folder / "given"
        folder = first = is_folder(parameter)
        raised: Exception | None = None
        while True:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            self.given = place / ("checkpoint" if folder or self._bare else "checkpoint.pt")
            if folder:
                self.given.mkdir()
            try:
                return save(str(self.given) if self._text else self.given)
            except Exception as error:  # of the project's save: it may want another kind of path
                reraise_ours(error)
                raised = raised or error
                if isinstance(error, (TypeError, AttributeError)) and not self._text:
                    self._text = True
                elif (isinstance(error, OSError) or "directory" in str(error).lower()) and folder is first:
                    folder = not first
                else:
                    raise raised from None

    def _moved(self, source: str, target: str) -> None:
        folder = present(self._folder, "the folder of the checkpoint")
        shutil.rmtree(folder / target, ignore_errors=True)
        shutil.copytree(folder / source, folder / target, symlinks=True)

    def _large(self) -> dict[int, Any]:
        """What a copy of the state holds in place of its large tensors, by their ids: those that have their memory to
        themselves, or share all of it with others of these."""
        entries = [(live, self.entries[path]) for path, live in self.live.items()]
        odd = {_memory(t) for t, entry in entries if not isinstance(entry, Stored) or not _is_bare(t)}
        found = [(t, entry) for t, entry in entries if isinstance(entry, Stored) and _memory(t) not in odd]
        self._replaced = [(entry, _memory(t)) for t, entry in found]
        return {id(t): entry for t, entry in found}

    def _read(self) -> dict[int, Any]:
        """The tensors that come back in their places."""
        memories: dict[Any, torch.Tensor] = {}
        found: dict[int, Any] = {}
        for entry, there in self._replaced:
            key = there, entry.shape, entry.dtype
            memories[key] = memories[key] if key in memories else entry.read()
            found[id(entry)] = memories[key].detach()
        return found

    def _look_at(self, roots: list[tuple[str, Any]]) -> None:
        """Note the tensors in nested containers, and the tensors, tuples and dicts that are random states."""
        self.seen = bool(roots)
        states = random_states()
        todo, seen, left = list(reversed(roots)), set[int](), MOST_ENTRIES
        while todo and left:
            (path, value), left = todo.pop(), left - 1
            for name, state in states.items():
                if _is_state(value, state):
                    self.random_states.setdefault(name, path)
            if isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
                self.entries.setdefault(path, stored(value))
                self.live.setdefault(path, value)
            if isinstance(value, (int, float)):
                self.numbers.setdefault(path.rpartition("[")[2].strip("]'"), []).append(value)
            if isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
                seen.add(id(value))
                items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
                if isinstance(value, Mapping) or not all(isinstance(item, (int, float, str)) for _, item in items):
                    todo.extend(reversed([(f"{path}[{key!r}]", item) for key, item in items]))


def copied(state: Any, replaced: dict[int, Any]) -> Any:
    """A state of its own: torch's optimizers keep references to what they load, and would train it on. ``replaced`` are
    what it holds in place of objects, by their ids."""
    try:
        return copy.deepcopy(state, replaced)
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


def random_states() -> dict[str, Any]:
    """The states of torch's, numpy's and python's own generators."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return states if numpy is None else {**states, "numpy": numpy.random.get_state()[1]}


def states_among(values: Iterable[Any], states: Mapping[str, Any]) -> frozenset[str]:
    """Whose random state is one of these values."""
    return frozenset(name for value in values for name, state in states.items() if _is_state(value, state))


def standing_at(states: Mapping[str, Any]) -> frozenset[str]:
    """The generators whose state did not change."""
    now = random_states()
    return frozenset(name for name, state in states.items() if name in now and _is_state(now[name], state))


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


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if address(tensor) else 0


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor is its values and nothing else."""
    bare = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
    return bare and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _is_copy(entry: torch.Tensor | Stored, wanted: torch.Tensor | Stored) -> bool:
    if isinstance(entry, Stored) or isinstance(wanted, Stored):
        return isinstance(entry, Stored) and isinstance(wanted, Stored) and entry.is_same(wanted)
    return entry.dtype == wanted.dtype and _same_bits(entry, wanted)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.detach(), b.to(a.device)))


def weights_of(loop: TrainLoop) -> list[tuple[str, torch.Tensor]]:
    """Declared weights by name; one that has several names comes with each."""
    return [
        (f"{prefix}.{name}".lstrip("."), weight)
        for prefix, module in loop.modules.items()
        for name, weight in members.named_parameters(module, remove_duplicate=False)
    ]


def tensors_of(loop: TrainLoop) -> list[tuple[str, torch.Tensor]]:
    """Declared weights and buffers by name."""
    buffers = (
        (f"{prefix}.{name}".lstrip("."), buffer)
        for prefix, module in loop.modules.items()
        for name, buffer in members.named_buffers(module, remove_duplicate=False)
    )
    return [*weights_of(loop), *buffers]


class StateDictCall(NamedTuple):
    """A call of a module's ``load_state_dict``."""

    where: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    right: frozenset[str]
    """Names of declared weights and buffers that hold what was saved once it is through."""
    assign: bool
    elsewhere: str
    """The class of the module, where it is a declared model's and none of its tensors are declared."""


@contextlib.contextmanager
def calls_noted(calls: list[StateDictCall], loop: TrainLoop, saved: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Note the outermost calls of ``load_state_dict``."""
    depth = 0

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            where = str(here()[0]) if user_frames(1) else ""  # else a library restores the project's modules
            depth += 1
            try:
                keys = original(module, state, *args, **kwargs)
            finally:
                depth -= 1
            if depth:
                return keys
            now = tensors_of(loop)
            declared = {id(tensor) for _, tensor in now}
            undeclared = not declared & {
                id(tensor) for tensor in (*members.parameters(module), *members.buffers(module))
            }
            same_class = any(type(own) is type(module) for own in loop.modules.values())
            calls.append(
                StateDictCall(
                    where,
                    missing=tuple(getattr(keys, "missing_keys", ())),
                    unexpected=tuple(getattr(keys, "unexpected_keys", ())),
                    right=frozenset(n for n, t in now if n in saved and same_tensor(saved[n], t.detach())),
                    assign=bool(kwargs.get("assign", args[1:2] == (True,))),
                    elsewhere=type(module).__name__ if undeclared and same_class else "",
                )
            )
            return keys

        return load_state_dict

    with patched(nn.Module, "load_state_dict", around):
        yield


def put_in_place(loop: TrainLoop, before: Mapping[int, Any]) -> bool:
    """Let the fields of a loop name what its functions use since ``load``, which may have made another optimizer,
    schedule or model, while the declared ones lie idle. ``before`` is what the functions led to until then. Says
    whether anything was replaced."""
    after = reached_by_functions(loop)
    fresh = [thing for key, thing in after.items() if key not in before]
    replaced = False
    for name in ("model", "optimizer", "scheduler", "scaler"):
        field = getattr(loop, name)
        gone = [thing for thing in listed(field) if id(thing) in before and id(thing) not in after]
        new = [thing for thing in fresh if sort_of(thing) == ("module" if name == "model" else name)]
        if name == "model":
            inner = {id(m) for module in new for m in members.modules(module) if m is not module}
            new = [module for module in new if id(module) not in inner]
        others: dict[int, Any] = {}
        for old in gone:
            if same_type := [thing for thing in new if type(thing) is type(old)] or new:
                others[id(old)] = same_type[0]
                new = [thing for thing in new if thing is not same_type[0]]
        if not others:
            continue
        replaced = True
        if isinstance(field, Mapping):
            setattr(loop, name, {key: others.get(id(value), value) for key, value in field.items()})
        elif isinstance(field, (list, tuple, set)):
            setattr(loop, name, [others.get(id(value), value) for value in field])
        else:
            setattr(loop, name, others.get(id(field), field))
        if name == "model":
            loop._modules = named_modules(loop.model)
    return replaced


def reached_by_functions(loop: TrainLoop) -> dict[int, Any]:
    """Objects that the loop's functions lead to, whatever is declared."""
    bare = copy.copy(loop)
    bare.optimizer = bare.scheduler = bare.scaler = None
    bare._modules = {}
    return _known(Reach.of(bare))


def enabled_scalers(reach: Reach) -> list[Any]:
    """Gradient scalers that can be reached and are switched on, declared or not."""
    found = [thing for thing in _known(reach).values() if sort_of(thing) == "scaler"]
    return [scaler for scaler in found if isinstance(scaler, GradScaler) and scaler.is_enabled()]


def _known(reach: Reach) -> dict[int, Any]:
    """All objects that a walk came by, each once."""
    return {id(place.value): place.value for place in reach.walked.places.values()}


_LOWER = (torch.float16, torch.bfloat16, torch.float32)


def rounded(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """The dtype and the names of what comes back from a checkpoint in a lower precision; empty where nothing does, or a
    loop that has not trained yet can be saved or loaded by no means.

    A run in float64 does not show it: what is cast to a lower precision stays in float64 there. So a loop in its own
    precision is saved before it trains, and loaded into another one. Values that differ, and are those of the first
    loop rounded to a lower dtype bit for bit, were rounded on the way.
    """
    first, second = evidence.fresh_loop(), evidence.fresh_loop()
    checkpoint = Checkpoint()
    try:
        with preserved():
            checkpoint.take(first)
            saved = {name: tensor.detach().clone() for name, tensor in tensors_of(first)}
            checkpoint.give(second)
    except (Exception, SystemExit) as error:  # of the project's save and load
        reraise_ours(error)
        return "", ()
    finally:
        checkpoint.remove()
    loaded = dict(tensors_of(second))
    for dtype in _LOWER:
        names = tuple(name for name, value in saved.items() if _is_rounded(value, loaded.get(name), dtype))
        if names:
            return str(dtype).removeprefix("torch."), names
    return "", ()


def _is_rounded(value: torch.Tensor, loaded: torch.Tensor | None, dtype: torch.dtype) -> bool:
    if loaded is None or not value.is_floating_point() or value.layout is not torch.strided or value.is_meta:
        return False
    if loaded.shape != value.shape or loaded.dtype != value.dtype or torch.equal(loaded, value):
        return False
    return torch.equal(loaded.detach().to(value.device), value.to(dtype).to(value.dtype))
