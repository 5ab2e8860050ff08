"""What happens while ``load`` runs: state dicts that are loaded, objects that take the place of declared ones."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.amp.grad_scaler import GradScaler

from pytest_trainloop import members
from pytest_trainloop.checks.state.resume_equivalence.names import declared_tensors
from pytest_trainloop.fields import named_modules
from pytest_trainloop.reach.sorts import sort_of
from pytest_trainloop.reach.walk import Reach
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.runs.halves import same_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from pytest_trainloop.loop import TrainLoop


@dataclass(frozen=True, slots=True)
class StateDictCall:
    """A call of a module's ``load_state_dict``."""

    where: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    right: frozenset[str]
    """Names of declared weights and buffers that hold what was saved once it is through."""
    assign: bool
    elsewhere: str = ""
    """The class of the module, where it is a declared model's and none of its tensors are declared."""


@dataclass(slots=True)
class Loading:
    """What one ``load`` did."""

    calls: list[StateDictCall] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    """Declared objects in whose place ``load`` put others: "optimizer", "scheduler", "model"."""

    @contextlib.contextmanager
    def watched(self, loop: TrainLoop, saved: Mapping[str, torch.Tensor]) -> Iterator[None]:
        depth = [0]

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def load_state_dict(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
                where = str(here()[0]) if user_frames(1) else ""  # else a library restores the project's modules
                depth[0] += 1
                try:
                    keys = original(module, state, *args, **kwargs)
                finally:
                    depth[0] -= 1
                if not depth[0]:
                    assign = bool(kwargs.get("assign", args[1:2] == (True,)))
                    self._note(loop, saved, where, keys, assign=assign, module=module)
                return keys

            return load_state_dict

        with patched(nn.Module, "load_state_dict", around):
            yield

    def _note(
        self,
        loop: TrainLoop,
        saved: Mapping[str, torch.Tensor],
        where: str,
        keys: Any,
        *,
        assign: bool,
        module: nn.Module,
    ) -> None:
        right = {n for n, tensor in declared_tensors(loop) if n in saved and same_tensor(saved[n], tensor.detach())}
        missing, unexpected = getattr(keys, "missing_keys", ()), getattr(keys, "unexpected_keys", ())
        declared = {id(tensor) for _, tensor in declared_tensors(loop)}
        apart = not declared & {id(tensor) for tensor in (*members.parameters(module), *members.buffers(module))}
        same_class = any(type(own) is type(module) for own in loop.modules.values())
        elsewhere = type(module).__name__ if apart and same_class else ""
        self.calls.append(StateDictCall(where, tuple(missing), tuple(unexpected), frozenset(right), assign, elsewhere))

    def put_in_place(self, loop: TrainLoop, before: Mapping[int, Any]) -> None:
        """Let the fields of a loop name what its functions use since ``load``: it may have made another optimizer,
        schedule or model, and the declared ones lie idle. ``before`` is what the functions led to until then."""
        after = reached_by_functions(loop)
        fresh = [thing for key, thing in after.items() if key not in before]
        for name in ("model", "optimizer", "scheduler", "scaler"):
            gone = [thing for thing in _each(getattr(loop, name)) if id(thing) in before and id(thing) not in after]
            new = [thing for thing in fresh if sort_of(thing) == ("module" if name == "model" else name)]
            if name == "model":
                inner = {id(m) for module in new for m in members.modules(module) if m is not module}
                new = [module for module in new if id(module) not in inner]
            others = {}
            for old in gone:
                same = [thing for thing in new if type(thing) is type(old)] or new
                if same:
                    others[id(old)] = same[0]
                    new = [thing for thing in new if thing is not same[0]]
            if others:
                setattr(loop, name, _exchanged(getattr(loop, name), others))
                self.replaced[name] = type(next(iter(others.values()))).__name__
            if others and name == "model":
                loop._modules = named_modules(loop.model)


def enabled_scalers(reach: Reach) -> list[Any]:
    """Gradient scalers that can be reached and are switched on, declared or not."""
    found = [thing for thing in _known(reach) if sort_of(thing) == "scaler"]
    return [scaler for scaler in found if isinstance(scaler, GradScaler) and scaler.is_enabled()]


def _known(reach: Reach) -> list[Any]:
    """All objects that a walk came by, each once."""
    return list({id(place.value): place.value for place in reach.walked.places.values()}.values())


def reached_by_functions(loop: TrainLoop) -> dict[int, Any]:
    """Objects that the loop's functions lead to, whatever is declared."""
    bare = copy.copy(loop)
    bare.optimizer = bare.scheduler = bare.scaler = None
    bare._modules = {}
    return {id(thing): thing for thing in _known(Reach.of(bare))}


def _each(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple, set)) else [given]


def _exchanged(given: Any, others: dict[int, Any]) -> Any:
    if isinstance(given, Mapping):
        return {key: others.get(id(value), value) for key, value in given.items()}
    if isinstance(given, (list, tuple, set)):
        return [others.get(id(value), value) for value in given]
    return others.get(id(given), given)
