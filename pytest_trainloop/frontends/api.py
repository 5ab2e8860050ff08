"""The battery without pytest, in a notebook or a script: ``check_loop``, ``check_loss`` and ``observe``."""

from __future__ import annotations

import contextlib
import pkgutil
import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.errors import CannotDecide, CheckFailed, OwnMistake, UsageError
from pytest_trainloop.core.finding import Result, UserError
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.judging.results import broken, checked, error_of, mistaken, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from os import PathLike

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.core.registry import Check
    from pytest_trainloop.core.report import Report
    from pytest_trainloop.declare.losscontract import LossContract
    from pytest_trainloop.declare.selection import Plan
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.views.loop_facts.page import Card


def check_loop(
    make: Callable[..., Any],
    *,
    only: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    knobs: Mapping[str, str] | None = None,
    seed: int = 0,
    hypothesis_seed: str = "",
    timeout: float = 120.0,
    budget: float | None = None,
    device: str = "auto",
    baseline: str | PathLike[str] | None = None,
    update: bool | Literal["new"] = False,
    strict: bool = False,
    preview: bool = False,
    raises: bool = True,
) -> Report:
    """Run the checks on one training loop, without pytest, in a notebook or a script.

    >>> report = check_loop(make_loop, skip={"step_order": "it accumulates gradients itself"})

    Parameters
    ----------
    make
        the function that a test would be: returns a fresh ``TrainLoop`` at every call; its keyword defaults are knobs
    only
        names or patterns of the checks to run; default: all
    skip
        reasons by name of a check (it is skipped) or ``check:cause`` (findings of that cause become advice)
    xfail
        reasons by name of a check or ``check:cause`` that is known to fail; strict
    options
        options by name of a check: ``{"overfit_one_batch": {"steps": 400}}``
    knobs
        the knob behind each parameter of ``make`` with another name: ``{"use_checkpoint": "checkpoint"}``
    seed
        seed of every build and every run, from 0 on
    hypothesis_seed
        as Hypothesis' option ``--hypothesis-seed``, for the search of a smallest batch: a number, or "random"; default:
        ``seed``
    timeout
        seconds that one run of ``fit`` may take; checks that need a longer run are skipped
    budget
        seconds that all checks may take: those that name most for their time go first, and the report says which were
        not looked at; default: ``timeout``, and at least 120
    device
        "cpu", "cuda" or "cuda:1": what the knob ``device`` is set to; "auto": its default
    baseline
        the file of the loop's baseline, which the check ``baseline`` compares the loop with; default: none, and the
        check is skipped
    update
        whether the check records the loop in this file instead: True in any case, "new" where there is no file yet
    strict
        whether advice fails the loop
    preview
        whether to report preview causes too
    raises
        whether a failure raises ``CheckFailed``

    Returns
    -------
    Report
        the result of every check; ``str(report)`` is the closing section

    Raises
    ------
    CheckFailed
        a check failed or met an exception of the loop's; the message has the failure texts
    UsageError
        what was given cannot be judged; one sentence says what was given and what is needed
    """
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.instruments.baselines.kept import given, store

    settings = Settings(
        seed=seed,
        hypothesis_seed=hypothesis_seed,
        timeout=timeout,
        budget=budget,
        device=device,
        preview=preview,
    )
    subject = _subject("check_loop", make, settings, knobs)
    plan = _plan("check_loop", of("loop"), only, skip, xfail, options, strict)
    subject.baseline = given(baseline, update, plan)
    results = _battery(subject, plan)
    store(subject.baseline, results)
    return _reported(subject.name, results, raises)


def check_loss(
    make: Callable[[], LossContract] | LossContract,
    *,
    only: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    hypothesis_seed: str = "",
    strict: bool = False,
    preview: bool = False,
    raises: bool = True,
) -> Report:
    """Run the checks of a loss function, without pytest, in a notebook or a script.

    >>> report = check_loss(LossContract(criterion=FocalLoss(), expects="logits", num_classes=10))

    Parameters
    ----------
    make
        a ``LossContract``, or the function that a test would be
    only, skip, xfail, options, strict, preview, raises
        as for ``check_loop``
    seed
        seed of the values that are drawn, from 0 on
    hypothesis_seed
        as for ``check_loop``, for the search of a violation

    Returns
    -------
    Report
        the result of every check; ``str(report)`` is the closing section

    Raises
    ------
    CheckFailed
        a check failed; the message has the failure texts
    UsageError
        the contract cannot be judged
    """
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.declare.losscontract import LossContract

    if not isinstance(make, LossContract) and (
        not callable(make) or isinstance(make, type) or hasattr(make, "forward")
    ):
        raise UsageError(f"check_loss got {_kind(make)}; a LossContract, or a function that returns one, is needed")
    plan = _plan("check_loss", of("loss"), only, skip, xfail, options, strict)
    given = make if callable(make) else lambda: make
    name = getattr(make, "__name__", "loss")
    settings = Settings(seed=seed, hypothesis_seed=hypothesis_seed, preview=preview)
    subject = Subject(name, given, settings=settings, judges="loss")
    return _reported(name, _battery(subject, plan), raises)


def card(
    make: Callable[..., Any],
    *,
    checks: bool | Sequence[str] = False,
    knobs: Mapping[str, str] | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    device: str = "auto",
) -> Card:
    """One page of facts about a training loop, without verdicts; ``str()`` of it is the page.

    >>> print(card(make_loop))

    Parameters
    ----------
    make, knobs, seed, timeout, device
        as for ``check_loop``
    checks
        whether all checks are run first, or names or patterns of some: those of ``evaluation_is_pure``,
        ``resume_equivalence`` and ``data_order`` are lines of the card

    Returns
    -------
    Card
        its ``lines`` have label, text, source line and whether something in them is unusual, which ``*`` marks in the
        text. A loop that cannot be run has a card of one line that says why

    Raises
    ------
    UsageError
        ``make`` is no function that can be called without arguments
    """
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.views.loop_facts.make import card_of

    subject = _subject("card", make, Settings(seed=seed, timeout=timeout, device=device), knobs)
    only = None if isinstance(checks, bool) else list(checks)
    results = _battery(subject, _plan("card", of("loop"), only, None, None, None, False)) if checks else []
    return card_of(subject, {result.check: result for result in results})


def _subject(caller: str, make: Callable[..., Any], settings: Settings, knobs: Mapping[str, str] | None) -> Subject:
    """The subject of a function that returns a ``TrainLoop``."""
    from pytest_trainloop.declare.knobs import read_knobs, require_defaults

    if not callable(make) or isinstance(make, type):
        raise UsageError(
            f"{caller} got {_kind(make)}; the function that returns a TrainLoop is needed, which is called for every "
            "run"
        )
    require_defaults(make, caller)
    return Subject(getattr(make, "__name__", "loop"), make, settings=settings, knobs=read_knobs(make, knobs))


def _battery(subject: Subject, plan: Plan) -> list[Result]:
    subject.announce({name: plan.options.get(name) for name in plan.checks if name not in plan.skip})
    return _by_plan(plan, lambda check, options: subject.run_check(check, options=options))


def _by_plan(plan: Plan, result_of: Callable[[str, Mapping[str, Any]], Result]) -> list[Result]:
    """The results of the plan's checks, each from its name and options, but for those that it leaves out."""
    return [
        Result(check=name, outcome="skipped", reason=plan.skip[name])
        if name in plan.skip
        else plan.judge(result_of(name, plan.options.get(name, {})))
        for name in plan.checks
    ]


def _plan(
    where: str,
    checks: Mapping[str, Check],
    only: Sequence[str] | None,
    skip: Mapping[str, str] | None,
    xfail: Mapping[str, str] | None,
    options: Mapping[str, Mapping[str, Any]] | None,
    strict: bool,
) -> Plan:
    from pytest_trainloop.declare.selection import choose, marker_selection

    known = {name: tuple(check.causes) for name, check in checks.items()}
    given: dict[str, Any] = {"only": only, "skip": skip, "xfail": xfail}
    selection = marker_selection(
        where, (), {k: v for k, v in given.items() if v is not None} | dict(options or {}), known
    )
    return choose(known, selection, strict=strict)


def _reported(name: str, results: Sequence[Result], raises: bool) -> Report:
    from pytest_trainloop.core.registry import registered
    from pytest_trainloop.core.report import Report
    from pytest_trainloop.core.report.text import failure_texts

    report = Report.of(name, results)
    if raises and not report.ok:
        bad = [r for r in results if r.outcome in ("failed", "error")]
        raise CheckFailed(failure_texts(bad, {r.check: registered()[r.check].proofs for r in bad}), results)
    return report


class Observation:
    """What ``observe`` recorded; complete once its block is left.

    >>> with observe(model, optimizer) as record:
    ...     train(model, optimizer, batches)
    >>> report = record.check("step_order", raises=False)
    """

    def __init__(self, watch: Watch, instruments: Mapping[Callable[..., Any], Any]) -> None:
        self._watch = watch
        self._instruments = instruments
        self._open = True
        self._began = time.perf_counter()

    def close(self) -> None:
        """Called when the block is left."""
        if self._open:
            self._seconds = time.perf_counter() - self._began
        self._open = False

    def check(
        self,
        *names: str,
        skip: Mapping[str, str] | None = None,
        xfail: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        strict: bool = False,
        raises: bool = True,
    ) -> Report:
        """Judge the observed block by the named checks, or by all. Checks that must run the loop again are skipped.

        Parameters
        ----------
        names
            names or patterns of checks
        skip, xfail, options, strict, raises
            as for ``check_loop``

        Raises
        ------
        CheckFailed
            a check failed, unless ``raises=False``; the message has the failure texts
        UsageError
            there is no such check, nothing trained in the block, or the block has not been left yet
        """
        from pytest_trainloop.core.registry import of

        require_names(names, of("loop"))
        plan = _plan("record.check()", of("loop"), list(names) or None, skip, xfail, options, strict)
        return self.judged(plan, raises=raises)

    def judged(
        self,
        plan: Plan,
        *,
        raises: bool = True,
        name: str = "observed",
        shared: Mapping[Callable[..., Any], Any] = MappingProxyType({}),
    ) -> Report:
        """The report by this plan, on a loop of this name; raises as ``check`` does. ``shared`` is what else the checks
        find by ``evidence.shared``."""
        from pytest_trainloop.core.registry import of
        from pytest_trainloop.runs.single_run import SingleRun

        if self._open:
            raise UsageError("record.check() is called inside the block that it judges; call it after the block")
        evidence = SingleRun(self._watch.record, {**self._instruments, **shared})
        checks = of("loop")
        results = _by_plan(plan, lambda name, options: _once(checks[name], evidence, options))
        if results:  # the observed run counts once, as the watched one does for the first check that needs it
            results[0] = replace(results[0], steps=self._watch.record.steps, seconds=self._seconds)
        if not any(result.faults for result in results) and nothing_trained(self._watch.record):
            raise UsageError(
                f"nothing trained in the observed block: {len(self._watch.record.backwards())} backward passes and no "
                "optimizer step were seen, and no weight changed; run the training code inside the block, in this "
                "process"
            )
        return _reported(name, results, raises)


def require_names(names: Sequence[str], known: Collection[str]) -> None:
    """Raise ``UsageError`` for a name or pattern that no check has."""
    from fnmatch import filter as matching

    from pytest_trainloop.declare.knobs import nearest

    for name in names:
        if not isinstance(name, str) or not matching(known, name):
            hint = nearest(name, known) if isinstance(name, str) else "names of checks are needed"
            raise UsageError(f"there is no check named {name!r}; {hint}")


def nothing_trained(record: Record) -> bool:
    """Whether no step was made or tried and no weight changed; not where what trains is not known (plain tensors)."""
    unknown = bool(record.backwards()) and not record.parameters
    tried = record.steps or record.scaler_calls()
    return not (unknown or tried or record.moved_outside_steps() or record.changed())


def _once(check: Check, evidence: Any, options: Mapping[str, Any]) -> Result:
    """The result of a check on one run; a mistake of this package's own is an error, as in the battery."""
    absent = sorted(check.needs - evidence.offers)
    if absent:
        return skipped(
            check, CannotDecide(f"watching once does not offer {absent[0]}: return a TrainLoop from a marked test")
        )
    findings: list[Finding] = []
    verdict: CannotDecide | OwnMistake | UserError | None = None
    try:
        for finding in check.decide(evidence, **options):
            findings.append(checked(check, finding, evidence))  # noqa: PERF401 - those before an exception are kept
    except UsageError:
        raise
    except CannotDecide as reason:
        verdict = reason
    except Exception as error:
        verdict = broken(check, error)
    if isinstance(verdict, UserError):
        return error_of(check, verdict)
    if isinstance(verdict, OwnMistake):
        return mistaken(check, verdict)
    if verdict is not None and not findings:  # what was shown before stays shown, whatever further runs would add
        return skipped(check, verdict)
    failed = any(f.level == "fault" for f in findings)
    return Result(check=check.name, outcome="failed" if failed else "passed", findings=tuple(findings))


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Observe any training code, unchanged, through torch's own hooks.

    >>> with observe() as record:
    ...     main(["--config", "tiny.yaml"])
    >>> report = record.check()

    Parameters
    ----------
    model
        a module, or a dict of modules by name; default: found from what runs
    optimizer
        one, or a list; default: found from what runs

    Yields
    ------
    Observation
        to be judged by its ``check()`` after the block

    Raises
    ------
    UsageError
        ``model`` is no module or dict of modules, or ``optimizer`` is no optimizer
    """
    from pytest_trainloop.recording.watch import Watch

    modules, optimizers = _declared(model, optimizer)
    with observed(Watch(modules, optimizers)) as observation:
        yield observation


@contextlib.contextmanager
def observed(watch: Watch) -> Iterator[Observation]:
    """What ``observe`` does, by this watch."""
    from pytest_trainloop.core.registry import of
    from pytest_trainloop.recording.mistakes import Leaving

    kinds = filter(None, (_instrument(check.instrument) for check in of("loop").values() if check.instrument))
    instruments = {kind.of: kind() for kind in kinds}
    with watch, contextlib.ExitStack() as around:
        for instrument in instruments.values():
            for context in instrument.contexts(watch):
                around.enter_context(Leaving(context))
        around.enter_context(_items_made_aside(watch))
        observation = Observation(watch, instruments)
        try:
            yield observation
        finally:
            observation.close()


def _instrument(name: str) -> Any:
    """The class; None where numpy is missing, without which its check skips."""
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as missing:
        if missing.name != "numpy":
            raise
        return None


@contextlib.contextmanager
def _items_made_aside(watch: Watch) -> Iterator[None]:
    """What a data set calls as it makes the items of a batch is not looked at: workers of a loader do the same unseen,
    and to look at thousands of small calls takes longer than the step."""
    from pytest_trainloop.recording.patches import Patches
    from pytest_trainloop.recording.torch_internals import FETCHERS

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
            with watch.data_is_drawn():
                return original(fetcher, index)

        return fetch

    with Patches() as patches:
        for kind in FETCHERS:
            patches.put(kind, "fetch", around)
        yield


def _declared(model: Any, optimizer: Any) -> tuple[dict[str, Any], list[Any]]:
    """What ``observe`` is given, by the rules of the fields of a ``TrainLoop``."""
    from pytest_trainloop.declare.fields import named_modules, require_optimizers

    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    require_optimizers(optimizers, "observe(optimizer=...)")
    return ({} if model is None else named_modules(model, "observe(model=...)")), optimizers


def _kind(value: Any) -> str:
    from pytest_trainloop.declare.fields import a

    return a(value)
