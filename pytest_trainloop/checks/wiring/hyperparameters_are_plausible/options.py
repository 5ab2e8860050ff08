"""Options of modules and optimizers that no recipe has, by what they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import Optimizer

from pytest_trainloop import members
from pytest_trainloop.checks.wiring.hyperparameters_are_plausible.causes import found
from pytest_trainloop.recording.torch_internals import DROPOUT_MODULES, NORM_MODULES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

MOST_EPS = 1e-2
"""Ten times the eps of the published models with the largest (1e-3: Inception, EfficientNet, YOLO)."""

LEAST_KERAS_MOMENTUM = 0.9
"""Momenta of batch norms by Keras' convention begin here; by torch's they end at 0.5 (PointNet's first epochs)."""

MOST_DECAY = 0.01
"""Weight decays of SGD end here, and momenta begin at 0.5."""

Noted = tuple[str, dict[str, Any], str]
"""A cause, the facts of its texts, and a repair of the finding's own."""


def of_modules(loop: TrainLoop, training: Collection[str]) -> Iterator[Finding]:
    """One finding for all modules that have one option at one value; ``training``: the paths of modules that were
    called in training mode."""
    alike: dict[str, tuple[Noted, list[str]]] = {}
    for prefix, root in loop.modules.items():
        for path, module in members.named_modules(root, prefix):
            on = path in training
            if (noted := _norm(module, training=on) or _other(module, training=on)) is not None:
                alike.setdefault(repr(noted), (noted, []))[1].append(path or type(module).__name__)
    for (cause, facts, repair), paths in alike.values():
        yield found(cause, "", paths, level="advice", number=len(paths), repair=repair, **facts)


def _norm(module: nn.Module, *, training: bool) -> Noted | None:
    if not isinstance(module, (NORM_MODULES, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return None
    eps, momentum = _number(module, "eps"), _number(module, "momentum")
    if eps is not None and eps > MOST_EPS:
        repair = "eps=1e-5"
        if momentum is not None:
            repair = f"eps is the second argument of {type(module).__name__}, momentum the third: give both by name"
            repair += f"; Keras' momentum={eps:g} is momentum={1 - eps:g} here" if 0.5 < eps < 1 else ""
        facts = {"value": eps, "one": 1 / math.sqrt(1 + eps), "little": 0.1 / math.sqrt(0.01 + eps)}
        return "norm_eps_too_large", facts, repair
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if not training or momentum is None or mean is None or variance is None or nn.parameter.is_lazy(mean):
        return None
    if momentum >= LEAST_KERAS_MOMENTUM:
        less = 1 - momentum or 0.1
        facts = {"value": momentum, "old": 1 - momentum}
        return "statistics_of_the_last_batch", facts, f"momentum={less:g}: torch's is 1 - that of Keras or TensorFlow"
    # as a freeze, with the statistics of a checkpoint (odd: pretrained_statistics_held_by_momentum_zero)
    if momentum == 0 and not mean.any() and bool((variance == 1).all()):
        return "statistics_never_move", {}, ""
    return None


def _other(module: nn.Module, *, training: bool) -> Noted | None:
    if isinstance(module, DROPOUT_MODULES) and training and _number(module, "p") == 1:
        return "dropout_passes_nothing", {}, ""
    if isinstance(module, nn.LeakyReLU) and _number(module, "negative_slope") == 1:
        return "leaky_relu_is_the_identity", {"given": str(module.negative_slope)}, ""
    return None


def _number(module: nn.Module, name: str) -> float | None:
    """An option that is a number; True is 1 here, as it is in torch's kernels."""
    value = getattr(module, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def of_optimizers(loop: TrainLoop, evidence: Evidence) -> Iterator[Finding]:
    """A number of the size of a weight decay in the place of one that is near 1."""
    from pytest_trainloop.tracing.made_at import MadeAt

    for number, optimizer in enumerate(loop.optimizers):
        # as it was built: a schedule may move those of the groups (odd: momentum_is_warmed_up)
        given = optimizer.defaults if isinstance(optimizer, Optimizer) else {}
        if "dampening" not in given or any(group.get("weight_decay") for group in optimizer.param_groups):
            continue
        options = ((name, given.get(name)) for name in ("momentum", "dampening"))
        misplaced = next(((n, v) for n, v in options if isinstance(v, float) and 0 < v <= MOST_DECAY), None)
        if misplaced is not None:
            name, value = misplaced
            facts = {"option": name, "value": value, "kind": type(optimizer).__name__, "lr": given.get("lr", 0)}
            facts["repair"] = (
                f"give it by name: weight_decay={value:g}; in order: lr, momentum, dampening, weight_decay"
            )
            facts["change"] = evidence.shared(MadeAt.of).optimizer(number)
            yield found("weight_decay_given_as_momentum", "", (name,), level="advice", **facts)
