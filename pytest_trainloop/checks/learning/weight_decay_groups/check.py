"""Weight decay reaches the weights it is meant for.

What it does
    It looks at which weights each group of an optimizer decays: matrices, gains of norms, biases, tables of embeddings.
    Where a filter divides them, it asks whether the filter finds what it is written for.

Why is this bad?
    ``no_decay = ["bias", "LayerNorm.weight"]`` keeps nothing from decay in a model whose norms are named ``ln_1``. No
    error says so: the gains are pulled towards zero for the whole run.

How it decides
    To decay everything is right in many recipes, so it is advice that says what decays and by how much. With
    ``steps=`` it is silent where the whole run shrinks these weights by less than a twentieth; without, where the
    decay is the default of AdamW.
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

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, count, some, verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.learning.weight_decay_groups.filters import Unmatched
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups, Group, Kind
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
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
    "filter_matches_nothing": Cause(
        proof="weights that a filter is to keep from decay all decay, and do not once it answers yes for them",
        repair="the names that these modules have in this model, or a filter by dimension: p.dim() < 2",
        change=("seen", "optimizer"),
        source="https://github.com/namisan/mt-dnn/pull/37",
    ),
    "filter_misses_some": Cause(
        proof="a filter by name keeps weights of a kind from decay, and others of the same class not",
        repair="the names that these modules have in this model, or a filter by dimension: p.dim() < 2",
        change=("seen",),
        source="https://github.com/huggingface/transformers/issues/16908",
    ),
    "groups_swapped": Cause(
        proof="norms and biases decay and no matrix does, in an optimizer that trains both",
        repair='give the decay to the group of the matrices, and "weight_decay": 0.0 to the other',
        change=("optimizer",),
        source="https://github.com/facebookresearch/BalancingGroups/issues/6",
    ),
    "decays_by_default": Cause(
        proof="the group of norms and biases gives no weight_decay and takes that of its optimizer",
        repair='"weight_decay": 0.0 in that group',
        change=("optimizer",),
        source="https://github.com/mindspore-lab/mindcv/pull/752",
    ),
    "split_without_effect": Cause(
        proof="groups that divide matrices from norms and biases decay both alike, at one learning rate",
        repair='"weight_decay": 0.0 in the group of norms and biases',
        change=("optimizer",),
        source="https://github.com/yandex-research/tabular-dl-tabr/issues/19",
    ),
    "norms_and_biases_decay": Cause(
        proof="gains of norms, biases or tables of embeddings stand in groups with weight decay",
        repair='two groups: p.dim() > 1 with the decay, the others with "weight_decay": 0.0',
        change=("optimizer",),
        settle="give steps= (optimizer steps of the real run): less than 5 % of shrinkage is not reported",
        source="https://github.com/dingo-actual/om/issues/12",
    ),
    "decay_inside_adam": Cause(
        proof="Adam adds its weight decay to the gradient, which it then divides by its size",
        repair="torch.optim.AdamW, with weight_decay chosen anew: the same number has another effect there",
        change=("optimizer",),
        source="https://github.com/mapbox/robosat/pull/166",
    ),
    "momentum_and_decay_swapped": Cause(
        proof="the weight decay is as large as a momentum, and the momentum as small as a weight decay",
        repair="give both by name: momentum=0.9, weight_decay=5e-4",
        explains=("overfit_one_batch", "update_ratio"),
        change=("optimizer",),
        source="https://github.com/YudeWang/SEAM/issues/21",
    ),
    "decay_turns_weights_over": Cause(
        proof="lr * weight_decay is above 1: decay alone changes the sign of each weight in each step",
        repair="a smaller weight_decay: after 1 / (lr * weight_decay) steps a weight has decayed to 37 %",
        explains=("overfit_one_batch", "update_ratio"),
        change=("optimizer",),
    ),
    "decayed_twice": Cause(
        proof="the loss has a term whose gradient is a constant times each weight that weight decay shrinks too",
        repair="leave the term out of the loss, or weight_decay=0.0",
        source="https://github.com/rutgerswiselab/NCR/issues/2",
    ),
}

MOST_MOMENTUM_OF_A_SWAP, LEAST_DECAY_OF_A_SWAP = 0.01, 0.5
"""Momenta in use begin at 0.5, and decays beside them end at 0.1 (both with orders of magnitude to spare)."""

_PLURAL: dict[Kind, tuple[str, str]] = {
    "norm": ("gain of a norm", "gains of norms"),
    "bias": ("bias", "biases"),
    "embedding": ("table of an embedding", "tables of embeddings"),
    "vector": ("other vector", "other vectors"),
    "matrix": ("matrix", "matrices"),
}


def _no_decay(evidence: Evidence) -> str:
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups

    groups = evidence.shared(DecayGroups.of)
    return "" if any(g.decay > 0 for g in groups.groups) else "no optimizer that steps has weight decay"


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=10, absent=_no_decay)
def weight_decay_groups(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.learning.weight_decay_groups.filters import unmatched_filters
    from pytest_trainloop.checks.learning.weight_decay_groups.groups import DecayGroups
    from pytest_trainloop.checks.learning.weight_decay_groups.l2_in_loss import l2_in_loss
    from pytest_trainloop.records.unread_options import UnreadOptions
    from pytest_trainloop.tracing.given_groups import GivenGroups

    unread = list(evidence.shared(UnreadOptions.of).findings(evidence.run(), decay=True))
    yield from unread
    groups = evidence.shared(DecayGroups.of)
    divided = groups.divided
    if not any(g.decay > 0 for g in groups.groups):
        if divided is not None:
            yield _split(*divided)
        return
    said = any(f.level == "fault" for f in unread)
    for filtered in unmatched_filters(evidence, groups) if evidence.repeatable else ():
        said = True
        yield _unmatched(filtered, evidence.run())
    if (swapped := groups.swapped) is not None:
        said = True
        yield _swapped(*swapped)
    if divided is not None and not said:
        matrices, vectors = divided
        given = evidence.shared(GivenGroups.of).group(vectors.optimizer, vectors.number)
        said = True
        if given is not None and given <= {"params", "lr"} and _one_rate(evidence, matrices, vectors):
            yield _by_default(groups, matrices, vectors)
        elif matrices.decay == vectors.decay:
            yield _split(matrices, vectors)
        else:
            said = False
    if evidence.repeatable and (term := l2_in_loss(evidence, groups)) is not None:
        names = term.names
        yield Finding(
            cause="decayed_twice",
            level="advice",
            summary=(
                f"{some(names)} {be(names)} decayed twice: by a term of the loss whose gradient is "
                f"{term.factor:.3g} * weight, and by weight_decay={term.decay:g}"
            ),
            measured=f"the gradient of the term is {term.factor:.6g} times the weight in {count(len(names), 'tensor')}",
            shown_by="without this term the first gradient differs by just that, in float64",
            culprits=names,
            where=term.place,
        )
    overdone = list(_overdone(groups))
    yield from overdone
    if not said and not overdone and (advice := _decayed(evidence, groups)) is not None:
        yield advice
    yield from _inside_adam(groups)


def _unmatched(found: Unmatched, record: Record) -> Finding:
    from pytest_trainloop.checks.learning.weight_decay_groups.filters import in_the_filter

    few = found.weights
    what = _PLURAL[found.kind][len(few) > 1]
    decay = f"all {len(few)} {what} decay" if len(few) > 1 else f"the one {what} decays"
    decay += f" at {found.decay:g}" if found.decay else ""
    pattern = repr(found.written)
    if found.how == "asked":
        summary = f"the filter {pattern} matches no parameter, and {decay} ({some(few)})"
        measured = f"asked of {found.names} names that named_parameters() gave; true of none"
        shown = f"were it true of {some(few)}, a group without decay would hold {_them(few)}"
    elif found.how == "renamed":
        summary = f"a filter for names with {pattern} finds no such name, and {decay} ({some(few)})"
        measured = f"no name of the model has {pattern} in it"
        shown = f"named with {pattern} as their last segment but one, {_they(few)} would stand in a group without decay"
    elif found.how == "prefix":
        summary = f"the filter knows {pattern} and gets {few[0]!r}: {some(few)} {verb(few, 'decay')} at {found.decay:g}"
        measured = f"named_parameters() gives {found.names} names"
        shown = f"named {pattern} it would stand in a group without decay; with any prefix, it does not"
    elif found.how == "promised":
        summary = f"{found.written}.no_weight_decay() names {some(few)}, which {verb(few, 'decay')} at {found.decay:g}"
        measured = f"the module that the optimizer is made from has no {found.written}.no_weight_decay()"
        shown = f"where each module passes on what those below it name, a group without decay holds {_them(few)}"
    elif found.how == "missed":
        summary = (
            f"a filter by name keeps {count(found.names, _PLURAL[found.kind][0].partition(' ')[0])} of {found.module} "
            f"from decay and misses {some(few)}"
        )
        measured = f"{some(few)} {verb(few, 'decay')} at {found.decay:g}"
        shown = f"with {found.written!r} as their last segment but one, {_they(few)} would stand there too"
    else:
        summary = f"isinstance(module, {found.written}) is true of no {found.module}, and {decay} ({some(few)})"
        measured = f"{found.module} is a class of the project's own"
        shown = f"where {found.module} passes for {found.written}, a group without decay holds {_them(few)}"
    named = in_the_filter(found, record)
    by_type = f"add {found.module} to the classes" if found.how == "isinstance" else named
    if found.how == "prefix":
        by_type = "re.search in place of re.match; name.endswith(...); or the list with the prefix"
    elif found.how == "promised":
        by_type = "pass it on: no_weight_decay() of the outer module, with the prefix"
    return Finding(
        cause="filter_misses_some" if found.how == "missed" else "filter_matches_nothing",
        level="fault" if found.namesake else "advice",
        summary=summary,
        measured=measured,
        shown_by=shown,
        culprits=few,
        where=found.place,
        repair=f"{by_type}; or divide by dimension: no decay where p.dim() < 2",
    )


def _swapped(on: Group, off: Group) -> Finding:
    return Finding(
        cause="groups_swapped",
        summary=(
            f"group {on.number}, which decays at {on.decay:g}, holds norms and biases only, and no matrix decays: "
            "the groups are swapped"
        ),
        measured=f"{_contents(on)} decay; {_contents(off)} in group {off.number} do not",
        shown_by="no trained matrix stands in a group with weight decay",
        culprits=on.names,
    )


def _one_rate(evidence: Evidence, one: Group, other: Group) -> bool:
    """Whether both groups have one learning rate at every step: else the groups may be there for that."""
    steps = [s for s in evidence.run().innermost_steps() if s.optimizer == one.optimizer]
    return all(s.lrs[one.number] == s.lrs[other.number] for s in steps)


def _by_default(groups: DecayGroups, matrices: Group, vectors: Group) -> Finding:
    kind = groups.kinds[vectors.optimizer]
    whose = f"the default of {kind}" if vectors.default else f"that of {kind}(...)"
    return Finding(
        cause="decays_by_default",
        summary=(
            f"group {vectors.number} holds {_contents(vectors)} and gives no weight_decay, so it takes {whose}: "
            f"{vectors.decay:g}"
        ),
        measured=(
            f"weight_decay {matrices.decay:g} in group {matrices.number}, {vectors.decay:g} in group {vectors.number}"
        ),
        shown_by=(
            f"group {matrices.number} holds matrices, and group {vectors.number}, which holds none, is given no option "
            "that differs"
        ),
        culprits=vectors.names,
    )


def _split(matrices: Group, vectors: Group) -> Finding:
    both = f"both decay at {vectors.decay:g}" if vectors.decay else "neither decays"
    return Finding(
        cause="split_without_effect",
        level="advice",
        summary=(
            f"matrices (group {matrices.number}) and {_contents(vectors)} (group {vectors.number}) have a group each, "
            f"and {both}"
        ),
        measured=f"the same learning rate, {vectors.rate:g}, and the same weight_decay in both",
        shown_by="every option of the optimizer is the same in both groups",
        culprits=vectors.names,
    )


def _decayed(evidence: Evidence, groups: DecayGroups) -> Finding | None:
    """Advice on what decays besides matrices."""
    from pytest_trainloop.checks.learning.weight_decay_groups.shrinkage import least_worth_saying, shrinkage

    flat: tuple[Kind, ...] = ("norm", "bias", "embedding", *(("vector",) if groups.splits else ()))
    names = tuple(name for kind in flat for name in groups.names(kind, decayed=True))
    if not names or (
        groups.splits and not any(groups.names(kind, decayed=True) for kind in flat if kind != "embedding")
    ):
        return None  # to decay tables beside the matrices is the usual division by dimension
    shrinks = shrinkage(evidence, groups)
    decaying = [g for g in groups.groups if g.decay > 0 and any(kind in g.members for kind in flat)]
    by_default = all(g.default for g in decaying) and not groups.splits
    if by_default if shrinks is None else shrinks < least_worth_saying:
        return None  # nobody asked for the default of AdamW, nor notices it in a short run
    shares = [
        f"{groups.count(kind, decayed=True)} of {groups.count(kind)} {_PLURAL[kind][1]}"
        for kind in flat
        if groups.count(kind, decayed=True)
    ]
    where = ", ".join(f"group {g.number} of {groups.kinds[g.optimizer]} at {g.decay:g}" for g in decaying[:3])
    over = "" if shrinks is None else f"; over the steps of steps= decay alone shrinks them by {100 * shrinks:.2g} %"
    return Finding(
        cause="norms_and_biases_decay",
        level="advice",
        summary=f"weight decay shrinks {_listed(shares)}",
        measured=f"{where}; learning rate {decaying[0].rate:g}{over}",
        shown_by="each gets gradients, and its group has weight_decay above 0",
        culprits=names,
    )


def _inside_adam(groups: DecayGroups) -> Iterator[Finding]:
    inside = [g for g in groups.groups if g.into_gradient and g.decay > 0]
    if not inside:
        return
    kind = groups.kinds[inside[0].optimizer]
    yield Finding(
        cause="decay_inside_adam",
        level="advice",
        summary=(
            f"{kind} adds weight_decay={inside[0].decay:g} to the gradient and divides both by the gradient's size: "
            "weights with large gradients hardly decay"
        ),
        measured=f"{count(len(inside), 'group')} of {kind} with decoupled_weight_decay=False",
        shown_by=f"{kind}(weight_decay=...) is L2 regularisation; AdamW decays each weight by lr * weight_decay",
        culprits=("weight_decay",),
    )


def _overdone(groups: DecayGroups) -> Iterator[Finding]:
    """Decay in the place of momentum, and decay that turns weights over."""
    for group in groups.groups:
        kind = groups.kinds[group.optimizer]
        each = group.rate * group.decay
        if 0 < group.momentum <= MOST_MOMENTUM_OF_A_SWAP and group.decay >= LEAST_DECAY_OF_A_SWAP:
            yield Finding(
                cause="momentum_and_decay_swapped",
                summary=f"{kind} has weight_decay={group.decay:g} and momentum={group.momentum:g}: they are swapped",
                measured=f"each step shrinks all weights of group {group.number} by {100 * each:.2g} %",
                shown_by="a momentum below 0.01 does nothing, and no recipe decays at 0.5 and more beside a momentum",
                culprits=("weight_decay", "momentum"),
                repair=f"give both by name: momentum={group.decay:g}, weight_decay={group.momentum:g}",
            )
        elif each > 1 and not group.into_gradient:
            yield Finding(
                cause="decay_turns_weights_over",
                summary=(
                    f"lr * weight_decay is {each:.3g} in group {group.number} of {kind}: each step multiplies its "
                    f"weights by {1 - each:.3g}"
                ),
                measured=f"lr {group.rate:g}, weight_decay {group.decay:g}",
                shown_by="a step leaves (1 - lr * weight_decay) of each weight, which is below 0",
                culprits=("weight_decay",),
                repair=(
                    f"weight_decay={1e-4 / group.rate:.1g} decays a weight to 37 % in 10000 steps at this rate: "
                    "1 / (lr * weight_decay) is that number of steps"
                ),
            )


def _contents(group: Group) -> str:
    return _listed([f"{len(names)} {_PLURAL[kind][len(names) > 1]}" for kind, names in group.members.items()])


def _listed(parts: list[str]) -> str:
    return " and ".join(", ".join(parts).rsplit(", ", 1))


def _them(names: tuple[str, ...]) -> str:
    return "them" if len(names) > 1 else "it"


def _they(names: tuple[str, ...]) -> str:
    return "they" if len(names) > 1 else "it"
