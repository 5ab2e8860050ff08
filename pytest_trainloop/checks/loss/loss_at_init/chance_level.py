"""The losses of a loop before its first step, compared with the loss of an uninformed input: chance level.

The same call is made with equal scores for all classes, even odds, zero or the mean of the targets as its input.
Weights, smoothing, ignored labels, the number of negatives and the reduction are the same in both calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.losses.table.lookup import OF_TORCH, lookup
from pytest_trainloop.instruments.tracing.arguments import takes_data
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, LOSSES
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.losses.table.entry import Entry
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Guess = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""Uninformed inputs for an input and a target; the one with the larger loss counts."""

MOST_CALLS = 16
"""Calls that are recorded, at most."""

LARGE = 3.0
"""Root mean square from which an input is not of unit size."""


@dataclass(frozen=True, slots=True)
class InitialLoss:
    """One call of a loss function before the first step."""

    name: str
    where: str
    value: float
    chance: float = math.nan
    """The loss of an uninformed input, NaN where it is not known."""
    degree: int = 1
    """The power of its input with which the loss grows."""
    below: float = 0.0
    """Standard errors by which the loss is below the entropy of the labels."""
    entropy: float = math.nan
    """The entropy of the labels."""
    outputs: float = math.nan
    """The root mean square of the input."""

    @property
    def times(self) -> float:
        """The ratio of the loss to chance; of a loss that grows with the square, the root of the ratio."""
        if not (self.chance > 0 and self.value > 0):
            return math.nan
        return float((self.value / self.chance) ** (1 / self.degree))


class InitialLosses(WatchingMode):
    """Records the calls in a run that is made in its ``contexts`` and ends with the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[InitialLoss] = []

    def active(self) -> bool:
        """Until the first step has ended: the closure that it calls, or a checkpoint, may hold the loss."""
        return not (self.watch.is_suspended or self.watch.record.begun or len(self.recorded) >= MOST_CALLS)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name not in LOSSES or getattr(F, name, None) is not func:
            return out
        if isinstance(out, torch.Tensor) and out.requires_grad:
            with self.watch.suspended(), torch.no_grad():
                self.recorded.append(_initial_loss(name, func, args, kwargs, out))
        return out

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def left(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            entry = lookup(module) if self.active() and args and isinstance(out, torch.Tensor) else None
            if (
                entry is not None
                and entry.chance
                and out.requires_grad
                and not type(module).__module__.startswith("torch.")
            ):
                with watch.suspended(), torch.no_grad():
                    self.recorded.append(_of_library(entry, module, args, kwargs, out))

        with super().watching(watch), hooked(after_modules(left, with_kwargs=True)):
            yield


Which = Literal["all", "embeddings"]


class InitialRuns:
    """The calls of loss functions before the first step, in runs with changed weights or inputs; each is made once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._made: dict[tuple[float, Which, int], list[InitialLoss]] = {}

    def losses(self, scale: float = 1.0, of: Which = "all", other_seed: int = 0) -> list[InitialLoss]:
        """With some weights multiplied by ``scale``, under the seed plus ``other_seed``."""
        key = scale, of, other_seed
        if key not in self._made:
            found, seed = InitialLosses(), self._evidence.plan().seed + other_seed
            enough, prepare = (lambda r: r.begun), scaled(scale, of)
            self._evidence.rerun(contexts=found.contexts, enough=enough, seed=seed, prepare=prepare)
            self._made[key] = found.recorded
        return self._made[key]

    def losses_of_unit_inputs(self) -> tuple[list[InitialLoss], float]:
        """With inputs divided by their root mean square where that is large, and the largest root mean square."""
        found, sizes = InitialLosses(), [0.0]

        def of_unit_size(given: Any) -> Any:
            if not isinstance(given, torch.Tensor) or not given.is_floating_point() or given.requires_grad:
                return given
            sizes.append(size_of(given))
            return given / sizes[-1] if sizes[-1] > LARGE else given

        @contextlib.contextmanager
        def scaling(watch: Watch) -> Iterator[None]:
            def enter(module: nn.Module, args: Any) -> Any:
                if not takes_data(module, args):
                    return None
                with watch.suspended(), torch.no_grad():
                    return tuple(map(of_unit_size, args))

            with hooked(before_modules(unless_suspended(watch, enter))):
                yield

        contexts = lambda watch: (scaling(watch), *found.contexts(watch))  # noqa: E731
        self._evidence.rerun(contexts=contexts, enough=lambda r: r.begun, varied="with inputs of unit size")
        return found.recorded, max(sizes)


def size_of(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def scaled(factor: float, which: Which = "all") -> Callable[[Watch], None]:
    """Multiply all weights of layers by a factor, or only tables of embeddings.

    Vectors and numbers that a model holds outside of layers, as a learned temperature, keep their values.
    """

    def prepare(watch: Watch) -> None:
        tables = {id(m.weight) for _, m in watch.table.named_modules() if isinstance(m, nn.Embedding)}
        known = zip(watch.table.entries, watch.table.tensors, strict=True)
        with torch.no_grad():
            for entry, tensor in known if factor != 1.0 else ():
                chosen = (
                    id(tensor) in tables
                    if which == "embeddings"
                    else tensor.dim() > 1 or (entry.layer and tensor.dim() == 1)
                )
                floating = tensor.is_floating_point() or tensor.is_complex()
                if chosen and floating and not torch.nn.parameter.is_lazy(tensor):
                    tensor.mul_(factor)

    return prepare


def _initial_loss(name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: torch.Tensor) -> InitialLoss:
    answer, target = (args[i] if len(args) > i else kwargs.get(n) for i, n in enumerate(("input", "target")))
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "target")}
    found = InitialLoss(name, str(here()[0]), float(out.detach().double().mean()))
    guess = _GUESSES.get(name)
    if guess is None or not isinstance(answer, torch.Tensor) or not isinstance(target, torch.Tensor):
        return found
    if name in DISTANCE_LOSSES and target.requires_grad:
        if answer.requires_grad:
            return found  # both sides are the model's: chance is not known
        answer, target = target, answer
    losses = [float(func(g, target, *args[2:], **rest).detach().double().mean()) for g in guess(answer, target)]
    below, entropy = _below_entropy(answer, target, args[2:], rest) if name == "cross_entropy" else (0.0, math.nan)
    found = replace(found, degree=OF_TORCH[name].degree, below=below, entropy=entropy)
    return replace(found, chance=max(losses), outputs=size_of(answer))


def _of_library(entry: Entry, module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> InitialLoss:
    """The call of a loss module of a library, that the table of losses knows the chance level of."""
    answer, *rest = args
    found = InitialLoss(type(module).__name__, str(here()[0]), float(out.detach().double().mean()), degree=entry.degree)
    target = rest[0] if rest else next(iter(kwargs.values()), None)
    if not isinstance(answer, torch.Tensor) or not isinstance(target, torch.Tensor):
        return found
    guesses = _BY_CHANCE[entry.chance](answer, target)
    losses = [float(module.forward(g, *rest, **kwargs).detach().double().mean()) for g in guesses]
    return replace(found, chance=max(losses), outputs=size_of(answer))


def _below_entropy(answer: torch.Tensor, target: torch.Tensor, args: Any, kwargs: Any) -> tuple[float, float]:
    """The standard errors by which a cross entropy over plain class indices is below the entropy of the labels, and
    that entropy."""
    if args or target.is_floating_point() or kwargs.get("weight") is not None or kwargs.get("label_smoothing"):
        return 0.0, math.nan
    ignored = kwargs.get("ignore_index", -100)
    each = F.cross_entropy(answer, target, ignore_index=ignored, reduction="none").double()[target != ignored]
    count = torch.bincount(target[target != ignored]).double()
    if len(each) < 16 or len(each) < 2 * int((count > 0).sum()):
        return 0.0, math.nan  # one label for each row: matching pairs are similar from the start
    share = count / len(each)
    entropy = float(-(share * share.clamp_min(1e-12).log()).sum())
    error = float(each.std()) / math.sqrt(len(each))
    return (entropy - float(each.mean())) / error if error > 0 else 0.0, entropy


def _log_uniform(axis: int) -> Guess:
    def guess(answer: torch.Tensor, _target: torch.Tensor) -> list[torch.Tensor]:
        size = answer.shape[axis if answer.dim() > axis else 0] if axis >= 0 else answer.shape[-1]
        return [torch.full_like(answer, -math.log(max(size, 1)))]

    return guess


_BY_CHANCE: dict[str, Guess] = {
    "zeros": lambda answer, _target: [torch.zeros_like(answer)],
    "halves": lambda answer, _target: [torch.full_like(answer, 0.5)],
    "log_uniform": _log_uniform(1),
    "log_uniform_last": _log_uniform(-1),
    # the outputs of an untrained net are near zero, or near the mean of the targets
    "constants": lambda answer, target: [
        torch.zeros_like(answer),
        torch.full_like(answer, float(target.double().mean())),
    ],
}
_GUESSES = {name: _BY_CHANCE[entry.chance] for name, entry in OF_TORCH.items() if entry.chance}
