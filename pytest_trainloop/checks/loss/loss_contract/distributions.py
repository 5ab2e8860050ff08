"""Log-probabilities and entropies of ``torch.distributions``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.loss_contract.broadcasting import both_grow
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.tracing.provenance_queries import ancestors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import Call, Judgement
    from pytest_trainloop.losses.table.lookup import Known
    from pytest_trainloop.tracing.provenance import Node

_PARAMETERS = ("loc", "scale", "logits", "probs", "rate", "concentration", "df")
_NEAR = 12
"""Operations before a value in which an axis that was inserted on purpose is looked for."""


def asked_value(call: Call, known: Known, name: str) -> Iterator[Judgement]:
    """The value of ``log_prob``: of the shape of the batch and the event, or of fewer axes."""
    value, distribution = call.tensor(name), known.owner
    if value is None:
        return
    shape = tuple(distribution.batch_shape) + tuple(distribution.event_shape)
    grown = both_grow((tuple(value.shape), shape))
    meant = grown is not None and _meant(call, name)
    if grown is not None and _rows_against_rows(tuple(value.shape), shape) and (not meant or _all_alike(call)):
        yield call.judged(
            "broadcast",
            f"{call.name} is asked of values of shape {tuple(value.shape)}, and its distributions have {shape}: both "
            f"are broadcast to {grown}, every row with every other",
            measured=f"{math.prod(grown)} log-probabilities where {max(value.numel(), math.prod(shape))} are meant",
            shown_by="the shapes of the call; "
            + ("all of them count alike" if meant else "no axis was inserted on either side"),
            repair="squeeze(-1) the parameters, or unsqueeze(-1) the value, so that both have one shape",
        )
        return
    yield from _likelihood_minimised(call, name)


def _rows_against_rows(value: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether one is (N, 1) and the other (N,): the same rows."""
    return len(value) != len(shape) and math.prod(value) == math.prod(shape)


def _all_alike(call: Call) -> bool:
    """Whether all pairs have one weight in what is backpropagated: no pair is told from another."""
    flat = None if call.weights is None else call.weights.detach().reshape(-1)
    return flat is not None and flat.numel() > 1 and bool((flat != 0).all()) and bool((flat == flat[0]).all())


def _meant(call: Call, name: str) -> bool:
    """Whether an axis was inserted on the way to the value or to the parameters, as where all pairs are meant."""
    nodes = [call.node(name), *(call.node(f"parameter {p}") for p in _PARAMETERS)]
    return any(node is not None and any(_inserts(n) for n in ancestors(node, _NEAR)) for node in nodes)


def _inserts(node: Node) -> bool:
    if node.op in ("unsqueeze", "expand", "__getitem__", "view", "reshape") and node.parents:
        return len(node.shape) > len(node.parents[0].shape)
    return False


def _likelihood_minimised(call: Call, name: str) -> Iterator[Judgement]:
    """Log-probabilities of data, whose mean alone is minimised without a minus."""
    value = call.given.get(name)
    if call.root is None or call.weights is None or not isinstance(value, torch.Tensor) or value.requires_grad:
        return
    if not value.is_floating_point() or not _of_batch(call, value):
        return  # a sampled action may be made less likely
    weights, logs = call.weights.detach().double(), call.out.detach().double()
    if weights.shape != logs.shape or not bool((weights > 0).all()):
        return
    one = bool(((weights - weights.flatten()[0]).abs() <= 1e-6 * weights.flatten()[0].abs()).all())
    if one and abs(float((weights * logs).sum()) - call.root) <= 1e-4 * abs(call.root):
        yield call.judged(
            "sign_flipped",
            f"{call.name} of the data is minimised: what is backpropagated is the log-likelihood, not its negative",
            in_every_call=True,
            measured=f"log-likelihood {float(logs.mean()):.4g}, backpropagated {call.root:.4g}",
            shown_by="the gradient of what is backpropagated with respect to it, and their values: no other term is in "
            "it",
            repair="-log_prob(y).mean()",
        )


def _of_batch(call: Call, value: torch.Tensor) -> bool:
    """Whether these are numbers of the batch, and none that were sampled."""
    batch = () if call.tokens is None else tensors_in(call.tokens.batch)
    return any(t.numel() == value.numel() and bool((t.reshape(-1) == value.reshape(-1)).all()) for t in batch)


def _signed(call: Call) -> bool:
    """Whether log-probabilities of the same distribution are made larger in some rows and smaller in others."""
    logs = (c.weights for c in call.beside if c.name.endswith(".log_prob") and c.weights is not None)
    return any(bool((w > 0).any()) and bool((w < 0).any()) for w in logs)


def entropy_minimised(call: Call) -> Iterator[Judgement]:
    """An entropy of a policy that is made smaller: a bonus has a minus."""
    weights = call.weights
    if weights is None or call.root is None or not _signed(call):
        return
    if bool((weights > 0).all()):
        yield call.judged(
            "sign_flipped",
            f"{call.name} of the policy is minimised: a bonus for entropy is subtracted from the loss",
            in_every_call=True,
            measured=f"entropy {float(call.out.detach().double().mean()):.4g}, weight {float(weights.sum()):.3g}",
            shown_by="the gradient of what is backpropagated with respect to it is positive, and log-probabilities of "
            "the same distribution are weighted by advantages of both signs",
            repair="loss = policy_loss - coefficient * entropy.mean()",
        )
