"""Terms that are added and train nothing: without a gradient, or with one that no step uses.

Of those without a gradient it is shown that they move with the weights, or that they compare frozen results. A gradient
that no step uses goes to weights of another optimizer, as in a generator's step that gives the discriminator a detached
picture: it is cleared before the discriminator's own step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.loss.every_term_trains.causes import found
from pytest_trainloop.checks.loss.every_term_trains.names import name_at
from pytest_trainloop.checks.loss.every_term_trains.survey import Moves
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.statements import without_gradients
from pytest_trainloop.recording.torch_names import LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.checks.loss.every_term_trains.survey import Survey
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.tracing.terms import Term
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


def constant_terms(evidence: Evidence, survey: Survey) -> Iterator[Finding]:
    """One finding for each line whose term trains nothing; advice where no further run shows that it moves."""
    record = survey.record
    never_trained = {p.index for p in record.parameters if not record.reached(p.index) and not record.held.get(p.index)}
    for root, term in survey.constants():
        if term.shared or term.twin:
            continue
        trained, moves, name = survey.trained_by(root), 0.0, called(term)
        of_trained = bool(term.parameters & trained)
        if of_trained or (not term.parameters and term.cut in ("number", "before", "derivative")):
            if evidence.repeatable:
                moves = evidence.shared(Moves).of(root, term, trained)
            elif not of_trained or term.cut not in ("end", "derivative"):
                continue  # only a history that was cut off shows in a single run that it depends on the weights
            if moves or not evidence.repeatable:
                level = "fault" if moves else "advice"
                if term.cut == "derivative":
                    at = term.derivative or term.place
                    facts: dict[str, Any] = {"moves": moves, "added": term.place.partition("   ")[0], "change": at}
                    yield found("penalty_off_graph", at, ("grad",), level=level, **facts)
                else:
                    variant = term.cut if name else "unnamed number"
                    facts = {"name": name, "moves": moves, "level": level, "change": _ended(term)}
                    yield found("term_detached", term.place, (name or "a number",), variant, **facts)
                continue
        if len(term.sides) == 2 and all(side and side <= never_trained for side in term.sides):
            one, other = (owner(record, side) for side in term.sides)
            same, name = term.sides[0] == term.sides[1], name or "a number"
            facts = {"one": one, "other": other, "value": term.value, "level": "fault" if same else "advice"}
            yield found("term_between_frozen", term.place, (name,), "" if same else "two nets", **facts)


def detached_derivatives(survey: Survey) -> Iterator[Finding]:
    """Derivatives without a graph that are added, entry by entry, to what has one."""
    seen = set()
    for root in survey.roots:
        derivative = root.detached_derivative
        if derivative is not None and derivative.taken not in seen and derivative.parameters & survey.trained_by(root):
            seen.add(derivative.taken)
            facts = {"added": derivative.added.partition("   ")[0], "change": derivative.taken, "level": "advice"}
            yield found("derivative_off_graph", derivative.taken, ("grad",), **facts)


def cut_terms(evidence: Evidence, survey: Survey) -> Iterator[Finding]:
    """Terms whose gradient goes only to weights that no step changes by it: one finding for each line. The terms are
    those of the first steps; whether a step uses their gradients is read off all that were watched."""
    by_line: dict[tuple[Site, str, str], list[Term]] = defaultdict(list)
    for root in survey.roots:
        mine = next((b for b in survey.record.backwards() if b.at > root.at), None)
        live = [term for term in root.terms if term.live]
        if mine is not None and len(live) > 1:
            for term in live:
                by_line[mine.site, term.op, term.place].append(term)
    if not any(term.stopped for terms in by_line.values() for term in terms):
        return
    record = evidence.run()
    ledger = Ledger(record)
    for (site, _, _), terms in by_line.items():
        passes = [p for p in ledger.passes if p.backward.site == site]
        used = {i for p in passes for i in p.used}
        given = {i for term in terms for i in term.parameters}
        # a codebook that the loop moves by hand (odd: vqvae_codebook_by_moving_average)
        if len(passes) < 2 or not used or given & (used | record.moved_outside_steps()):
            continue
        if any(term.elsewhere or not term.parameters for term in terms):
            continue
        # the critic's real half in the generator's pass (odd: generator_is_given_the_whole_value)
        if not all(any(below & used for *_, below in term.stopped) for term in terms):
            continue
        # an optimizer may step later: every second batch, or once it is warmed up
        cleared = {i for p in passes for i in p.cleared}
        if any(record.held.get(i) and i not in cleared for i in given):
            continue
        cuts = [(line, detached) for line, detached, below in terms[0].stopped if below & used]
        lines = [line for line, detached in cuts if line and detached]
        cut_from = owner(record, (i for *_, below in terms[0].stopped for i in below & used))
        name, where, goes_to = (
            called(terms[0]) or "a number",
            lines[0] if lines else terms[0].place,
            owner(record, given),
        )
        facts = {"name": name, "cut_from": cut_from, "goes_to": goes_to, "passes": len(passes), "change": where}
        facts["change"] = where if lines else next(filter(None, (without_gradients(line) for line, _ in cuts)), where)
        facts["cleared"] = bool(given & cleared)
        yield found("term_detached", where, (name, cut_from, goes_to), "cut off", **facts)


def _ended(term: Term) -> str:
    """The only line at which what a term is computed of lost its history, or what switches gradients off around it."""
    line = next(iter(term.ended), "") if len(term.ended) == 1 else ""
    return without_gradients(line) or line or term.place


def owner(record: Record, parameters: Iterable[int]) -> str:
    """The module that holds all of these parameters, or their names."""
    names = [record.parameters[i].name for i in sorted({*parameters}) if i < len(record.parameters)]
    first = {name.partition(".")[0] for name in names}
    return next(iter(first)) if len(first) == 1 else some(names)


def called(term: Term) -> str:
    """What the project calls a term, as far as its line shows; empty for a number without a name."""
    if term.cut == "number":
        seen = re.search(r"([\w.]+)\.(?:item|tolist|numpy|cpu)\(\)|float\(([^()]+)\)", code_of(term.place))
        return next(filter(None, seen.groups())) if seen else ""
    return term.op if term.op in LOSSES else name_at(term.site) or term.op or "a tensor"
