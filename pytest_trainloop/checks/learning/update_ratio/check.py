"""Steps are as large as weights need them.

What it does
    On one fixed batch it measures by how much of its size a step moves each weight matrix, and at which learning rates.
    Where the batch is not learned, it tries other learning rates on fresh loops.

Why is this bad?
    A learning rate that is a thousand times too low looks like a hard problem: the loss falls a little, for weeks. One
    that is too high looks like a broken model.

How it decides
    1. Nine in ten small correct loops leave the textbook's band of 1e-4 to 1e-2, so it is not asked for.
    2. A loop whose one batch is halved, or whose loss still falls, passes. So does one whose schedule has ended, and
       one that writes weights or gradients itself.
    3. Otherwise learning rates are tried on fresh loops, 200 steps each. A finding needs one that learns the batch
       where the loop's own does not (docs/how-it-decides.md#update-sizes-and-the-loss-at-initialisation).
    4. Too low means: no measured step moves the weight matrices of a group by more than 2e-6 of their size. The loss
       falls by less than a twentieth in 300 steps, and plain Adam lowers it.
    5. Too high means: the loss ends above its start, or stops after steps as large as the weights.

    | first that holds | cause |
    |---|---|
    | the learning rate is 0 throughout | ``lr_too_low`` |
    | item 5, and a lower learning rate learns it | ``lr_too_high`` |
    | item 4, and a usual eps alone learns it (now above 1e-3) | ``eps_too_large`` |
    | item 4, a higher one learns it, and a LambdaLR's largest factor is the base rate | ``lambda_gives_the_lr`` |
    | item 4, and a learning rate higher by a power of ten learns it | ``lr_too_low`` |
    | pretrained weights train at a random head's learning rate (advice) | ``same_lr_for_pretrained_and_new`` |

When it is skipped
    It skips loops without one loss, learning rates that still rise after 300 steps, and a batch that plain Adam does
    not learn. It skips a batch if an earlier check explains it.

Faulty
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 1e-7                                            # tuned at another scale
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> for group in optimizer.param_groups:
    ...     group["lr"] = 0.1
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    A single batch shows when nothing happens and when everything breaks, not which learning rate is best. One that fits
    pretrained weights is low for weights that are not.

References
    https://arxiv.org/abs/1506.01186
    https://cs231n.github.io/neural-networks-3/#ratio
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.update_ratio.causes import CAUSES, found
from pytest_trainloop.core.errors import BrokenRun, CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pytest_trainloop.checks.learning.one_batch import OneBatch
    from pytest_trainloop.checks.learning.remedies import Remedy
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.projection import Projected


@check(needs={"run"}, causes=CAUSES, rank=10, steps=100, long=True)
def update_ratio(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.one_batch import OneBatchRuns
    from pytest_trainloop.checks.learning.outcome import learning, require_a_curve, single_loss
    from pytest_trainloop.checks.learning.remedies import higher, lower, undecayed, usual_eps
    from pytest_trainloop.instruments.records.clips import clipped_to
    from pytest_trainloop.instruments.tracing.made_at import MadeAt

    yield from _same_lr(evidence)
    single_loss(evidence.run())
    batch = evidence.shared(OneBatchRuns).of()
    if batch.curve.halved or batch.going:
        return
    require_a_curve(batch.curve)
    if behind := evidence.root_causes("update_ratio"):
        raise CannotDecide(f"{behind[0].check} finds {behind[0].cause}, which explains that the batch is not learned")
    learned = learning(batch)
    if learned.hopeless:
        raise CannotDecide("plain Adam does not lower the loss either; give a batch that the model can learn by heart")
    if learned.assigns or learned.learned or learned.astray or learned.decayed or batch.ratios.undone:
        return
    if learned.nowhere and undecayed(batch, learned) is not None:
        return
    line, clip = batch.seen.step_line(), clipped_to(batch.seen)
    facts = asdict(learned) | {"sizes": _sizes(batch), "lr": max(batch.curve.lrs)}
    if learned.peak == 0:
        made = found("lr_too_low", line, ("lr",), "rate 0", **facts)
        yield replace(made, change=evidence.shared(MadeAt.of).scheduler() or _written_by_hand(evidence))
    elif learned.too_far:
        if (helped := lower(batch, learned)) is not None:
            facts |= _helped(helped)
            made = found("lr_too_high", line, ("lr",), "lowered", **facts, rises=learned.diverged)
            yield replace(made, change=_written_by_hand(evidence))
    elif learned.too_small and not (clip is not None and clip.starves):
        if (eps := usual_eps(batch, learned)) is not None:
            yield found("eps_too_large", line, ("eps",), "usual", **facts, eps=eps[0], learned_in=eps[1])
        elif (helped := higher(batch, learned)) is not None:
            facts |= _helped(helped)
            if given := _lr_as_factor(evidence):
                projected, base, peak = given
                made = found("lambda_gives_the_lr", projected.place, ("lr",), **facts | {"base": base, "peak": peak})
                yield replace(made, change=projected.made_at)
            else:
                yield found("lr_too_low", line, ("lr",), "raised", **facts)


def _same_lr(evidence: Evidence) -> Iterator[Finding]:
    """Advice where a pretrained trunk and a randomly initialised head train at one learning rate."""
    from pytest_trainloop.runs.weight_origins import weight_origins

    record, origins = evidence.run(), evidence.shared(weight_origins)
    steps = {step.optimizer: step for step in reversed(record.innermost_steps())}
    lrs: dict[str, dict[float, list[str]]] = {"pretrained": {}, "random": {}}
    for optimizer in record.optimizers:
        groups = steps[optimizer.index].lrs if optimizer.index in steps else ()
        for index, group in zip(optimizer.parameters, optimizer.groups, strict=True):
            name = record.name(index)
            if name in origins and group < len(groups):
                lrs[origins[name]].setdefault(groups[group], []).append(name)
    both = lrs["pretrained"].keys() | lrs["random"].keys()
    if len(both) != 1 or not lrs["pretrained"] or not lrs["random"]:
        return
    lr = next(iter(both))
    pretrained, new = len(lrs["pretrained"][lr]), lrs["random"][lr]
    if pretrained > len(new):
        yield found("same_lr_for_pretrained_and_new", "", new, pretrained=pretrained, lr=lr, level="advice")


def _sizes(batch: OneBatch) -> str:
    groups = sorted({(r.optimizer, r.group) for r in batch.ratios.seen})
    return ", ".join(
        f"{max(r.ratio for r in batch.ratios.seen if (r.optimizer, r.group) == at):.1e}"
        + (f" in group {at[1]}" if len(groups) > 1 else "")
        for at in groups[:4]
    )


def _helped(helped: Remedy) -> dict[str, Any]:
    low, high = helped.band
    return {
        "factor": helped.factor,
        "learned_in": helped.steps,
        "low": low,
        "high": high,
        "several": high > low,
    }


def _written_by_hand(evidence: Evidence) -> str:
    """The line of the loop that writes the rates, where one moves them; else empty."""
    from pytest_trainloop.instruments.records.learning_rates import lrs

    if not any("hand" in group.movers for group in lrs(evidence.run())):
        return ""
    from pytest_trainloop.instruments.tracing.lr_writes import LRWrites

    return evidence.shared(LRWrites.of).line()


def _lr_as_factor(evidence: Evidence) -> tuple[Projected, float, float] | None:
    """The schedule of a LambdaLR whose largest factor equals the base rate of its group and is not 1, with that rate
    and the largest product of the two."""
    from pytest_trainloop.runs.projection import Projections

    with contextlib.suppress(CannotDecide, BrokenRun):
        optimizers = evidence.run().optimizers
        for projected in evidence.shared(Projections.of).schedulers:
            if "LambdaLR" not in projected.kind or projected.optimizer >= len(optimizers):
                continue
            bases = optimizers[projected.optimizer].peak_lrs
            for group, base in enumerate(bases[: len(projected.curve.lrs[0])]):
                peak = max(projected.curve.group(group))
                if base > 0 and base != 1 and math.isclose(peak, base * base, rel_tol=1e-6):
                    return projected, base, peak
    return None
