"""What the loss functions of a loop give before its first step, against what they give of an answer that knows nothing.

The same call is made with an uninformed input: equal scores for all classes, even odds, zero or the mean of the
targets. Weights, smoothing, ignored labels, the number of negatives and the reduction are in both alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.loss.loss_at_init.unit_inputs import UnitInputs
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import DISTANCE_LOSSES, LOSSES
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Guess = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""Uninformed inputs, from the input and the target; the one with the larger loss counts."""

MOST = 16
"""Calls that are looked at, at most."""


@dataclass(frozen=True, slots=True)
class InitialLoss:
    """One call before the first step: ``chance`` is what an uninformed input gives (NaN where that is not known),
    ``degree`` how the loss grows with what goes in, ``below`` by how many standard errors the loss lies below the
    entropy of the labels."""

    name: str
    where: str
    value: float
    chance: float = math.nan
    degree: int = 1
    below: float = 0.0
    entropy: float = math.nan
    outputs: float = math.nan

    @property
    def times(self) -> float:
        """How many times chance the loss is; of a loss that grows with the square, the root of it."""
        if not (self.chance > 0 and self.value > 0):
            return math.nan
        return float((self.value / self.chance) ** (1 / self.degree))


class InitialLosses(WatchingMode):
    """To be used by ``contexts`` of a run that ends with the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[InitialLoss] = []

    def active(self) -> bool:
        """Until the first step has ended: the closure that it calls, or a checkpoint, may hold the loss."""
        return not (self.watch.quiet or self.watch.record.steps or len(self.seen) >= MOST)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if name not in LOSSES or getattr(F, name, None) is not func:
            return out
        if isinstance(out, torch.Tensor) and out.requires_grad:
            with self.watch.quietly(), torch.no_grad():
                self.seen.append(_judged(name, func, args, kwargs, out))
        return out


Which = Literal["all", "embeddings"]


class InitialRuns:
    """The calls of loss functions before the first step, in runs from changed weights; each run is made once."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._made: dict[tuple[float, Which, int], list[InitialLoss]] = {}

    def losses(self, scale: float = 1.0, of: Which = "all", other_seed: int = 0) -> list[InitialLoss]:
        """With some weights multiplied by ``scale``, under the seed plus ``other_seed``."""
        key = scale, of, other_seed
        if key not in self._made:
            found, seed = InitialLosses(), self._evidence.plan().seed + other_seed
            enough, prepare = (lambda r: r.rounds >= 1), scaled(scale, of)
            self._evidence.rerun(contexts=found.contexts, enough=enough, seed=seed, prepare=prepare)
            self._made[key] = found.seen
        return self._made[key]

    def losses_of_unit_inputs(self) -> tuple[list[InitialLoss], float]:
        """With inputs of unit size, and the root mean square that the largest of them had."""
        found, unit = InitialLosses(), UnitInputs()
        contexts = lambda watch: (*unit.contexts(watch), *found.contexts(watch))  # noqa: E731
        self._evidence.rerun(contexts=contexts, enough=lambda r: r.rounds >= 1)
        return found.seen, unit.largest


def scaled(factor: float, which: Which = "all") -> Callable[[Watch], None]:
    """Multiplies weight matrices and what else layers hold by this (not what a model keeps beside them, as a learned
    temperature), or tables of embeddings only."""

    def prepare(watch: Watch) -> None:
        tables = {id(m.weight) for _, m in watch.book.named_modules() if isinstance(m, nn.Embedding)}
        known = zip(watch.book.entries, watch.book.tensors, strict=True)
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


def _judged(name: str, func: Callable[..., Any], args: Any, kwargs: Any, out: torch.Tensor) -> InitialLoss:
    names = ("input", "target")
    given = [args[i] if len(args) > i else kwargs.get(n) for i, n in enumerate(names)]
    rest = args[2:], {k: v for k, v in kwargs.items() if k not in names}
    value = float(out.detach().double().mean())
    found = InitialLoss(name, str(here(3)[0]), value)
    guess = _GUESSES.get(name)
    answer, target = given
    if guess is None or not isinstance(answer, torch.Tensor) or not isinstance(target, torch.Tensor):
        return found
    if name in DISTANCE_LOSSES and target.requires_grad:
        if answer.requires_grad:
            return found  # both sides are the model's: what it would give by chance is not known
        answer, target = target, answer

    def at(uninformed: torch.Tensor) -> float:
        return float(func(uninformed, target, *rest[0], **rest[1]).detach().double().mean())

    chance = max(map(at, guess(answer, target)))
    below, entropy = _below(answer, target, rest) if name == "cross_entropy" else (0.0, math.nan)
    outputs = float(answer.detach().double().square().mean().sqrt())
    return InitialLoss(name, found.where, value, chance, 2 if name in _SQUARE else 1, below, entropy, outputs)


def _below(answer: torch.Tensor, target: torch.Tensor, rest: Any) -> tuple[float, float]:
    """By how many standard errors a cross entropy over plain class indices lies below the entropy of the labels."""
    kwargs = rest[1]
    if rest[0] or target.is_floating_point() or kwargs.get("weight") is not None or kwargs.get("label_smoothing"):
        return 0.0, math.nan
    ignored = kwargs.get("ignore_index", -100)
    each = F.cross_entropy(answer, target, ignore_index=ignored, reduction="none").double()[target != ignored]
    count = torch.bincount(target[target != ignored]).double()
    if len(each) < 16 or len(each) < 2 * int((count > 0).sum()):
        return 0.0, math.nan  # one label for each row: pairs are told apart, and look alike from the start
    share = count / len(each)
    entropy = float(-(share * share.clamp_min(1e-12).log()).sum())
    error = float(each.std()) / math.sqrt(len(each))
    return (entropy - float(each.mean())) / error if error > 0 else 0.0, entropy


def _zeros(answer: torch.Tensor, _target: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(answer)]


def _halves(answer: torch.Tensor, _target: torch.Tensor) -> list[torch.Tensor]:
    return [torch.full_like(answer, 0.5)]


def _log_uniform(axis: int) -> Guess:
    def guess(answer: torch.Tensor, _target: torch.Tensor) -> list[torch.Tensor]:
        size = answer.shape[axis if answer.dim() > axis else 0] if axis >= 0 else answer.shape[-1]
        return [torch.full_like(answer, -math.log(max(size, 1)))]

    return guess


def _constants(answer: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Zero, and the mean of the targets: a net that has learned nothing gives something near either."""
    return [torch.zeros_like(answer), torch.full_like(answer, float(target.double().mean()))]


_GUESSES: dict[str, Guess] = {
    **dict.fromkeys(("cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"), _zeros),
    **dict.fromkeys(("multi_margin_loss", "multilabel_soft_margin_loss"), _zeros),
    "binary_cross_entropy": _halves,
    "nll_loss": _log_uniform(1),
    "ctc_loss": _log_uniform(-1),
    **dict.fromkeys(DISTANCE_LOSSES, _constants),
}

_SQUARE = frozenset({"mse_loss"})
