"""Passes of networks that no step moves, whose results are targets: with dropout active, and what the results meet.

A network gives targets if its results have no history and none of what is made of them meets a weight that trains:
features and conditions go through such weights, targets meet outputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.gradients.dependence import difference
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.function_mode import FunctionMode, aside, tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import raw_bytes, readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.recording.torch_names import DROPOUTS
from pytest_trainloop.recording.train_mode import acts_by_mode, trains
from pytest_trainloop.runs.hooks import hooked, unless_suspended
from pytest_trainloop.runs.process_state import random_states, restore_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

FOLLOWED_STEPS = 2
"""Optimizer steps that results are followed for."""

LEAST_CHANGE = 1e-6
"""Of the first losses, from which a change is one."""


@dataclass(slots=True)
class TargetNetwork:
    """A module in training mode all of whose parameters rest."""

    name: str
    parameters: frozenset[str]
    place: Place
    switched_on: bool
    """Whether the last call of ``train()`` or ``eval()`` on it, or on a part of it, put it into training mode."""
    passes: int = 0
    given: list[str] = field(default_factory=list)
    feature: bool = False
    """Whether a weight that trains, or a gradient, meets what it gives."""
    meets: bool = False
    """Whether what it gives meets an output that trains."""

    @property
    def samples(self) -> bool:
        """Whether the same inputs are given several times, or repeated in one call: dropout is wanted there."""
        return "" in self.given or len(set(self.given)) < len(self.given)


class Switches:
    """The last call of ``train()`` or ``eval()`` on each module itself, not on one that holds it."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._inside = False

    def watching(self) -> contextlib.AbstractContextManager[None]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def train(module: nn.Module, mode: bool = True) -> Any:
                if self._inside:
                    return original(module, mode)
                self._last[id(module)] = (weakref.ref(module), bool(mode))
                self._inside = True
                try:
                    return original(module, mode)
                finally:
                    self._inside = False

            return train

        return patched(nn.Module, "train", around)

    def on(self, module: nn.Module) -> bool:
        """Whether it, or a part of it, was put into training mode by name."""
        found = [self._last.get(id(part)) for part in members.modules(module)]
        return any(last is not None and last[0]() is not None and last[1] for last in found)


class TargetPasses(WatchingMode):
    """The passes of networks whose parameters all rest, and what their results meet."""

    def __init__(self, resting: frozenset[str], trained: frozenset[str]) -> None:
        super().__init__()
        self._resting, self._trained = resting, trained
        self._switches = Switches()
        self._inside: nn.Module | None = None
        self._made: dict[int, tuple[torch.Tensor, TargetNetwork]] = {}
        self.found: dict[frozenset[str], TargetNetwork] = {}
        self.record: Record | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> TargetPasses:
        record = evidence.run()
        idle = {p.name for p in record.parameters if p.index not in record.held and not record.reached(p.index)}
        resting = idle - {record.name(i) for i in record.changed() | record.moved_outside_steps()}
        found = cls(frozenset(resting), frozenset(record.name(i) for i in record.held))
        if resting:
            found.record = evidence.rerun(
                around=found._switches.watching, contexts=found.contexts, enough=lambda r: r.rounds >= FOLLOWED_STEPS
            )
        return found

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._inside is None and trains(module) and (names := self._at_rest(watch, module)):
                with watch.suspended():
                    self._inside = module
                    self._note(watch, module, names, args)

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            if module is self._inside:
                self._inside = None
                with watch.suspended():
                    network = self.found[names_of(watch, module)]
                    for tensor in nested.tensors(output):
                        network.feature |= tensor.requires_grad
                        self._made[id(tensor)] = (tensor, network)

        before = before_modules(unless_suspended(watch, enter))
        after = after_modules(unless_suspended(watch, leave), always_call=True)
        with super().watching(watch), hooked(before, after):
            try:
                yield
            finally:
                self._made.clear()

    def _at_rest(self, watch: Watch, module: nn.Module) -> frozenset[str]:
        names = names_of(watch, module)
        acts = any(_drops(part) for part in members.modules(module))
        return names if acts and names and names <= self._resting else frozenset()

    def _note(self, watch: Watch, module: nn.Module, names: frozenset[str], args: Any) -> None:
        if names not in self.found:
            name = watch.table.modules.get(id(module)) or _variable(module) or type(module).__name__
            self.found[names] = TargetNetwork(name, names, here()[0], self._switches.on(module))
        network = self.found[names]
        network.passes += 1
        network.given.append(_digest(args, watch.record.steps))

    def active(self) -> bool:
        return bool(self._made) and self.watch.record.steps < FOLLOWED_STEPS and super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        given = list(tensors_in(args, kwargs))
        mine = {id(k[1]): k[1] for t in given if (k := self._made.get(id(t))) is not None and k[0] is t}
        if not mine or self._inside is not None:
            return out
        with self.watch.suspended():
            weights = any(self._is_trained(t) for t in given)
            results = list(tensors_in(out))
            for network in mine.values():
                network.feature |= weights
                network.meets |= any(t.requires_grad for t in results)
                self._made |= {id(t): (t, network) for t in results}
        return out

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        index = self.watch.table.index(tensor)
        return index is not None and self.watch.table.entries[index].name in self._trained


def _drops(module: nn.Module) -> bool:
    return trains(module) and acts_by_mode(module) and not isinstance(module, NORM_MODULES)


def _variable(module: nn.Module) -> str:
    """What the user's code calls a module: the name in the outermost of the nearest frames."""
    names = [n for f in user_frames(3) for n, value in f.f_locals.items() if value is module and n != "self"]
    return names[-1] if names else ""


def names_of(watch: Watch, module: nn.Module) -> frozenset[str]:
    """The names of a module's parameters in the record."""
    indices = [watch.table.index(p) for p in members.parameters(module)]
    return frozenset(watch.table.entries[i].name for i in indices if i is not None)


def _digest(given: Any, step: int) -> str:
    """Of what a call is given; empty where at least half of its rows repeat others."""
    digest = hashlib.sha256(str(step).encode())
    for tensor in nested.tensors(given):
        if readable(tensor) and tensor.layout is torch.strided:
            rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
            if len(rows) > 1 and 2 * len(torch.unique(rows, dim=0)) <= len(rows):
                return ""
            digest.update(raw_bytes(rows.to(torch.float64)))
    return digest.hexdigest()


def first_losses(record: Record) -> list[float]:
    """What is backpropagated up to the first step."""
    end = next((s.at for s in record.innermost_steps()), 0)
    return [root.value for b in record.of(Backward) if not end or b.at < end for root in b.roots]


def change_without_dropout(evidence: Evidence, network: TargetNetwork) -> float:
    """By how much the first losses change where these passes are made with dropout off; the numbers that are drawn
    afterwards, and the statistics of norms, stay the same."""

    @contextlib.contextmanager
    def watching(watch: Watch) -> Iterator[None]:
        busy = False

        def leave(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> Any:
            nonlocal busy
            if busy or names_of(watch, module) != network.parameters or not trains(module):
                return None
            parts = [p for p in members.modules(module) if trains(p) and not isinstance(p, NORM_MODULES)]
            kept = [(b, b.clone()) for b in members.buffers(module)]
            with watch.suspended(), aside():
                states, busy = random_states(), True
                for part in parts:
                    part.training = False
                try:
                    return module(*args, **kwargs)
                finally:
                    for part in parts:
                        part.training = True
                    for buffer, value in kept:
                        buffer.copy_(value)
                    restore_random(states)
                    busy = False

        with hooked(after_modules(unless_suspended(watch, leave), with_kwargs=True)):
            yield

    other = evidence.rerun(contexts=lambda watch: (watching(watch),), enough=lambda r: r.rounds >= 1, may_raise=True)
    return 0.0 if other.raised is not None else difference(first_losses(evidence.run()), first_losses(other))


class BuildingPasses(FunctionMode):
    """Dropout that acts without gradients inside a module while the loop is built; with ``quiet`` it drops nothing, and
    draws all the same."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._switches = Switches()
        self._modules: list[nn.Module] = []
        self.over = False
        self.root: nn.Module | None = None
        self.name = ""
        self.place: Place | None = None
        self._called_at: Place | None = None
        self.given: list[str] = []
        self.intended = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            if not self._modules and not self.over and not torch.is_grad_enabled():
                self.given.append(_digest(args, 0))
                self._called_at = here()[0]
            self._modules.append(module)

        def leave(module: nn.Module, _args: Any, _output: Any) -> None:
            while self._modules and self._modules.pop() is not module:
                pass

        with hooked(before_modules(enter), after_modules(leave, always_call=True)), self._switches.watching(), self:
            yield

    def ended(self, _watch: Watch) -> list[contextlib.AbstractContextManager[None]]:
        """For the ``contexts`` of a run: the loop is built."""
        self.over = True
        return []

    def looks(self) -> bool:
        return not self.over and bool(self._modules) and not torch.is_grad_enabled()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name not in DROPOUTS or not kwargs.get("training", True) or not kwargs.get("p", 0.5) or not args:
            return out
        root = self._modules[0]
        if kwargs.get("inplace") or not trains(root) or not any(True for _ in members.parameters(root)):
            return out
        if self.root is None:
            self.root, self.name, self.place = root, type(root).__name__, self._called_at
        self.intended |= self._switches.on(root)
        return args[0] if self._quiet else out
