"""The battery without pytest, in a notebook or a script: ``check_loop``, ``check_loss`` and ``observe``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pytest_trainloop.battery import Settings, Subject, checked
from pytest_trainloop.errors import CannotDecide, CheckFailed, UsageError
from pytest_trainloop.finding import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.checks.loss.loss_contract.recorder import Contracts
    from pytest_trainloop.losscontract import LossContract
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.registry import Check
    from pytest_trainloop.report import Report
    from pytest_trainloop.selection import Plan


def check_loop(
    make: Callable[..., Any],
    *,
    only: Sequence[str] | None = None,
    skip: Mapping[str, str] | None = None,
    xfail: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    knobs: Mapping[str, str] | None = None,
    seed: int = 0,
    timeout: float = 120.0,
    device: str = "auto",
    strict: bool = False,
    raises: bool = True,
) -> Report:
    """The battery on one loop, without pytest, in a notebook or a script.

    ``make`` is the function that a test would be: it returns a fresh ``TrainLoop``, its keyword defaults are knobs;
    ``device`` is what its knob of that name is set to. Returns the report
    (``str()`` is the closing section). Raises ``CheckFailed`` with the failure texts unless ``raises=False``, and
    ``UsageError`` for what cannot be judged.

    >>> report = check_loop(make_loop, skip={"step_order": "accumulates by hand"})
    """
    from pytest_trainloop.knobs import read_knobs
    from pytest_trainloop.registry import of

    plan = _plan("check_loop", of("loop"), only, skip, xfail, options, strict)
    name, settings = getattr(make, "__name__", "loop"), Settings(seed=seed, timeout=timeout, device=device)
    subject = Subject(name, make, settings=settings, knobs=read_knobs(make, knobs))
    return _reported(name, _battery(subject, plan), raises)


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
    raises: bool = True,
) -> Report:
    """Every property of a loss function, without pytest, in a notebook or a script.

    ``make`` is a ``LossContract``, or the function that a test would be. Returns the report and raises as
    :func:`check_loop` does.

    >>> report = check_loss(LossContract(criterion=FocalLoss(), expects="logits", num_classes=10))
    """
    from pytest_trainloop.registry import of

    plan = _plan("check_loss", of("loss"), only, skip, xfail, options, strict)
    given = make if callable(make) else lambda: make
    name = getattr(make, "__name__", "loss")
    settings = Settings(seed=seed, hypothesis_seed=hypothesis_seed)
    subject = Subject(name, given, settings=settings, judges="loss")
    return _reported(name, _battery(subject, plan), raises)


def _battery(subject: Subject, plan: Plan) -> list[Result]:
    results = []
    for check in plan.checks:
        if check in plan.skip:
            results.append(Result(check=check, outcome="skipped", reason=plan.skip[check]))
        else:
            results.append(plan.judge(subject.run_check(check, options=plan.options.get(check, {}))))
    return results


def _plan(
    where: str,
    checks: Mapping[str, Check],
    only: Sequence[str] | None,
    skip: Mapping[str, str] | None,
    xfail: Mapping[str, str] | None,
    options: Mapping[str, Mapping[str, Any]] | None,
    strict: bool,
) -> Plan:
    from pytest_trainloop.selection import choose, marker_wishes

    known = {name: tuple(check.causes) for name, check in checks.items()}
    given: dict[str, Any] = {"only": only, "skip": skip, "xfail": xfail}
    wishes = marker_wishes(where, (), {k: v for k, v in given.items() if v is not None} | dict(options or {}), known)
    return choose(known, wishes, strict=strict)


def _reported(name: str, results: Sequence[Result], raises: bool) -> Report:
    from pytest_trainloop.registry import registered
    from pytest_trainloop.report import Report
    from pytest_trainloop.report.text import failure_text

    report = Report.of(name, results)
    if raises and not report.ok:
        bad = [r for r in results if r.outcome in ("failed", "error")]
        raise CheckFailed("\n\n".join(failure_text(r, registered()[r.check].proofs) for r in bad), results)
    return report


class Observation:
    """What ``observe`` watched; ``record`` is complete when its block is left."""

    def __init__(self, watch: Watch, contracts: Contracts) -> None:
        self._watch = watch
        self._contracts = contracts

    def check(self, *names: str, raises: bool = True) -> Report:
        """Judge what was watched by all checks that need only a watched run, or by the named ones.

        Raises ``CheckFailed`` with the failure texts unless ``raises=False``.
        """
        from pytest_trainloop.knobs import nearest
        from pytest_trainloop.registry import of
        from pytest_trainloop.runs.single_run import WatchedOnce

        checks = of("loop")
        for name in names:
            if name not in checks:
                raise UsageError(f"there is no check named {name!r}; {nearest(name, checks)}")
        evidence = WatchedOnce(self._watch.record, self._contracts)
        results = [_once(check, evidence) for check in checks.values() if not names or check.name in names]
        return _reported("observed", results, raises)


def _once(check: Check, evidence: Any) -> Result:
    absent = sorted(check.needs - evidence.offers)
    if absent:
        return Result(
            check=check.name,
            outcome="skipped",
            reason=f"watching once does not offer {absent[0]}: return a TrainLoop from a marked test",
        )
    try:
        findings = tuple(checked(check, finding) for finding in check.decide(evidence))
    except CannotDecide as reason:
        return Result(check=check.name, outcome="skipped", reason=str(reason))
    failed = any(f.level == "fault" for f in findings)
    return Result(check=check.name, outcome="failed" if failed else "passed", findings=findings)


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Watch any training code, unchanged, through torch's own hooks; model and optimizer are found from what runs.

    >>> with observe() as record:
    ...     main(["--config", "tiny.yaml"])
    >>> record.check()
    """
    from pytest_trainloop.checks.loss.loss_contract.recorder import Contracts
    from pytest_trainloop.recording.watch import Watch

    modules = {} if model is None else model if isinstance(model, dict) else {"": model}
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    watch, contracts = Watch(modules, optimizers), Contracts()
    observation = Observation(watch, contracts)
    with watch, contextlib.ExitStack() as around:
        for context in contracts.contexts(watch):
            around.enter_context(context)
        yield observation
