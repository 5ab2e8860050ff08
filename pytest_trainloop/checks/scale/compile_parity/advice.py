"""What the compiler says of the loop while it trains: graph breaks, and functions that are compiled again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.compile_parity.findings import place
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.compiler_internals import recompile_limit
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.scale.compile_parity.parity import Parity
    from pytest_trainloop.recording.compiler_internals import Compilation, GraphBreak

SETTLED = 2
"""Steps after which a function is compiled no more: for the first shape, and for shapes that vary."""

MOST = 3
"""Lines that are named, at most."""

_RESUMED = "torch_dynamo_resume_in_"

NECESSARY = ("backward", "optimizer", "zero_grad")
"""Words in torch's reasons for breaks that a compiled training step cannot avoid."""


def of(runs: Parity) -> Iterator[Finding]:
    """The advice on a loop that trains the same compiled."""
    if runs.compiled.calls and not runs.ran_compiled:
        yield _never_runs(runs)
    yield from _graph_breaks(runs)
    yield from _recompilations(runs)


def _never_runs(runs: Parity) -> Finding:
    call = runs.compiled.calls[0]
    return Finding(
        cause="never_runs",
        level="advice",
        summary=f"the compiled {call.what} is never called in training: nothing was compiled",
        measured=f"0 functions compiled in {count(runs.compiled.course.compared, 'optimizer step')}",
        shown_by=f"{call.how} was called, and its result is held by someone",
        culprits=(f"{call.how}()",),
        where=call.place,
    )


def _graph_breaks(runs: Parity) -> Iterator[Finding]:
    places: dict[str, str] = {}
    for broken in _avoidable(runs):
        places.setdefault(_line(broken), broken.reason)
    for line, reason in list(places.items())[:MOST]:
        more = f", one of {len(places)} such lines" if len(places) > 1 else ""
        yield Finding(
            cause="graph_breaks",
            level="advice",
            summary=f"the graph breaks here: {reason[0].lower()}{reason[1:]}",
            measured=f"{count(len(runs.compiled.breaks), 'break')} in "
            f"{count(runs.compiled.course.compared, 'optimizer step')}{more}",
            shown_by="torch compiles what is before and after this line as graphs of their own",
            culprits=("torch.compile()",),
            where=line,
        )


def _avoidable(runs: Parity) -> list[GraphBreak]:
    """Breaks in the project's own code; where there are none, those in libraries but torch."""
    breaks = [b for b in runs.compiled.breaks if not any(word in b.reason.lower() for word in NECESSARY)]
    breaks = [b for b in breaks if not any(f"{word}(" in _line(b) for word in NECESSARY)]
    own = [b for b in breaks if any(layer(file) == 2 for file, _ in b.stack)]
    return own or [b for b in breaks if _line(b)]


def _line(broken: GraphBreak) -> str:
    """The nearest line of the project's, or of a library; empty where torch's own code alone is in the graph."""
    own = [at for at in broken.stack if layer(at[0]) == 2] or [at for at in broken.stack if layer(at[0]) == 1]
    return str(place_of(*own[-1])) if own else ""


def _recompilations(runs: Parity) -> Iterator[Finding]:
    again: dict[tuple[str, str], list[tuple[int, Compilation]]] = {}
    for step, one in runs.compiled.compilations:
        if one.again and step >= SETTLED:
            name = one.function.removeprefix(_RESUMED).partition("_at_")[0]
            again.setdefault((one.file, name), []).append((step, one))
    for (_, name), found in list(again.items())[:MOST]:
        steps = sorted({step for step, _ in found})
        if len(steps) < 2:
            continue  # the last batch is smaller, or a phase begins
        one = found[0][1]
        yield Finding(
            cause="recompilations",
            level="advice",
            summary=f"{name} is compiled again in {len(steps)} of the steps after the second: {one.again} fails",
            measured=f"compiled again in steps {', '.join(str(s + 1) for s in steps)} of "
            f"{runs.compiled.course.compared}; after {recompile_limit()} times torch runs it without compiling",
            shown_by="the guard that torch names compares with a value of an earlier step",
            culprits=(name,),
            where=str(place_of(*one.at))
            if one.at[0]
            else str(place_of(one.file, one.line))
            if one.file
            else place(runs),
        )
