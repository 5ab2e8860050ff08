"""Weight decay reaches the weights it is meant for.

What it does
    It looks at which weights each group of an optimizer decays: matrices, gains of norms, biases, tables of embeddings.
    Where a filter divides them, it asks whether the filter finds what it is written for.

Why is this bad?
    ``no_decay = ["bias", "LayerNorm.weight"]`` keeps nothing from decay in a model whose norms are named ``ln_1``. No
    error says so: the gains are pulled towards zero for the whole run.

How it decides
    To decay everything is right in many recipes. It is advice that says what decays and by how much, where ``steps=``
    tells that the whole run shrinks these weights by a twentieth or more, or where the optimizer has a group without
    decay, be it an empty one.
    A filter is at fault where all gains (or tables) of a kind decay, the optimizer keeps others from it, and an
    experiment shows that the filter is for them: the loop is built again, for one step, and the filter gets the
    answer "yes" for just these weights. They then stand in a group without decay. Three answers are tried: to
    patterns that no name has (``in``, ``startswith``, ``endswith``, ``==`` on the names that ``named_parameters()``
    hands out), by names with a usual segment put in ("ln_1.LayerNorm.weight": ``re``, ``fnmatch``, names that are
    put together), and to ``isinstance(module, nn.LayerNorm)`` for the project's own class. Names are tried without
    what stands before them, too (``re.match``, lists of whole names), and a module's own ``no_weight_decay()`` that
    the outer module does not pass on. A list of spellings of which one matches, a filter for learning rates, and a
    name that is looked for elsewhere do not pass this experiment. Where the pattern names another norm than the
    model has (a list that several models share) it is advice.
    Groups are swapped where norms and biases decay and no matrix does, in a model that trains as a whole. A group
    decays by default where it holds the vectors only and gives no weight_decay, and the other group differs from it
    in nothing else. Momentum and decay are swapped where each has the size of the other.
    The step of an optimizer of the project's own is made with weight_decay 0 and 1. Where only the last weight of a
    group ends elsewhere, and a line reads the variable of a loop behind it, the decay is on that line.
    A key of a group that is named like the decay (``wd``, ``weight_deacy``) or a multiple of it (``decay_mult``) is at
    fault where nothing looks it up in a further build and run of the loop: torch keeps any key, and reads its own.

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
        settle="have fit call what reads it",
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
    from pytest_trainloop.instruments.records.unread_options import UnreadOptions

    unread = list(evidence.shared(UnreadOptions.of).findings(evidence.run(), decay=True))
    yield from unread
    groups = evidence.shared(DecayGroups.of)
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
    if not (named or overdone or any(f.level == "fault" for f in unread)):
        yield from rules.decayed(evidence, groups)
    yield from rules.inside_adam(groups)
