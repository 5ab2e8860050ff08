"""Losses of policies and of values: PPO's clipped objective, gradients of policies, bootstrapped targets."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.form import Argument, Form, Mistake, Variant, one_part
from pytest_trainloop.instruments.formulas.trial import Aim
from pytest_trainloop.recording.torch_names import ADDITIONS, CLAMPS, DISTANCE_LOSSES, MULTIPLICATIONS, SUBTRACTIONS

if TYPE_CHECKING:
    from pytest_trainloop.instruments.formulas.cut import Cut
    from pytest_trainloop.instruments.tracing.loss_slice import Slice, Value

_EXTREMES = frozenset({"min", "max", "minimum", "maximum"})
_LOGARITHMS = frozenset({"log_softmax", "logsumexp", "log", "logsigmoid", "log_sigmoid"})
_REDUCTIONS = frozenset({"mean", "sum", "mse_loss", "smooth_l1_loss", "huber_loss"})
_REGRESSIONS = DISTANCE_LOSSES | SUBTRACTIONS


def _fit(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> bool:
    """Whether an advantage is given for each log-probability, or one for all of a row's tokens."""
    one_a_row = advantage.shape == (*new.shape[:-1], 1)
    return new.shape == old.shape and (advantage.shape == new.shape or (new.dim() > 1 and one_a_row))


def _clipped(
    new: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    *,
    low: float,
    high: float,
    turned: bool = False,
    largest: bool = False,
) -> torch.Tensor | None:
    if not _fit(new, old, advantage) or not low < high:
        return None
    ratio = (old - new if turned else new - old).exp()
    both = ratio * advantage, ratio.clamp(low, high) * advantage
    return torch.max(*both) if largest else torch.min(*both)


def _lowered(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, *, low: float, high: float
) -> torch.Tensor | None:
    """The textbook's cost; bounds around 0 are taken to be around 1."""
    middle = 0.0 if low > 0 else 1.0
    made = _clipped(new, old, advantage, low=middle + low, high=middle + high)
    return None if made is None else -made


def _past_bounds(
    new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    ratio = (new - old).exp()
    return torch.where(advantage > 0, (ratio - high).relu(), (low - ratio).relu())


def _of_gains(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, **_: float) -> torch.Tensor:
    return (new - old).exp()[(advantage > 0).expand_as(new)]


def _surrogate(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, **_: float) -> torch.Tensor:
    return (new - old).exp() * advantage


_FURTHER = Aim("how far ratios are outside of their bounds", _past_bounds, book=_lowered)
_LIKELIER = Aim("the probability ratio of what has an advantage", _of_gains, rises=True, book=_lowered)
_GAINS = Aim("the mean of probability ratio times advantage", _surrogate, rises=True, book=_lowered)


_OBJECTIVE = "loss = -torch.min(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage).mean()"
_LARGEST = Mistake(
    "extreme_turned",
    "the larger of both products is raised: a ratio that left its bounds goes on moving",
    f"{_OBJECTIVE}; with the minus inside it is torch.max(-advantage * ratio, ...)",
)
_TURNED = Mistake(
    "turned_round",
    "the ratio is the old probability over the new one: what has an advantage is made less likely",
    "ratio = (new_log_prob - old_log_prob).exp()",
    at=SUBTRACTIONS,
    shifted=True,
)
_AROUND_ZERO = Mistake(
    "ingredient_differs",
    "the ratio is clipped to bounds around 0, and no ratio lies there",
    "ratio.clamp(1 - eps, 1 + eps)",
)


def _around_one(name: str, number: float) -> bool:
    return 0 < number < 1 if name == "low" else 1 < number < 10


def _objective(variants: tuple[Variant, ...], low: float, high: float, among: object = None) -> Form:
    return Form(
        "the clipped objective of a policy (PPO)",
        "https://arxiv.org/abs/1707.06347",
        (
            Argument("new", learned=True),
            Argument("old", learned=False),
            Argument("advantage", learned=False),
        ),
        variants,
        ops=_EXTREMES,
        needs=(_EXTREMES, CLAMPS),
        numbers={"low": (low,), "high": (high,)},
        among=_around_one if among is None else (lambda name, number: number < 0 if name == "low" else 0 < number < 1),
        suits=lambda cut: _fit(*cut.recorded),
        always_judged=True,
    )


CLIPPED = _objective(
    (
        one_part(_clipped, rises=True),
        one_part(functools.partial(_clipped, largest=True), worse=_LARGEST, aim=_FURTHER),
        one_part(functools.partial(_clipped, turned=True), _TURNED, rises=True, aim=_GAINS),
    ),
    0.8,
    1.2,
)
AROUND_ZERO = _objective(
    (one_part(_clipped, _AROUND_ZERO, rises=True, aim=_LIKELIER),),
    -0.2,
    0.2,
    among="zero",
)


def _readers(found: Slice, number: int) -> list[tuple[str, list[Value]]]:
    """The calls that read a value, past reshapes, and what else they read."""
    read: list[tuple[str, list[Value]]] = []
    todo, seen = [number], {number}
    while todo:
        at = todo.pop()
        for call in found.calls:
            if at not in call.inputs:
                continue
            others = [found.values[n] for n in call.inputs if n != at]
            if len(call.inputs) == 1 and call.outputs and call.outputs[0] not in seen:
                seen.add(call.outputs[0])
                todo.append(call.outputs[0])
            read.append((call.name, others))
    return read


def _layers(found: Slice, number: int) -> set[str]:
    return {name for v in found.trained(number) for name in v.parameters}


def _bootstraps(cut: Cut) -> bool:
    """Whether the value is the target of what the same layers gave, with no way back to it otherwise."""
    found = cut.slice
    following, reward = cut.arguments[:2]
    if cut.recorded[0].shape != cut.recorded[1].shape or not found.from_batch(reward):
        return False
    mine = _layers(found, following)
    for name, others in _readers(found, cut.number):
        for other in others:
            if name in _REGRESSIONS and other.requires_grad and other.tensor.numel() == cut.value.numel():
                independent = not found.depends(other.number, reward) and not found.depends(other.number, following)
                if independent and mine and mine == _layers(found, other.number):
                    return True
    return False


def _best_following(cut: Cut) -> bool:
    """Whether what follows is the best of several values."""
    found = cut.slice
    names = {c.name for n in found.ancestors(cut.arguments[0]) if (c := found.call_of(n)) is not None}
    return bool(names & {"max", "amax", "maximum"}) and _bootstraps(cut)


def _target(following: torch.Tensor, reward: torch.Tensor, *, gamma: float) -> torch.Tensor | None:
    return reward + gamma * following if 0 < gamma < 1 else None


def _target_with_ends(
    following: torch.Tensor, reward: torch.Tensor, ends: torch.Tensor, *, gamma: float, mask: bool
) -> torch.Tensor | None:
    if ends.shape != reward.shape or not 0 < gamma < 1:
        return None
    ends = ends.to(reward.dtype)
    return reward + gamma * following * (ends if mask else 1 - ends)


_WITH_GRADIENT = Mistake(
    "target_with_gradient",
    "it is the reward plus what the same network gives for the next state, and has a gradient: the step moves it "
    "towards the prediction as well",
    "add .detach() to the target, or compute it under no_grad(): reward + gamma * (1 - done) * ...",
    shown_by="the target equals the textbook form, and a gradient flows through it",
)
_MAY_BE_INTENDED = Mistake(
    "target_with_gradient",
    _WITH_GRADIENT.summary,
    "add .detach() to the target, or compute it under no_grad()",
    shown_by=_WITH_GRADIENT.shown_by,
    level="advice",
)


_TARGET_MOVES = Aim("the target", lambda *_: None, moves=True)


def _bootstrapped(name: str, mistake: Mistake, *, best: bool, ends: bool) -> Form:
    given = (Argument("following", learned=True), Argument("reward", learned=False))
    with_ends = (*given, Argument("ends", "labels", learned=False))
    if ends:
        variants = tuple(
            one_part(functools.partial(_target_with_ends, mask=mask), mistake, aim=_TARGET_MOVES)
            for mask in (False, True)
        )
    else:
        variants = (one_part(_target, mistake, aim=_TARGET_MOVES),)
    return Form(
        name,
        "http://incompleteideas.net/book/the-book-2nd.html",
        with_ends if ends else given,
        variants,
        ops=ADDITIONS,
        needs=(MULTIPLICATIONS,),
        numbers={"gamma": (0.99,)},
        among=lambda _name, number: 0 < number < 1,
        suits=_best_following if best else _bootstraps,
        judges_direction=False,
    )


_NAME = "a bootstrapped target"
TARGETS = (
    _bootstrapped(_NAME, _WITH_GRADIENT, best=True, ends=False),
    _bootstrapped(_NAME, _WITH_GRADIENT, best=True, ends=True),
    _bootstrapped(_NAME, _WITH_GRADIENT, best=False, ends=True),
    _bootstrapped(_NAME, _MAY_BE_INTENDED, best=False, ends=False),
)


def _advantage_of_a_trained_critic(cut: Cut) -> bool:
    """Whether the second argument is a return less what a critic gave, the first a log-probability of another layer,
    and the same value trains the critic by another term: it steps with the policy's gradient too."""
    found = cut.slice
    log_prob, advantage = cut.arguments
    made = found.call_of(advantage)
    if made is None or made.name not in SUBTRACTIONS or cut.recorded[0].shape != cut.recorded[1].shape:
        return False
    names = {c.name for n in found.ancestors(log_prob) if (c := found.call_of(n)) is not None}
    critic = {v.number for v in found.trained(advantage)}
    policy = {v.number for v in found.trained(log_prob)}
    if not names & _LOGARITHMS or not critic or critic & policy:
        return False
    for n in found.ancestors(found.root) - {cut.number}:
        call, behind = found.call_of(n), found.ancestors(n)
        independent = bool(critic & behind) and not policy & behind and not found.depends(cut.number, n)
        if call is not None and call.name in _REDUCTIONS and found.values[n].requires_grad and independent:
            return True
    return False


_LEARNED_ADVANTAGE = Mistake(
    "target_with_gradient",
    "the advantage has a gradient: the policy's term pulls the critic's values away from the returns",
    "loss = -(log_prob * (returns - values).detach()).mean()",
    shifted=True,
    shown_by="the term equals the textbook form, and a gradient flows through its advantage",
)
GRADIENT = Form(
    "the gradient of a policy with a critic",
    "http://incompleteideas.net/book/the-book-2nd.html",
    (Argument("log_prob", learned=True), Argument("advantage", learned=True)),
    (
        one_part(
            lambda log_prob, advantage: log_prob * advantage if log_prob.shape == advantage.shape else None,
            _LEARNED_ADVANTAGE,
            rises=True,
            aim=Aim("the critic's squared error", lambda _, advantage: advantage.square(), held=(0,)),
        ),
    ),
    ops=MULTIPLICATIONS,
    needs=(MULTIPLICATIONS,),
    suits=_advantage_of_a_trained_critic,
    judges_direction=False,
)

FORMS = (CLIPPED, AROUND_ZERO, *TARGETS, GRADIENT)
