"""What a verdict says, in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.wording import count, direction, share, some, verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.checks.scale.compile_parity.compile_calls import CompileCall
    from pytest_trainloop.checks.scale.compile_parity.parity import Parity, Verdict
    from pytest_trainloop.recording.events import Raised


def of(runs: Parity, verdict: Verdict) -> Finding:
    """The finding of a verdict."""
    return _FINDINGS[verdict.cause](runs, verdict)


def _measured(runs: Parity, verdict: Verdict) -> str:
    found = verdict.difference
    if found is None:
        return f"in {runs.compiled.course.compared} optimizer steps, {runs.precision}"
    return (
        f"in optimizer step {found.step + 1} the {found.what} differ by {share(found.found.difference)} of their size, "
        f"{direction(found.found.cosine)}, in {len(found.names)} tensors, {runs.precision}; "
        f"limit {share(runs.bound)}"
    )


def _names(verdict: Verdict) -> tuple[str, ...]:
    if verdict.module:
        return (verdict.module,)
    return verdict.difference.names if verdict.difference is not None else ()


def place(runs: Parity) -> str:
    """The line that compiles."""
    return runs.compiled.calls[0].place if runs.compiled.calls else ""


def _call(runs: Parity) -> CompileCall | None:
    return runs.compiled.calls[0] if runs.compiled.calls else None


def _result_dropped(runs: Parity, _verdict: Verdict) -> Finding:
    call = runs.compiled.calls[0]
    return Finding(
        cause="result_dropped",
        summary=f"{call.how} returns a compiled {call.what} that nobody keeps: the loop trains without it",
        measured=f"{count(len(runs.compiled.calls), 'call')}, 0 functions compiled in "
        f"{count(runs.compiled.course.compared, 'optimizer step')}",
        shown_by="what it returned was gone before the first batch, and torch compiled nothing while the loop trained",
        culprits=(f"{call.how}()",),
        where=call.place,
    )


def _compiling_raises(runs: Parity, verdict: Verdict) -> Finding:
    raised = verdict.raised
    summary = raised.summary if raised is not None else ""
    return Finding(
        cause="compiling_raises",
        summary=f"with {runs.knob}=True fit raises {summary}",
        measured=f"after {len(runs.compiled.course.moments)} optimizer steps",
        shown_by=f"with {runs.knob}=True and torch.compile standing aside it comes back, and so it does without",
        culprits=("torch.compile()",),
        where=_line_refused(raised) or place(runs) if raised is not None else place(runs),
    )


_TRACED_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def _line_refused(raised: Raised) -> str:
    """The user's line that the compiler was at, which it gives as text; else that of the exception."""
    lines = [(m["file"], int(m["line"])) for m in _TRACED_LINE.finditer(raised.message)]
    own = [at for at in lines if layer(at[0]) == 2]
    if own:
        return str(place_of(*own[-1]))
    return str(raised.place) if raised.place.file else ""


def _copy_compiled(runs: Parity, verdict: Verdict) -> Finding:
    names = verdict.difference.without if verdict.difference is not None else ()
    call = _call(runs)
    return Finding(
        cause="copy_compiled",
        summary=f"{some(names)} {verb(names, 'get')} no gradient: the loop computes with the compiled "
        f"{call.what if call else 'model'}, whose parameters no optimizer holds",
        measured=_measured(runs, verdict),
        shown_by=f"with {runs.knob}=False they get one; no parameter of what was compiled is in an optimizer",
        culprits=names,
        where=place(runs),
    )


def _prefix_hides_parameters(runs: Parity, verdict: Verdict) -> Finding:
    if verdict.not_loaded[1]:
        return _weights_not_loaded(runs, verdict)
    if not verdict.options:
        return Finding(
            cause="prefix_hides_parameters",
            summary=f"with {runs.knob}=True {_what(verdict)}: the loop looks for parameters by name, and the compiled "
            "model's names begin with _orig_mod.",
            measured=_measured(runs, verdict),
            shown_by="with torch.compile's wrapper and nothing compiled this is so as well, and no longer once the "
            "names in the wrapper are the plain ones",
            culprits=_names(verdict) or tuple(runs.eager.course.start),
            where=_place_of(runs, verdict),
        )
    names = tuple(dict.fromkeys(name for name, *_ in verdict.options))
    return Finding(
        cause="prefix_hides_parameters",
        summary=f"{some(names)} {'have' if len(names) > 1 else 'has'} other options with "
        f"{runs.knob}=True: the compiled model's names begin with _orig_mod.",
        measured=_options(verdict),
        shown_by=f"with {runs.knob}=False the same parameters are frozen and grouped otherwise; only their names and "
        "the compiler differ",
        culprits=names,
        where=place(runs),
    )


def _what(verdict: Verdict) -> str:
    if verdict.raised is not None:
        return f"fit raises {verdict.raised.summary}"
    return f"{some(_names(verdict))} {verb(_names(verdict), 'train')} otherwise"


def _place_of(runs: Parity, verdict: Verdict) -> str:
    return str(verdict.raised.place) if verdict.raised is not None and verdict.raised.place.file else place(runs)


def _weights_not_loaded(runs: Parity, verdict: Verdict) -> Finding:
    at, names = verdict.not_loaded
    return Finding(
        cause="prefix_hides_parameters",
        summary=f"load_state_dict(strict=False) leaves {some(names)} as {'they were' if len(names) > 1 else 'it was'} "
        f"with {runs.knob}=True: names differ by _orig_mod. alone",
        measured=f"{count(len(names), 'tensor')} with other values than the state has for them when training begins",
        shown_by=f"the state has each of them under the name without _orig_mod. or with it; where torch.compile stands "
        f"aside, {runs.knob}=True as well, they are loaded",
        culprits=names,
        where=at,
    )


def _wrapper_changes(runs: Parity, verdict: Verdict) -> Finding:
    call = _call(runs)
    return Finding(
        cause="wrapper_changes",
        summary=f"with {runs.knob}=True {_what(verdict)}, since what torch.compile returns is no "
        f"{call.what if call else 'plain model'} but a wrapper of it",
        measured=_measured(runs, verdict),
        shown_by="with torch.compile's wrapper and nothing compiled this is so as well, with plain names in it too; "
        "without the wrapper it is not",
        culprits=(call.what,) if call else _names(verdict),
        where=_place_of(runs, verdict),
    )


def _drawn_again(runs: Parity, verdict: Verdict) -> Finding:
    return Finding(
        cause="drawn_again",
        summary=f"each compiled step draws random numbers ({runs.drawn}) that the loop draws once without compiling",
        measured=_measured(runs, verdict),
        shown_by="torch's generator moves on in every compiled step after the first, and in none without compiling",
        culprits=tuple(runs.drawn.split(", ")),
        where=place(runs),
    )


def _asks_whether_compiled(runs: Parity, verdict: Verdict) -> Finding:
    return Finding(
        cause="asks_whether_compiled",
        summary="the loop computes otherwise where torch.compiler.is_compiling() is True",
        measured=_measured(runs, verdict),
        shown_by="where it answers False the compiled loop trains as the eager one does",
        culprits=("torch.compiler.is_compiling()",),
        where=verdict.asked,
    )


def _options(verdict: Verdict) -> str:
    shown = [
        f"{name}: {option} {mine!r} without compiling, {its!r} with it"
        for name, option, mine, its in verdict.options[:2]
    ]
    more = len(verdict.options) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _other_computation(runs: Parity, verdict: Verdict) -> Finding:
    if verdict.raised is not None:
        return Finding(
            cause="other_computation",
            summary=f"with {runs.knob}=True fit raises {verdict.raised.summary}",
            measured=f"after {len(runs.compiled.course.moments)} optimizer steps, in float64 and in the loop's own "
            "precision",
            shown_by=f"it raises where torch.compile stands aside as well, and comes back with {runs.knob}=False",
            culprits=(f"{runs.knob}=True",),
            where=_place_of(runs, verdict),
        )
    names = tuple(dict.fromkeys(name for name, *_ in verdict.options)) or _names(verdict)
    return Finding(
        cause="other_computation",
        summary=f"with {runs.knob}=True the loop trains {some(names)} otherwise, and not because of the compiler",
        measured=_options(verdict) if verdict.options else _measured(runs, verdict),
        shown_by=f"with {runs.knob}=True and torch.compile standing aside the difference is there as well"
        if not verdict.options
        else "what the optimizers are given differs before anything is compiled",
        culprits=names,
        where=place(runs),
    )


def _stale_value(runs: Parity, verdict: Verdict) -> Finding:
    filters = next((c for c in runs.compiled.calls if c.filters_guards), None)
    early = verdict.difference is not None and verdict.difference.step == 0
    when = "something it saw when the loop was built" if early else "a value of an earlier step"
    because = "; guard_filter_fn was given, and keeps torch from looking at values again" if filters else ""
    return Finding(
        cause="stale_value",
        summary=f"the compiled loop goes on with {when} that has changed since: its graph holds it as a constant",
        measured=_measured(runs, verdict),
        shown_by=f"compiled anew for each step it trains as the eager loop does{because}",
        culprits=("guard_filter_fn",) if filters else _names(verdict),
        where=filters.place if filters else place(runs),
    )


def _operator_misdeclared(runs: Parity, verdict: Verdict) -> Finding:
    broken = verdict.broken
    name, said = (broken.name, broken.said) if broken is not None else ("", "")
    does = (
        "writes to an input that it does not declare"
        if broken is not None and broken.what == "writes"
        else ("gives something else than its fake implementation says")
    )
    return Finding(
        cause="operator_misdeclared",
        summary=f"the operator {name} {does}",
        measured=f"compiled, fit raises {verdict.raised.summary[:160]}" if verdict.raised else _measured(runs, verdict),
        shown_by=said,
        culprits=(name,),
        where=broken.place if broken is not None else "",
    )


def _stage(cause: str, what: str) -> Callable[[Parity, Verdict], Finding]:
    def worded(runs: Parity, verdict: Verdict) -> Finding:
        inside = f" of {verdict.module}" if verdict.module else ""
        alone = f"; compiled alone, {verdict.module} changes them as well" if verdict.module else ""
        return Finding(
            cause=cause,
            summary=f"{what}{inside} changes the gradients",
            measured=_measured(runs, verdict),
            shown_by=CHECKED[cause] + alone,
            culprits=_names(verdict),
            where=place(runs),
        )

    return worded


CHECKED = {
    "capture_differs": "with backend eager, which runs the captured graph by torch's own kernels, they differ, also "
    "compiled anew for each step",
    "traced_backward_differs": "with backend eager they agree, with aot_eager they do not; operators of the project's "
    "own keep to what they declare",
    "generated_code_differs": "with backends eager and aot_eager they agree, with the loop's own they do not",
}

_FINDINGS: dict[str, Callable[[Any, Any], Finding]] = {
    "result_dropped": _result_dropped,
    "compiling_raises": _compiling_raises,
    "copy_compiled": _copy_compiled,
    "prefix_hides_parameters": _prefix_hides_parameters,
    "other_computation": _other_computation,
    "wrapper_changes": _wrapper_changes,
    "drawn_again": _drawn_again,
    "asks_whether_compiled": _asks_whether_compiled,
    "stale_value": _stale_value,
    "operator_misdeclared": _operator_misdeclared,
    "capture_differs": _stage("capture_differs", "the graph that torch captures"),
    "traced_backward_differs": _stage("traced_backward_differs", "the backward pass that torch traces"),
    "generated_code_differs": _stage("generated_code_differs", "the code that is generated for the graph"),
}
