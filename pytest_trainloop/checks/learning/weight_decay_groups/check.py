"""Weight decay applies to the weights that should decay.

What it does
    It looks at which weights each group of an optimizer decays: matrices, gains of norms, biases, tables of embeddings.
    Where a filter divides them, it asks whether the filter finds what it is written for.

Why is this bad?
    ``no_decay = ["bias", "LayerNorm.weight"]`` keeps nothing from decay in a model whose norms are named ``ln_1``. No
    error says so: the gains are pulled towards zero for the whole run.

How it decides
    1. To decay everything is right in many recipes. So a filter is accused only if an experiment shows that it is for
       these weights (docs/how-it-decides.md#what-a-decay-filter-is-for).
    2. The loop is built again, for one step, and the filter gets the answer "yes" for just the weights of a kind that
       all decay. They must then lie in a group without decay. The optimizer must keep other weights from decay already.
    3. Tried are patterns that no name has (``in``, ``startswith``, ``endswith``, ``==``), names with a usual segment
       put in ("ln_1.LayerNorm.weight"), and names without their first segments. Tried are also
       ``isinstance(module, nn.LayerNorm)`` for the project's own class, and a module's ``no_weight_decay()``.
    4. A list of spellings of which one matches, and a filter for learning rates, do not pass this experiment.
    5. Groups are swapped only in a model that trains as a whole. The last weight of a group is found by steps of the
       project's own optimizer with weight_decay 0 and 1. A line must read a loop's variable after the loop.

    | seen | cause | advice if |
    |---|---|---|
    | a filter matches none of a kind, or only some | ``filter_matches_nothing``, ``filter_misses_some`` |
      a different norm's name |
    | norms and biases decay, no matrix does | ``groups_swapped`` |  |
    | the vectors' group gives no decay and differs in nothing else | ``decays_by_default`` |  |
    | groups for the optimizer are made, and no code reads them | ``groups_not_given`` |  |
    | two groups decay equally | ``split_without_effect`` | always |
    | ``steps=`` shows 5 % shrinkage, or some group does not decay | ``norms_and_biases_decay`` | always |
    | Adam adds the decay to the gradient | ``decay_inside_adam`` | always |
    | momentum and decay have each other's size | ``momentum_and_decay_swapped`` |  |
    | lr * weight_decay is above 1 | ``decay_turns_weights_over`` |  |
    | decay 0 and 1 differ at a group's last weight only | ``decay_on_last_only`` |  |
    | a term of the loss shrinks the weights too | ``decayed_twice`` | always |
    | nothing reads a key like ``wd`` or ``decay_mult`` | ``option_nobody_reads`` | ``fit`` makes no epoch |

When it is skipped
    It skips a loop without weight decay.

Faulty
    >>> no_decay = ("bias", "BatchNorm.weight")                              # the model calls it encoder.1
    >>> kept = [p for n, p in model.named_parameters() if n.endswith(no_decay)]
    >>> decayed = [p for n, p in model.named_parameters() if not n.endswith(no_decay)]
    >>> groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
    >>> optimizer = torch.optim.AdamW(groups, lr=0.01)

Fixed
    >>> kept = [p for p in model.parameters() if p.dim() < 2]
    >>> decayed = [p for p in model.parameters() if p.dim() > 1]
    >>> groups = [{"params": decayed, "weight_decay": 0.01}, {"params": kept, "weight_decay": 0.0}]
    >>> optimizer = torch.optim.AdamW(groups, lr=0.01)

Known limits
    Decay that a loop writes by hand is not seen. A filter by ``type(module)`` is not tried, nor one that reads names
    from ``named_modules()`` or ``state_dict()``.

References
    https://arxiv.org/abs/1711.05101
    https://github.com/karpathy/minGPT (configure_optimizers)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.weight_decay_groups.causes import CAUSES as OF_GROUPS
from pytest_trainloop.core.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


CAUSES = {
    # records/unread_options.py makes the findings of this one
    "option_nobody_reads": Cause(
        proof=(
            "a key of a group is no option of its optimizer, looks like a misspelling of weight_decay or a multiplier "
            "of it, and nothing but torch looks it up while the loop is built or in fit"
        ),
        repair='"weight_decay"',
        judged="have fit call what reads it",
        change=("group", "optimizer"),
        source="https://github.com/huggingface/transformers/issues/525",
    ),
    **OF_GROUPS,
}


def _no_decay(evidence: Evidence) -> str:
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups

    groups = evidence.shared(DecayGroups.of)
    return "" if any(g.decay > 0 for g in groups.groups) else "no optimizer that steps has weight decay"


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=10, absent=_no_decay)
def weight_decay_groups(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.weight_decay_groups import rules
    from pytest_trainloop.checks.learning.weight_decay_groups.filters import unmatched_filters
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.checks.learning.weight_decay_groups.l2_in_loss import l2_in_loss
    from pytest_trainloop.checks.learning.weight_decay_groups.unused_groups import unused_groups
    from pytest_trainloop.instruments.records.unread_options import UnreadOptions

    unread = list(evidence.shared(UnreadOptions.of).findings(evidence.run(), decay=True))
    yield from unread
    groups = evidence.shared(DecayGroups.of)
    unused = list(unused_groups(evidence)) if evidence.repeatable and not groups.splits else []
    yield from unused
    if not any(g.decay > 0 for g in groups.groups):
        yield from rules.divided_without_effect(evidence, groups)
        return
    named = [*unmatched_filters(evidence, groups)] if evidence.repeatable else []
    named += rules.swapped(groups)
    yield from named
    if not named and all(f.level != "fault" for f in unread):
        named += rules.divided_without_effect(evidence, groups)
        yield from named
    if evidence.repeatable:
        yield from l2_in_loss(evidence, groups)
    named += (on_last := list(rules.on_last_only(evidence, groups)))
    yield from on_last
    overdone = list(rules.overdone(groups))
    yield from overdone
    if not (named or unused or overdone or any(f.level == "fault" for f in unread)):
        yield from rules.decayed(evidence, groups)
    yield from rules.inside_adam(groups)
