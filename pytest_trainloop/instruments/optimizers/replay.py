"""A step of one of torch's own optimizers, repeated on copies of some entries of its parameters.

Only optimizers that treat every entry alone are copied: a few entries then move exactly as they do among all. The step
of the class is called below its hooks, so that no observer of optimizers sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.torch_internals import has_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import Optimizer

    from pytest_trainloop.recording.watch import Watch

    Pick = Callable[[torch.Tensor], torch.Tensor]

T = TypeVar("T")

ENTRYWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD, torch.optim.ASGD),
)
"""Optimizers whose step on an entry depends on that entry alone."""

SCALARS = ("step", "eta", "mu", "mu_product")
"""State that is one number for a whole parameter."""

WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


@dataclass(frozen=True, slots=True)
class Member:
    """Copied entries of one parameter, of its gradient and of its state, all as vectors; ``index`` is that of the
    parameter in the record."""

    index: int
    entries: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        kept = {str(v.dtype).removeprefix("torch.") for k, v in self.state.items() if entrywise(k, v)}
        return tuple(sorted(kept))


@dataclass(frozen=True, slots=True)
class Group:
    options: dict[str, Any]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a step is about to work on; ``kind`` is torch's class."""

    kind: type[Optimizer]
    groups: tuple[Group, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(m for group in self.groups for m in group.members)


def kind_of(optimizer: Any) -> type[Optimizer] | None:
    """Torch's class whose step this optimizer makes, if that treats each entry alone: its own class, or one of which
    its class overrides special methods only. None where hooks of its own may change what a step does, or a gradient
    scaler works inside of it."""
    if has_step_hooks(optimizer):
        return None
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return None
    for kind in type(optimizer).__mro__:
        if kind in ENTRYWISE:
            return kind
        if any(not (name.startswith("__") and name.endswith("__")) for name in vars(kind)):
            return None
    return None


def snapshot(optimizer: Any, watch: Watch, pick: Pick, wanted: Callable[[torch.Tensor], bool]) -> Snapshot | None:
    """Copies of what the optimizer's next step works on; None where it cannot be repeated on copies."""
    kind = kind_of(optimizer)
    if kind is None or _captured(optimizer):
        return None
    groups: list[Group] = []
    for group in optimizer.param_groups:
        members = [_member(optimizer, p, watch, pick) for p in group["params"] if wanted(p)]
        options = {k: _plain(v) for k, v in group.items() if k != "params"}
        groups.append(Group(options, tuple(m for m in members if m is not None)))
    return Snapshot(kind, tuple(groups)) if any(g.members for g in groups) else None


def _captured(optimizer: Any) -> bool:
    on_cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    return on_cuda and torch.cuda.is_current_stream_capturing()


def _member(optimizer: Any, p: torch.Tensor, watch: Watch, pick: Pick) -> Member | None:
    grad, index = p.grad, watch.table.index(p)
    if grad is None or index is None or not readable(p) or not readable(grad) or not p.numel():
        return None
    if not (p.is_floating_point() or p.is_complex()) or grad.layout is not torch.strided:
        return None
    state: dict[str, Any] = {}
    for key, value in optimizer.state.get(p, {}).items():
        if isinstance(value, torch.Tensor) and key not in SCALARS:
            if value.shape != p.shape or value.layout is not torch.strided:
                return None
            state[key] = pick(value.detach()).clone()
        else:
            state[key] = _copied(value)
    return Member(index, pick(p.detach()).clone(), pick(grad.detach()).clone(), state)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    """A hyperparameter as a number, also where it is kept in a tensor: not all variants accept that."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def entrywise(key: str, value: Any) -> bool:
    """Whether a value of a parameter's state has an entry for each of its own."""
    return isinstance(value, torch.Tensor) and key not in SCALARS


def first_entries(most: int) -> Pick:
    """The first ``most`` entries, in order of their index."""
    return lambda tensor: tensor.reshape(-1)[:most]


def rebuilt(snap: Snapshot, *, wide: bool, **options: Any) -> tuple[Optimizer, dict[int, torch.Tensor]]:
    """A fresh optimizer over copies of the copies, and these by parameter; in float64 if ``wide``. ``options`` replace
    those of its groups that have them."""

    def cast(value: Any) -> Any:
        return value.to(WIDE.get(value.dtype, value.dtype) if wide else value.dtype, copy=True)

    plain = {"capturable": False, "differentiable": False, "foreach": False, "fused": False, **options}
    groups: list[dict[str, Any]] = []
    held: dict[int, torch.Tensor] = {}
    states: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
    for group in snap.groups:
        inside = {**group.options, **{k: v for k, v in plain.items() if k in group.options}}
        params = []
        for m in group.members:
            p = torch.nn.Parameter(cast(m.entries))
            p.grad = cast(m.grad)
            held[m.index] = p
            params.append(p)
            states.append((p, m.state))
        if params:
            groups.append({**inside, "params": params})
    kind: Any = snap.kind
    fresh: Optimizer = kind(groups)
    for held_one, state in states:
        if state:
            fresh.state[held_one] = {
                k: cast(v) if entrywise(k, v) else _placed(k, v, held_one, plain) for k, v in state.items()
            }
    return fresh, held


def _placed(key: str, value: Any, p: torch.Tensor, options: dict[str, Any]) -> Any:
    """A value that is no vector of entries; the step count on the device that the variant needs."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(p.device, copy=True) if key == "step" and options["fused"] else value.clone()


def step(optimizer: Optimizer) -> None:
    """One step, below the hooks."""
    plain: Any = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    plain(optimizer)


def stepped(snap: Snapshot, *, wide: bool, steps: int = 1, **options: Any) -> dict[int, torch.Tensor]:
    """The copied entries after ``steps`` steps on the same gradients."""
    fresh, held = rebuilt(snap, wide=wide, **options)
    grads = {index: p.grad for index, p in held.items()}
    for _ in range(steps):
        for index, p in held.items():
            grad = grads[index]
            p.grad = None if grad is None else grad.clone()  # some variants write into gradients
        step(fresh)
    return {index: p.detach() for index, p in held.items()}


REFUSED = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError)
"""What torch raises where an optimizer or a variant does not accept these tensors or options."""
