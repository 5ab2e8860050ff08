"""Terms that are added without a gradient: which of them move with the weights, and which compare frozen results."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.every_term_trains.names import name_at
from pytest_trainloop.checks.loss.every_term_trains.survey import Moves
from pytest_trainloop.finding import Finding, code_of
from pytest_trainloop.recording.torch_names import LOSSES
from pytest_trainloop.wording import share, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.every_term_trains.survey import Survey
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.terms import Term

_UNNAMED = "a number"

_BY_LINEAGE = ("end", "derivative")
"""What was computed with a history to weights, which was then cut off: a single run shows that it depends on them."""

_HOW = {
    "number": ("it is a plain number there", "add the tensor itself: leave out item(), float() or numpy()"),
    "end": ("it is detached as a whole", "add it without detach()"),
    "before": (
        "what it is computed from has no gradient",
        "compute it outside of no_grad(), from the output itself; argmax, rounding and comparisons have no gradient: "
        "use probabilities in their place",
    ),
}


def constant_terms(evidence: Evidence, survey: Survey) -> Iterator[Finding]:
    """One finding for each line whose term trains nothing; advice where no further run shows that it moves."""
    frozen = _never_trained(survey.record)
    for root, term in survey.constants():
        if term.shared or term.twin:
            continue
        trained = survey.trained_by(root)
        moves = 0.0
        if term.parameters & trained or (not term.parameters and term.cut in ("number", "before", "derivative")):
            if not evidence.repeatable:
                if term.parameters & trained and term.cut in _BY_LINEAGE:
                    yield replace(
                        _off_graph(term, 0.0) if term.cut == "derivative" else _detached(term, 0.0), level="advice"
                    )
                continue
            moves = evidence.shared(Moves).of(root, term, trained)
        if moves and term.cut == "derivative":
            yield _off_graph(term, moves)
        elif moves:
            yield _detached(term, moves)
        elif not moves and len(term.sides) == 2 and all(side and side <= frozen for side in term.sides):
            yield _between_frozen(survey.record, term)


def derivatives_beside(survey: Survey) -> Iterator[Finding]:
    """Derivatives without a graph that are added, entry by entry, to what has one."""
    seen = set()
    for root in survey.roots:
        found = root.beside
        if found is not None and found.taken not in seen and found.parameters & survey.trained_by(root):
            seen.add(found.taken)
            yield Finding(
                cause="derivative_off_graph",
                level="advice",
                summary="a derivative is added to what trains, and is itself a constant to the weights: it was taken "
                "without a graph",
                measured=f"added at {found.added.partition('   ')[0]}",
                shown_by="it was computed from weights that the loss trains, and has no gradient where it is added",
                culprits=("grad",),
                where=found.taken,
                change=found.taken,
            )


def _never_trained(record: Record) -> frozenset[int]:
    """Parameters that no gradient reached and no optimizer holds."""
    return frozenset(p.index for p in record.parameters if not record.reached(p.index) and not record.held.get(p.index))


def _off_graph(term: Term, moves: float) -> Finding:
    return Finding(
        cause="penalty_off_graph",
        summary="a derivative is in the loss by its value alone: it was taken without a graph, so it trains nothing",
        measured=_moved(moves),
        shown_by=("the term changes with the weights" if moves else "the term is computed from the weights")
        + " and has no gradient; it is added at "
        + term.place.partition("   ")[0],
        culprits=("grad",),
        where=term.derivative or term.place,
        change=term.derivative or term.place,
    )


def _detached(term: Term, moves: float) -> Finding:
    why, repair = _HOW[term.cut]
    name = called(term)
    depends = "its value changes with" if moves else "it is computed from"
    return Finding(
        cause="term_detached",
        summary="a plain number that changes with the weights is added to the loss, and trains nothing"
        if name == _UNNAMED
        else f"the value of {name} is added to the loss and trains nothing: {why}",
        measured=_moved(moves),
        shown_by=f"{depends} the weights that this loss trains, and it has no gradient where it is added",
        culprits=(name,),
        where=term.place,
        repair=repair,
    )


def _between_frozen(record: Record, term: Term) -> Finding:
    same = term.sides[0] == term.sides[1]
    owners = [owner(record, side) for side in term.sides]
    name = called(term)
    both = f"both sides of {name} are computed from {owners[0]}" if same else f"{name} compares {' with '.join(owners)}"
    return Finding(
        cause="term_between_frozen",
        level="fault" if same else "advice",
        summary=f"{both}, which nothing trains: the term is a constant",
        measured=f"value {term.value:.4g}, without a gradient",
        shown_by="no optimizer holds the weights on either side, and no gradient reaches them",
        culprits=(name,),
        where=term.place,
    )


def owner(record: Record, parameters: frozenset[int]) -> str:
    """The module that holds all of these parameters, or their names."""
    names = [record.parameters[i].name for i in sorted(parameters) if i < len(record.parameters)]
    first = {name.partition(".")[0] for name in names}
    return next(iter(first)) if len(first) == 1 else some(names)


def _moved(moves: float) -> str:
    if not moves:
        return "it is another number in each step, and no gradient goes through it"
    return f"its value changes by {share(moves)} when the weights that the loss trains are moved"


def called(term: Term) -> str:
    """What the project calls a term, as far as its line shows."""
    if term.cut == "number":
        found = re.search(r"([\w.]+)\.(?:item|tolist|numpy|cpu)\(\)|float\(([^()]+)\)", code_of(term.place))
        return next(filter(None, found.groups())) if found else _UNNAMED
    return term.op if term.op in LOSSES else name_at(term.site) or term.op or "a tensor"
