"""What ``step_order`` says of clips. Plain data, no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.step_order.clip_gaps import clips_inside, left_out
from pytest_trainloop.checks.wiring.step_order.useless_clips import ClipOfAnother, limit_of, useless_clips
from pytest_trainloop.finding import Finding
from pytest_trainloop.wording import be, count, module_of, share, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.step_order.clip_gaps import ClipInside, LeftOut
    from pytest_trainloop.checks.wiring.step_order.useless_clips import ClipOfNothing
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.clip_coverage import GroupLeftOut


def clip_findings(record: Record) -> Iterator[Finding]:
    """The clips that do nothing, and what clips leave out."""
    useless = list(useless_clips(record))
    for found in useless:
        yield of_another(found) if isinstance(found, ClipOfAnother) else of_nothing(found)
    if not useless:
        yield from (of_left_out(found, record) for found in left_out(record))


def inside_findings(record: Record, *, judged_elsewhere: bool) -> Iterator[Finding]:
    """Clips inside of accumulation windows; of a loop with the knob ``accumulate`` those that change nothing here, as
    ``accumulation_equivalence`` shows what the others do."""
    for found in clips_inside(record):
        if not (judged_elsewhere and found.bites):
            yield of_inside(found)


def of_nothing(found: ClipOfNothing) -> Finding:
    by, line = found.first.by, "clip between backward() and step()"
    reason, shown, repair = {
        "early": (
            "after zero_grad() there is no gradient left" if found.after_zeroing else "no gradient is there yet",
            f"order seen: {'backward, step, zeroing, ' if found.after_zeroing else ''}{by}"
            f"{'' if found.after_zeroing else ', backward, step'}",
            line,
        ),
        "wiped": (
            "what it clips is zeroed before the step, which uses the gradient of another backward pass",
            f"order seen: backward, {by}, zeroing, backward, step",
            "clip after the last backward pass before step()",
        ),
        "stand_ins": (
            "it is handed gradients, or views of weights, which have no .grad of their own",
            "the tensors handed over are the .grad of parameters, or share the memory of one, and have no gradient",
            f"{by}(model.parameters(), {limit_of(found.first)}): hand over the parameters themselves",
        ),
        "used_up": (
            "the iterator that it is handed is used up",
            "each call is handed the same iterator, which yields no tensor any more",
            "params = list(model.parameters()), or call model.parameters() anew for each clip",
        ),
    }[found.why]
    return Finding(
        cause="clips_nothing",
        summary=f"{by} clips nothing: {reason}",
        measured=(
            f"{found.calls} calls with limit {limit_of(found.first)} clipped no gradient that a step uses; "
            f"{count(found.steps, 'step')} used gradients of {count(len(found.tensors), 'tensor')} unclipped"
        ),
        shown_by=shown,
        culprits=(by, *found.tensors),
        where=str(found.first.place),
        repair=repair,
    )


def of_another(found: ClipOfAnother) -> Finding:
    by = found.first.by
    of = module_of(found.unclipped)
    whose = f"the {found.kind} of {of}" if of else found.kind
    used = "gets no gradient at all" if found.twin else "is zeroed before a step uses it"
    return Finding(
        cause="clips_another",
        level="advice" if found.same_line else "fault",
        summary=(
            f"{by} before the step of {whose} clips {module_of(found.clipped) or some(found.clipped)}, and "
            f"{of or some(found.unclipped)} {'is' if of else be(found.unclipped)} stepped unclipped"
        ),
        measured=(
            f"{found.calls} calls with limit {limit_of(found.first)}; no clip of the run covers the "
            f"{count(len(found.unclipped), 'tensor')} of {whose} in {count(found.steps, 'step')}"
        ),
        shown_by=f"what the clip is handed {used}, and the step that follows each call uses other tensors",
        culprits=(by, *found.unclipped),
        where=str(found.first.place),
        repair=f"hand it the parameters that this {found.kind} steps: {some(found.unclipped)}",
    )


def of_left_out(found: LeftOut, record: Record) -> Finding:
    parts = "; ".join(map(_group, found.groups))
    names = tuple(name for group in found.groups for name in group.names)
    by = found.first.by
    left = "" if math.isnan(found.share) else f"; {share(found.share)} of |g|^2 is left out"
    decay = found.split_by_decay
    return Finding(
        cause="clips_one_group" if decay else "clip_leaves_out",
        level="fault" if decay else "advice",
        summary=(
            f"{by} covers some groups of {found.kind} only: {parts}, {'is' if len(found.groups) == 1 else 'are'} "
            "stepped unclipped"
            if decay
            else f"{by} leaves out {count(len(names), 'tensor')} that {found.kind} steps: {parts}"
        ),
        measured=f"in {count(found.steps, 'step')} with limit {limit_of(found.first)}{left}",
        shown_by=(
            "the groups have the same learning rate and other tensors of the same modules: they differ in weight "
            "decay, and a clip has nothing to do with that"
            if decay
            else "these tensors have a gradient at each of these steps, and no clip is handed them"
        ),
        culprits=(by, *names),
        where=str(found.first.place),
        repair="" if decay else _also(found, names, record),
    )


def _also(found: LeftOut, names: tuple[str, ...], record: Record) -> str:
    """The clip with the modules beside the model that hold what is left out."""
    outside = {name.partition(".")[0] for name in names}
    others = [p for p in record.parameters if p.name not in names and p.trainable]
    beside = {p.name.partition(".")[0] for p in others if p.role == "model"} == {"model"}
    beside = beside or all(p.role != "model" for p in record.parameters if p.name in names)
    if not beside or not all("." in name for name in names) or any(p.name.partition(".")[0] in outside for p in others):
        return ""
    modules = ", ".join(f"*{module}.parameters()" for module in sorted(outside))
    return f"{found.first.by}([*model.parameters(), {modules}], {limit_of(found.first)})"


def _group(group: GroupLeftOut) -> str:
    whole = f"all {group.tensors}" if group.whole and group.tensors > 1 else f"{group.tensors} of {group.of_tensors}"
    of = f"group {group.group} of {group.of_groups}, " if group.of_groups > 1 else ""
    norm = "" if math.isnan(group.norm) else f", |g| {group.norm:.2g}"
    return f"{of}{some(group.names)} ({whole} tensors{norm})"


def of_inside(found: ClipInside) -> Finding:
    by = found.first.by
    return Finding(
        cause="clip_inside_window",
        level="advice",
        summary=(
            f"{by} runs with every micro-batch, on what has been accumulated so far: what earlier ones brought is "
            "scaled down, and what the last brings is not"
        ),
        measured=(
            f"{found.inner} of {found.calls} calls with limit {limit_of(found.first)} are followed by another batch's "
            f"backward pass before the step; {found.bites} of them changed the gradients"
        ),
        shown_by=f"order seen: backward, {by}, backward that adds to it, {by}, step",
        culprits=(by,),
        where=str(found.first.place),
    )
