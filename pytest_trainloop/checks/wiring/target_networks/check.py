"""Target networks have weights of their own, and give targets without noise.

What it does
    It notes what user code copies into weights, what it averages and what it compares with them. It finds networks that
    no step moves and whose results are targets, and looks at their mode. It builds the loop once more, to see dropout
    in what is computed before ``fit``. Where averages and batch norms meet, one more run looks at their statistics.

Why is this bad?
    A target network that is the online network, best weights that move along and an average that is thrown away raise
    nothing: the code that prevents a divergence or keeps the best model is there, and does nothing. A teacher with
    dropout gives another target for the same example at each call.

How it decides
    Copied into itself: all writes of a line take their values from the memory that they write to. Values that are put
    back, which were taken before the weights changed last, are a fault at once; so are those of a line that took others
    in an earlier step, which were kept until now. An update of a network is one if it does so in two steps. A network
    that shares only some of its layers is none.
    Average dropped: the average of each weight that trains and of one that never moves is computed in three steps or
    more, no call of torch reads it, and nothing keeps it.
    Average moves away: in three steps or more a tensor that no optimizer holds becomes itself and a multiple of
    its difference from a weight that trains. Each such update multiplies that difference by a number above 1.
    Anchor moves along: a penalty, or what is added to a gradient, holds the difference of a weight and of a tensor with
    the same memory that was there before. Silent is ``w - w.detach()``, which has a slope.
    Dropout in targets: no parameter of a network trains or moves, its results have no history, and nothing that is made
    of them meets a weight that trains. Its passes are made again with dropout off, the draws after them the same: what
    is backpropagated must change. Silent are a network on which train() was called by name, one that is given the same
    rows several times (samples), and a copy of what trains that the code may bring up to date later.
    Before ``fit`` dropout in passes without gradients is replaced by what it was given. With the same weights at the
    start the loop must then backpropagate something else. It is a fault where the model that trains made the pass, else
    advice.
    An average that moves several times a step, with a backward pass in between, is advice.
    Statistics left behind: after three updates of an average a batch norm of it is called in evaluation mode, inside
    ``fit`` or in the declared ``evaluate``. Its statistics are, bit for bit, those that the network it follows began
    with, and that one has left them. It is a fault where these are 0 and 1, as a batch norm is made. It is advice where
    they are others, or where the file names ``update_bn``, which may be called behind the loop.
    Silent are averages in training mode (momentum encoders), shared or copied buffers, and ``update_bn``.

Faulty
    >>> start = list(model.parameters())
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     pull = sum((p - q).square().sum() for p, q in zip(model.parameters(), start))
    ...     (F.cross_entropy(model(x), y) + 0.1 * pull).backward()
    ...     optimizer.step()

Fixed
    >>> start = [p.detach().clone() for p in model.parameters()]
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     pull = sum((p - q).square().sum() for p, q in zip(model.parameters(), start))
    ...     (F.cross_entropy(model(x), y) + 0.1 * pull).backward()
    ...     optimizer.step()

Known limits
    A target that is never brought up to date because a condition never holds looks like one whose turn has not come.
    An average that starts from zeros is not looked at: in a long training it forgets them. Best weights that are the
    only ones of the run look right. Of recurrent layers that draw dropout before ``fit`` nothing is known.

References
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html (state_dict() returns references)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.target_networks.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


def _no_target_networks(evidence: Evidence) -> str:
    from pytest_trainloop.checks.wiring.target_networks.passes import TargetPasses
    from pytest_trainloop.checks.wiring.target_networks.writes import WeightWrites

    seen = evidence.shared(WeightWrites.of)
    anything = seen.writes or seen.averages or seen.differences or evidence.shared(TargetPasses.of).found
    return "" if anything else "no weights are copied, averaged or compared, and no network but the trained one is used"


@check(needs={"run"}, causes=CAUSES, rank=45, absent=_no_target_networks)
def target_networks(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.target_networks import findings, noise
    from pytest_trainloop.checks.wiring.target_networks.statistics import statistics_left_behind
    from pytest_trainloop.checks.wiring.target_networks.writes import WeightWrites

    if not evidence.repeatable:
        raise CannotDecide("copies and targets are looked at in further runs: return a TrainLoop from a marked test")
    record, seen = evidence.run(), evidence.shared(WeightWrites.of)
    yield from findings.copied_into_itself(record, seen)
    yield from findings.average_dropped(record, seen)
    yield from findings.average_moves_away(record, seen)
    yield from findings.anchor_moves_along(record, seen)
    yield from findings.average_for_each_micro_batch(record, seen)
    if seen.norms and any(write.average and write.of for write in seen.writes):
        yield from statistics_left_behind(evidence)
    yield from noise.noise_in_targets(evidence)
    yield from noise.noise_while_building(evidence)
