"""Options of modules and optimizers that no recipe has, by what they are."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer

from pytest_trainloop.checks.wiring.hyperparameters_are_plausible.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.torch_internals import DROPOUT_MODULES, NORM_MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST_EPS = 1e-2
"""Ten times the eps of the published models with the largest (1e-3: Inception, EfficientNet, YOLO)."""

LEAST_KERAS_MOMENTUM = 0.9
"""Momenta of batch norms by Keras' convention begin here; by torch's they end at 0.5 (PointNet's first epochs)."""

MOST_DECAY = 0.01
"""Weight decays of SGD end here, and momenta begin at 0.5."""


class Noted(NamedTuple):
    """What is to be said of one option."""

    cause: str
    facts: dict[str, Any]
    repair: str = ""
    in_training: bool = False
    """Whether it has an effect in training mode only."""


class BuiltOptions:
    """Those of a loop that is built and not run, or of the run that is observed."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, Noted]] = []
        self._optimizers: list[tuple[int, Noted]] = []

    @classmethod
    def of(cls, evidence: Evidence) -> BuiltOptions:
        noted, loop = cls(), evidence.fresh_loop()
        for prefix, root in loop.modules.items():
            noted._note(members.named_modules(root, prefix), ())
        noted._note((), enumerate(loop.optimizers))
        return noted

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What ``observe()`` opens."""
        return (self._reading(watch),)

    @contextlib.contextmanager
    def _reading(self, watch: Watch) -> Iterator[None]:
        try:
            yield
        finally:
            self._note(watch.table.named_modules(), watch.optimizers.indexed())

    def _note(self, modules: Iterable[tuple[str, nn.Module]], optimizers: Iterable[tuple[int, Any]]) -> None:
        for path, module in modules:
            self._modules += [(path or type(module).__name__, noted) for noted in (*_norm(module), *_other(module))]
        for number, optimizer in optimizers:
            self._optimizers += [(number, noted) for noted in _misplaced(optimizer)]

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """One for all modules that have one option at one value, and one for each optimizer."""
        training = {path for forward in evidence.run().root_forwards() for path in forward.in_training}
        by_text: dict[str, tuple[Noted, list[str]]] = {}
        for path, noted in self._modules:
            if path in training or not noted.in_training:
                by_text.setdefault(repr(noted), (noted, []))[1].append(path)
        for (cause, facts, repair, _), paths in by_text.values():
            yield found(cause, "", paths, level="advice", number=len(paths), repair=repair, **facts)
        for number, (cause, facts, repair, _) in self._optimizers:
            line = evidence.shared(MadeAt.of).optimizer(number)
            yield found(cause, "", (facts["option"],), level="advice", repair=repair, change=line, **facts)


def _norm(module: nn.Module) -> Iterator[Noted]:
    if not isinstance(module, (NORM_MODULES, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return
    eps, momentum = _number(module, "eps"), _number(module, "momentum")
    if eps is not None and eps > MOST_EPS:
        repair = "eps=1e-5"
        if momentum is not None:
            repair = f"eps is the second argument of {type(module).__name__}, momentum the third: give both by name"
            repair += f"; Keras' momentum={eps:g} is momentum={1 - eps:g} here" if 0.5 < eps < 1 else ""
        facts = {"value": eps, "one": 1 / math.sqrt(1 + eps), "little": 0.1 / math.sqrt(0.01 + eps)}
        yield Noted("norm_eps_too_large", facts, repair)
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if momentum is None or mean is None or variance is None or nn.parameter.is_lazy(mean):
        return
    if momentum >= LEAST_KERAS_MOMENTUM:
        repair = f"momentum={1 - momentum or 0.1:g}: torch's is 1 - that of Keras or TensorFlow"
        facts = {"value": momentum, "old": 1 - momentum}
        yield Noted("statistics_of_the_last_batch", facts, repair, in_training=True)
    # as a freeze, with the statistics of a checkpoint (odd: pretrained_statistics_held_by_momentum_zero)
    elif momentum == 0 and not mean.any() and bool((variance == 1).all()):
        yield Noted("statistics_never_move", {}, in_training=True)


def _other(module: nn.Module) -> Iterator[Noted]:
    inside = isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
    option = "p" if isinstance(module, DROPOUT_MODULES) else "dropout" if inside else ""
    if _number(module, option) == 1:
        yield Noted("dropout_passes_nothing", {"option": option}, in_training=True)
    if isinstance(module, nn.LeakyReLU) and _number(module, "negative_slope") == 1:
        yield Noted("leaky_relu_is_the_identity", {"given": str(module.negative_slope)})


def _number(module: nn.Module, name: str) -> float | None:
    """An option that is a number; True is 1 here, as it is in torch's kernels."""
    value = getattr(module, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _misplaced(optimizer: Any) -> Iterator[Noted]:
    """A number of the size of a weight decay in the place of one that is near 1."""
    # as it was built: a schedule may move those of the groups (odd: momentum_is_warmed_up)
    given = optimizer.defaults if isinstance(optimizer, Optimizer) else {}
    if "dampening" not in given or any(group.get("weight_decay") for group in optimizer.param_groups):
        return
    for name in ("momentum", "dampening"):
        value = given.get(name)
        if isinstance(value, float) and 0 < value <= MOST_DECAY:
            facts = {"option": name, "value": value, "kind": type(optimizer).__name__, "lr": given.get("lr", 0)}
            repair = f"give it by name: weight_decay={value:g}; in order: lr, momentum, dampening, weight_decay"
            yield Noted("weight_decay_given_as_momentum", facts, repair)
            return
