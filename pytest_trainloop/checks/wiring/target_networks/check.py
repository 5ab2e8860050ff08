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
    1. ``copied_into_itself``: all writes of a line take values from the memory that they write to. Values put back must
       be older than the last change of the weights.
    2. ``average_dropped``: in three steps nothing reads or keeps the average of a trained and a resting weight.
    3. ``average_moves_away``: in three steps an average adds a multiple of its difference from a trained weight.
    4. ``target_rebound``: a line ran another network without gradients, and runs the trained one of its shape since a
       statement gave its name to that.
    5. ``target_left_behind``: of two copies of trained networks one follows, and the other never moves in 60 steps. Its
       results go into the first, or meet results of a network of its own shape.
    6. ``anchor_moves_along``: a penalty, or what is added to a gradient, holds the difference of a weight and an older
       tensor with its memory. ``w - w.detach()`` is silent.
    7. ``dropout_in_targets``: a network without training gives targets with dropout on. Without it the loss must
       change. Silent are networks switched by ``train()``, repeated rows, and copies that may be updated later.
    8. Passes before ``fit`` are tried in the same way: a fault if the trained model made them, else advice.
    9. An average that moves several times a step, with backward passes between, is advice:
       ``average_for_each_micro_batch``.
    10. ``statistics_left_behind``: an average's batch norm is evaluated with the followed network's first statistics.
       It is a fault if these are 0 and 1 and the file does not name ``update_bn``; else advice.

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
    A single target that is never brought up to date because a condition never holds looks like one whose turn has not
    come.
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
    from pytest_trainloop.checks.wiring.target_networks.target_forwards import TargetPasses
    from pytest_trainloop.checks.wiring.target_networks.writes import WeightWrites

    seen = evidence.shared(WeightWrites.of)
    anything = seen.writes or seen.averages or seen.differences or evidence.shared(TargetPasses.of).found
    return "" if anything else "no weights are copied, averaged or compared, and no network but the trained one is used"


LISTENER = "pytest_trainloop.checks.wiring.target_networks.writes:WeightWrites"


@check(needs={"run"}, causes=CAUSES, rank=45, listener=LISTENER, absent=_no_target_networks)
def target_networks(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.target_networks import findings, noise
    from pytest_trainloop.checks.wiring.target_networks.network_passes import target_left_behind, target_rebound
    from pytest_trainloop.checks.wiring.target_networks.statistics import statistics_left_behind
    from pytest_trainloop.checks.wiring.target_networks.writes import WeightWrites

    if not evidence.repeatable:
        raise CannotDecide("copies and targets are looked at in further runs: return a TrainLoop from a marked test")
    record, seen = evidence.run(), evidence.shared(WeightWrites.of)
    yield from findings.copied_into_itself(record, seen)
    yield from findings.average_dropped(record, seen)
    yield from findings.average_moves_away(record, seen)
    yield from findings.anchor_moves_along(record, seen)
    if seen.networks is not None:
        yield from target_rebound(seen.networks, frozenset(record.name(i) for i in record.held))
        written = {write.name: str(write.place) for write in seen.writes}
        yield from target_left_behind(evidence, record, seen.networks, written)
    yield from findings.average_for_each_micro_batch(record, seen)
    if seen.norms and any(write.average and write.of for write in seen.writes):
        yield from statistics_left_behind(evidence)
    yield from noise.noise_in_targets(evidence)
    yield from noise.noise_while_building(evidence)
