"""The lines "moves", "evaluation", "checkpoint" and "decided"."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import Backward, Forward, Move, Step
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.words import marked, names, numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding, Result
    from pytest_trainloop.views.loop_facts.facts import Facts


def moves(facts: Facts) -> Iterator[Line]:
    record = facts.record
    outside = [m for m in record.moves if m.by is None]
    held = record.held
    drifting = [s.name for s in record.statistics if s.drifted]
    if not outside:
        norms = f"; running statistics of {numbered(len(drifting), 'buffer')}" if drifting else ""
        yield Line(label="moves", text=f"outside of steps: none{norms}")
        return
    kinds: dict[tuple[int, ...], list[Move]] = {}
    for move in outside:
        kinds.setdefault(move.parameters, []).append(move)
    for parameters, found in list(kinds.items())[:3]:
        stepped = [i for i in parameters if i in held]
        what = "stepped weights" if stepped else "weights of no optimizer"
        text = (
            f"outside of steps: {numbered(len(parameters), 'tensor')}, {what} ({names(record.names(parameters), 2)}), "
            f"{numbered(len(found), 'time')}"
        )
        place = _before(facts, found[0])
        yield Line(label="moves", text=marked(text, bool(stepped)), where=place, odd=bool(stepped))
    if drifting:
        yield Line(label="", text=f"running statistics of {numbered(len(drifting), 'buffer')}")


def _before(facts: Facts, move: Move) -> str:
    """The last line that was seen before the move: the move is between this line and the next."""
    seen = [e for e in facts.record.events if e.at <= move.since and isinstance(e, (Step, Backward, Forward))]
    return f"after {facts.where(seen[-1].place)}" if seen else ""


def evaluation(facts: Facts) -> Iterator[Line]:
    result = facts.results.get("evaluation_is_pure")
    if "evaluate" not in facts.measured.given:
        yield _inside(facts)
        return
    if result is None:
        yield Line(label="evaluation", text="not looked at: evaluation_is_pure was not run", seen=False)
        return
    found = [f"{f.cause}{f' ({names(f.culprits, 2)})' if f.culprits else ''} *" for f in result.findings]
    dropout = facts.results.get("train_mode")
    found += [f"{f.cause} *" for f in dropout.findings if "eval" in f.cause] if dropout else []
    where = next((facts.where(f.where) for f in result.findings if f.where), "")
    changes = "; ".join(found) or ("changes nothing" if result.outcome == "passed" else result.reason)
    yield Line(label="evaluation", text=changes, where=where, odd=bool(found))


def _inside(facts: Facts) -> Line:
    """An evaluation inside ``fit``, by its forward passes without gradients."""
    quiet = [f for f in facts.record.root_forwards() if not f.grad_enabled]
    if not quiet:
        return none_seen("evaluation", "give evaluate=")
    modes = Counter("training" if f.training else "evaluation" for f in quiet)
    counts = ", ".join(f"{n} in {mode} mode" for mode, n in sorted(modes.items()))
    seen = f"{numbered(len(quiet), 'forward pass')} without gradients, {counts}"
    text = f"in fit: {seen}; give evaluate= to see what it leaves"
    return Line(label="evaluation", text=text, where=facts.where(quiet[0].place))


_PARTS = {
    "optimizer_state_lost": "optimizer",
    "lr_lost": "rates",
    "scheduler_restarts": "scheduler",
    "scaler_lost": "scaler",
    "rng_not_saved": "RNG",
    "rng_not_put_back": "RNG",
    "own_generator": "generator",
    "average_lost": "average",
}
"""What a checkpoint lacks, by the cause that ``resume_equivalence`` names."""


def checkpoint(facts: Facts) -> Iterator[Line]:
    result = facts.results.get("resume_equivalence")
    if not {"save", "load"} <= facts.measured.given:
        yield none_seen("checkpoint", "give save= and load=")
    elif result is None:
        yield Line(label="checkpoint", text="not looked at: resume_equivalence was not run", seen=False)
    elif result.findings:
        lacks = [_lacking(f) for f in result.findings]
        where = next((facts.where(f.change or f.where) for f in result.findings if f.change or f.where), "")
        text = f"not in it, or not put back: {', '.join(f'{part} *' for part in dict.fromkeys(lacks))}"
        yield Line(label="checkpoint", text=text, where=where, odd=True)
    elif result.outcome == "passed":
        yield Line(label="checkpoint", text="a resumed run ends where the uninterrupted one does, bit for bit")
    else:
        yield Line(label="checkpoint", text=f"not decided: {result.reason}")


def _lacking(finding: Finding) -> str:
    """What a finding says is lost: the part, and of weights their names."""
    part = _PARTS.get(finding.cause, finding.cause)
    named = finding.culprits if finding.cause == "average_lost" or part == finding.cause else ()
    return f"{part} ({names(named, 2)})" if named else part


def decided(facts: Facts) -> Iterator[Line]:
    results = list(facts.results.values())
    if not results:
        yield Line(label="decided", text="no check was run", seen=False)
        return
    of = Counter(r.outcome for r in results)
    failed = [f"{r.check} *" for r in results if r.outcome in ("failed", "error")]
    advised = [f"{r.check}:{f.cause}" for r in results for f in r.advice]
    open_ = sorted({r.needs for r in results if r.outcome == "skipped" and r.needs})
    waiting = [r.check for r in results if r.outcome == "unreliable"]
    parts = [f"{of['passed']} check{'s' * (of['passed'] != 1)} passed"]
    parts += [f"{len(failed)} failed: {', '.join(failed)}"] if failed else []
    parts += [f"advice: {', '.join(dict.fromkeys(advised))}"] if advised else []
    parts += [f"unreliable: {', '.join(waiting)}"] if waiting else []
    parts += [_open(results, open_)] if of["skipped"] else []
    yield Line(label="decided", text="; ".join(parts), odd=bool(failed))


def _open(results: list[Result], needs: list[str]) -> str:
    undecided = sum(r.outcome == "skipped" and r.applies for r in results)
    elsewhere = sum(r.outcome == "skipped" and not r.applies for r in results)
    fields = f" (give {', '.join(needs)})" if needs else ""
    parts = [f"{undecided} undecided{fields}"] if undecided else []
    parts += [f"{elsewhere} do not apply"] if elsewhere else []
    return "; ".join(parts)
