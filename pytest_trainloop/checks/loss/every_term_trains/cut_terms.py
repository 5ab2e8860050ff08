"""Terms whose gradient goes only to weights that no step changes by it, while it is computed of those that are stepped.

A generator's step that gives the discriminator a detached picture: the adversarial term has a gradient, in the
discriminator alone, and that is cleared before the discriminator's own step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.every_term_trains.constant_terms import called, owner
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.gradient_ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.every_term_trains.survey import Survey
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.terms import Term


def cut_terms(evidence: Evidence, survey: Survey) -> Iterator[Finding]:
    """One finding for each line. The terms are those of the first steps; whether a step uses their gradients is read
    off all that were watched."""
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
        if not all(any(below & used for _, below in term.stopped) for term in terms):
            continue
        # an optimizer may step later: every second batch, or once it is warmed up
        cleared = {i for p in passes for i in p.cleared}
        if any(record.held.get(i) and i not in cleared for i in given):
            continue
        lines = [line for line, below in terms[0].stopped if line and below & used]
        cut_from = owner(record, frozenset(i for _, below in terms[0].stopped for i in below & used))
        name, where, goes_to = called(terms[0]), lines[0] if lines else terms[0].place, owner(record, frozenset(given))
        yield Finding(
            cause="term_detached",
            summary=f"{name} is added to the loss and trains nothing: it is cut off from {cut_from}, and no step uses "
            f"the gradient that it gives to {goes_to}",
            measured=f"none of {len(passes)} backward passes at this line gave {goes_to} a gradient that a step used",
            shown_by=f"it is computed from results of {cut_from} that have no history"
            + (f"; what it gives to {goes_to} is cleared" if given & cleared else ""),
            culprits=(name, cut_from, goes_to),
            where=where,
            change=where,
            repair="give it the result itself, without detach() and outside of no_grad()",
        )
