"""Single numbers that were computed with a gradient and that no backward pass goes through."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.dead_values import never_read
from pytest_trainloop.checks.loss.every_term_trains.causes import found
from pytest_trainloop.checks.loss.every_term_trains.names import is_part, is_python_number, is_term, loops_over, name_at
from pytest_trainloop.checks.loss.every_term_trains.survey import Survey
from pytest_trainloop.checks.loss.every_term_trains.thrown import untrained_calls
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.gradients.dependence import Dependences
from pytest_trainloop.instruments.tracing.definitions import value
from pytest_trainloop.instruments.tracing.statements import call_in_function_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.terms import Scalar
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

Call = tuple["Site", str, int]
"""A call by its line, its operation, and how many of it the line had made before in the same window."""


def lost_terms(evidence: Evidence, survey: Survey) -> Iterator[Finding]:
    """Terms that the first steps lose are looked for over the whole run before anything is said."""
    if not any(term.live for root in survey.roots for term in root.terms):
        return
    unweighted = {term for (term, _), (scalar, *_) in survey.tables.unweighted.items() if not any(scalar.weights)}
    left_out = _left_out(survey)
    overwritten = _overwritten(survey)
    thrown = {calls[0].site for calls in untrained_calls(survey.record, survey.thrown)}
    if not (unweighted or left_out or overwritten or thrown):
        return
    full = evidence.shared(Survey.in_full)
    named = set()
    for (term, weight), (scalar, place, number, others) in full.tables.unweighted.items():
        if not any(scalar.weights) and term in unweighted:
            named.add(scalar.place)
            facts: dict[str, Any] = {"term": term, "weight": weight, "number": number, "others": others}
            yield found("weight_of_another_name", place, (term,), "named", **facts)
    for calls in untrained_calls(full.record, full.thrown):
        if calls[0].site in thrown:
            one = calls[0]
            named |= {call.scalar.place for call in calls}
            name = name_at(one.scalar.site) or one.scalar.op
            facts = {"name": name, "why": one.why, "count": len(calls), "function": one.function, "repair": one.repair}
            yield found("term_left_out", one.place, (name,), "function", **{k: v for k, v in facts.items() if v})
    for site, scalars in _overwritten(full).items():
        if site in overwritten:
            named.add(scalars[0].place)
            name, line, last = loops_over(site) or ("", 0, "")
            untrained = _untrained(full.record, scalars[:-1])
            facts = {"name": name, "line": line, "count": len(scalars), "lost": len(scalars) - 1, "change": last}
            names = (name, *untrained)
            yield found("term_overwritten", scalars[0].place, names, "named", untrained=untrained, **facts)
    for call, scalars in _left_out(full).items():
        if call not in left_out or scalars[0].place in named:
            continue
        site, named = call[0], named | {scalars[0].place}
        name, untrained = name_at(site), _untrained(full.record, scalars)
        if untrained and not evidence.repeatable and not is_part(name):
            continue  # whether its graph is cut elsewhere takes further runs
        untrained = _independent(evidence, full, untrained) if evidence.repeatable else ()
        if untrained or is_part(name):
            why = never_read(site) if is_part(name) and not untrained else ""
            why = f"it alone would train {some(untrained)}" if untrained else why
            if not why and is_python_number(site):
                continue  # read as what it is: it stops an epoch, or is logged (odd: divergence_that_stops_an_epoch)
            called = name or scalars[0].op
            facts = {"name": called, "why": why, "count": len(scalars), "level": "fault" if why else "advice"}
            backward = next(iter(full.record.backwards()), None)
            if backward is not None and call_in_function_of(site, backward.site):  # made in a function that it calls
                facts["change"] = value(str(backward.place))
            variant, names = "named" if why and name else "", (called, *untrained)
            yield found("term_left_out", scalars[0].place, names, variant, untrained=untrained, **facts)


def _left_out(survey: Survey) -> dict[Call, list[Scalar]]:
    """Calls whose numbers go nowhere, and that are a term by their name or alone train something."""
    turns: dict[tuple[Site, str, int], int] = defaultdict(int)
    by_call: dict[Call, list[Scalar]] = defaultdict(list)
    for scalar in survey.scalars:
        here = scalar.site, scalar.op, scalar.window
        by_call[scalar.site, scalar.op, turns[here]].append(scalar)  # a line may compute several
        turns[here] += 1
    used = {(s.site, s.op) for s in survey.scalars if s.used}
    lines = {s.site for s in survey.scalars if s.used}
    lost_calls = {}
    for (site, op, turn), scalars in by_call.items():
        last = [s for s in scalars if not s.consumed]
        if not site or not last or any(s.used for s in scalars):
            continue
        # torch's losses are loss_contract's; of the turns of a loop the last alone may be wanted
        own = not any(s.of_losses for s in scalars) and (site, op) not in used
        name, lost = name_at(site), functools.partial(never_read, site)
        # on a line whose last value is used the name is that value's (SAC: log_alpha.exp().detach() * log_prob)
        named = site not in lines and is_term(name) and (not all(s.of_used for s in last) or lost())
        if (own and (named or (site not in lines and is_part(name) and lost()))) or _untrained(survey.record, last):
            lost_calls[site, op, turn] = last
    return lost_calls


def _untrained(record: Record, scalars: Sequence[Scalar]) -> tuple[str, ...]:
    """Parameters that an optimizer which steps holds, and that no gradient of the run reaches. What is computed of
    weights alone, as a norm that is logged, is to train none, and what is computed of a used number trains no more."""
    below = sorted(
        {i for s in scalars if not (s.of_weights or s.of_used) for i in s.parameters if i < len(record.parameters)}
    )
    return tuple(
        p.name
        for p in (record.parameters[i] for i in below)
        if p.trainable
        and not record.reached(p.index)
        and not record.declared_frozen(p.name)
        and any(record.optimizers[o].steps for o in record.held.get(p.index, ()))
    )


def _independent(evidence: Evidence, survey: Survey, untrained: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the parameters that what is backpropagated does not depend on, or by a path that is seen (the codes of a
    straight-through estimate): else its graph is cut, and the term may be in the loss by its value."""
    if not untrained:
        return ()
    depends = evidence.shared(Dependences).of(list(untrained))
    seen = {survey.record.parameters[i].name for root in survey.roots for i in root.reads}
    return tuple(n for n in untrained if (not depends[n].depends or n in seen) and not depends[n].alive)


def _overwritten(survey: Survey) -> dict[Site, list[Scalar]]:
    """Lines in a loop of which only the last value before each backward pass is used, and the others had other data or
    weights."""
    by_line: dict[tuple[Site, str], dict[int, list[Scalar]]] = defaultdict(lambda: defaultdict(list))
    for scalar in survey.scalars:
        by_line[scalar.site, scalar.op][scalar.window].append(scalar)
    sites = {}
    for (site, _), windows in by_line.items():
        several = [w for w in windows.values() if len(w) > 1]
        if several and all(_only_the_last(w) for w in several) and loops_over(site) is not None:
            sites[site] = several[0]
    return sites


def _only_the_last(scalars: Sequence[Scalar]) -> bool:
    """Whether only the last value is used, and an earlier one was computed of other data or weights."""
    *earlier, last = scalars
    if not last.used or any(s.used or s.consumed for s in earlier):
        return False
    return any(s.data - last.data or s.parameters - last.parameters for s in earlier)
