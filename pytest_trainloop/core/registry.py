"""The registry of checks: a check is a function from evidence to findings, plus data about it.

Every ``checks/<family>/<name>/check.py`` is imported, and registers the check of its folder's name. None of these files
imports torch at module top.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.core.wording import filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pytest_trainloop.core.finding import Finding

    Property = Callable[..., Iterable[Finding]]
    Absent = Callable[[Any], str]

Judged = Literal["loop", "loss"]
"""What a check judges: a ``TrainLoop``, or a ``LossContract``."""

Status = Literal["stable", "preview"]
"""A preview cause is reported with ``--trainloop-preview`` only: no public case of it is known, or it may change."""

Part = Literal[
    "seen",
    "optimizer",
    "group",
    "step",
    "option",
    "count of steps",
    "freeze",
    "scheduler",
    "scaler",
    "loader",
    "cast",
    "cast before",
    "loss before",
    "padding before",
    "reduction before",
    "first argument",
    "asked",
    "module",
    "layer",
    "forward",
    "backward",
    "data",
    "filled",
    "labels",
    "ids",
    "carried",
    "entry",
    "written in forward",
    "cast in place",
    "sorting",
    "mask",
    "padding mask",
    "positions",
    "loss",
    "names",
    "names of freeze",
    "bound of clip",
    "copied",
    "given",
    "network",
    "backpropagated",
    "without gradients",
    "use",
    "end of evaluation",
    "end of saving",
    "sampler",
    "drawn",
    "index",
    "index of data",
    "collated",
    "groups",
    "thawed",
    "loaded",
    "source of draws",
    "use of the score",
    "no_sync",
    "subtracted",
    "part of the loss",
    "criterion",
    "class weights",
    "targets",
    "overwritten",
    "attribute",
    "stepped",
    "condition",
    "wrapper",
    "seed",
    "own backward",
    "call of helper",
    "parts",
]
"""What a line belongs to: where the fault is "seen"; what built the optimizer, gave it a group, froze a parameter,
built the scheduler, the scaler or the data loader, cast the weights, made the module, made the layer of torch that an
operation lies in; the ``forward`` that holds the parameters and the optimizer's ``step``, where they are the project's
own; the first backward pass; what made the tensor of the batch that is among the finding's names, or "filled" all
entries of one value in it; by the source,
what made the mask, the positions, the loss, the list of names, the bound of a clip, the state that is copied, the
network or the argument of the function that the line uses where it is seen; the last draw of a weight; the end of
``evaluate`` or ``save``; the sampler of the loader; what made the loss that is backpropagated; what switches gradients
off around the line; the line of ``forward`` that uses the parameter; what made the index by which the line chooses
rows, or by which the batch was chosen, and the line that put its rows together; what made the groups of an optimizer;
the last line that switched ``requires_grad`` on, or loaded weights; what made the generator that the line draws from;
what reads the score that the line makes; what made the targets that the line compares; what gives the name of the line
another value; what built the criterion that the line calls, and made its weights; the ``with``
of ``no_sync()`` around the line; what made the value that the line subtracts, and the part
of the loss of the finding's name; the last line that set the attribute of a module; what
made the optimizer that the line steps, in the same function; the condition that the line is under; the only line of the
file that wraps a model in DistributedDataParallel, or that seeds torch; what the ``backward`` of an autograd function
of the project's returns; the call of the line's function in the one that steps an optimizer; what the loop's ``parts``
returns. Of an optimizer of the project's own what reads an "option" or the "count of steps"; what made the "labels" or
"ids" of the batch, and the "sorting" before it; what a function "carried" from step to step, or read first of what it
is given ("entry"); what cast, padded or reduced a value, or called a loss, "before" the line reads it; the only line
that "asked" names for a pattern that none has; the line where it is in ``forward``; the copy that it casts."""

FAMILIES = ("wiring", "loss", "numerics", "batch", "learning", "state", "scale", "guard", "loss_function", "project")
"""The families in causal order: a fault in an earlier one may explain failures in a later one.

Each is a folder in ``checks``, except "project", the family of checks that are registered elsewhere."""

_CHECKS = "pytest_trainloop.checks"

_ROW = re.compile(r"^ *\|[^\n]*(?:\n +[^|\s][^\n]*)+", re.MULTILINE)
"""A row of a table that goes on in further lines of a rule page."""

DEFAULT_STEPS = 20
"""Bare optimizer steps that a check costs where it does not say how many."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One fault that a check can name.

    >>> never_zeroed = Cause(proof="no zero_grad() between two steps", repair="optimizer.zero_grad()")
    """

    proof: str
    """The observation that separates this cause from its neighbours."""
    repair: str = ""
    """What to write, one line first, then alternatives. A finding that knows more of the loop gives its own."""
    change: tuple[Part, ...] = ()
    """Which line is to change, the first of these that is known. A finding that knows it gives its own."""
    do_not: str = ""
    """A common repair that only silences the check, and why."""
    settle: str = ""
    """What to declare or write if the observed code is intended: shown with advice."""
    judged: str = ""
    """What to declare or give so that the check decides: shown with advice."""
    explains: tuple[str, ...] = ()
    """Checks, or ``check:cause``, whose failure follows from this one. No cause explains itself by way of others."""
    summary: str = ""
    """The first sentence of its findings: a template over their facts (``wording.filled``), as the next two are."""
    measured: str = ""
    """What was measured, with the limit."""
    shown_by: str = ""
    """The proof, where it is empty."""
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Other texts of findings of this cause, by the name that ``found`` is given."""
    source: str = ""
    """The address of a public issue, pull request, paper or documentation page where it happened."""
    status: Status = "stable"


@dataclass(frozen=True, slots=True)
class Check:
    """One registered check."""

    name: str
    decide: Property
    family: str
    rank: int
    needs: frozenset[str]
    """Fields of its subject without which it is skipped; "fit" is met by ``fit`` or ``step``."""
    causes: Mapping[str, Cause]
    page: str
    """Its rule page: the docstring of its module, or for a project's check of its function."""
    module: str
    subject: Judged = "loop"
    options: tuple[str, ...] = ()
    """Keywords that its function takes besides the evidence, as a project may set them."""
    instrument: str = ""
    """What ``observe()`` opens during its single run for this check, as ``module:class``."""
    listener: str = ""
    """What listens to the second run for this check, in the same form."""
    names: str = "operation"
    """What a name among a finding's culprits is that is no parameter, buffer, module, input or call."""
    long: bool = False
    """Whether it makes long runs: it is not asked what made ``fit`` raise."""
    steps: int = DEFAULT_STEPS
    """What it costs on a right loop besides the watched run, in bare optimizer steps, by order of magnitude."""
    absent: Absent | None = None
    """Says, of a loop on which it found nothing, why there was nothing of its kind to look at; empty if there was."""

    @property
    def worth(self) -> float:
        """Causes that it can name for each step that it costs: what a budget of time goes by."""
        return len(self.causes) / (1 + self.steps)

    @property
    def proofs(self) -> dict[str, str]:
        """The observation behind each cause, as failure texts show it."""
        return {slug: cause.proof for slug, cause in self.causes.items()}

    @property
    def previews(self) -> frozenset[str]:
        """Its causes that are reported with ``--trainloop-preview`` only."""
        return frozenset(slug for slug, cause in self.causes.items() if cause.status == "preview")

    @property
    def headline(self) -> str:
        """The first line of the rule page."""
        return self.page.strip().partition("\n")[0].rstrip(".")


WORDED = frozenset({"summary", "measured", "shown_by", "repair", "tried", "do_not"})
"""The texts of a finding that a variant of its cause may word otherwise."""

GIVEN = frozenset({"level", "kinds", "change", "repair", "tried", "explains", "shown_by", "smallest", "composition"})
"""Fields of a finding that whoever finds it may know better than its cause."""


def finding_maker(causes: Mapping[str, Cause]) -> Callable[..., Finding]:
    """A function that makes the findings of these causes.

    ``found("stepped_twice", step, names, steps=12)`` takes the cause, where it was seen (an event, or a place), the
    culprits, and the facts of its templates; ``variant`` names other texts of the cause. ``level=`` and the like are
    fields of the finding.
    """

    def found(cause: str, at: Any, culprits: Iterable[str] = (), variant: str = "", **facts: Any) -> Finding:
        from pytest_trainloop.core.finding import Finding

        known = causes[cause]
        given = {name: facts.pop(name) for name in GIVEN & facts.keys()}
        facts["names"] = names = tuple(culprits)
        texts = {name: getattr(known, name) for name in ("summary", "measured", "shown_by")}
        texts |= known.variants[variant] if variant else {}
        words = {name: filled(text, facts) for name, text in texts.items()}
        words["shown_by"] = words["shown_by"] or known.proof
        where = str(getattr(at, "place", at) or "")
        return Finding(**{"cause": cause, "culprits": names, "where": where, **words, **given})

    return found


_registered: dict[str, Check] = {}


def check(
    *,
    causes: Mapping[str, str | Cause],
    needs: Iterable[str] = (),
    rank: int = 100,
    subject: Judged = "loop",
    instrument: str = "",
    listener: str = "",
    names: str = "operation",
    long: bool = False,
    steps: int = DEFAULT_STEPS,
    absent: Absent | None = None,
) -> Callable[[Property], Property]:
    """Register a function from evidence to findings as a check of the function's name.

    Its keyword-only parameters are options that a project may set, as in ``overfit_one_batch={"steps": 400}``.

    >>> @check(needs={"fit"}, causes={"too_few_steps": "fewer than two optimizer steps in the record"})
    ... def steps_at_all(evidence): ...

    Parameters
    ----------
    causes
        each cause that the check may name: a ``Cause``, or the observation that proves it. A finding of any other
        cause is an error
    needs
        fields of the ``TrainLoop`` without which the check is skipped; "fit" is met by ``fit`` or ``step``
    rank
        the place among the checks of one family, lowest first
    subject
        "loop", or "loss" for a property of a loss function
    instrument, listener
        what must record during the single run of ``observe()``, and what listens to the second run: ``module:class``
    names
        what a culprit is that is no parameter, buffer, module, input or call: "attribute" of the state of a loop
    long
        whether the check makes long runs: it is not asked what made ``fit`` raise
    steps
        what the check costs on a right loop besides the watched run, in bare optimizer steps. Where time is short,
        checks with few causes for their cost are left out first
    absent
        a function from evidence to the reason why the loop has nothing of the check's kind ("no GradScaler is
        called"), or to an empty text if it has. It is asked where the check found nothing: with a reason the check
        does not apply, without one it passed

    Raises
    ------
    ValueError
        there are no causes, or another module has registered a check of this name
    """
    if not causes:
        raise ValueError("a check needs at least one cause: causes={'slug': 'the observation that proves it'}")

    def register(function: Property) -> Property:
        name, module = function.__name__, function.__module__
        earlier = _registered.get(name)
        if earlier is not None and earlier.module != module:
            raise ValueError(f"a check named {name!r} is already registered by {earlier.module}")
        ours = module.startswith(f"{_CHECKS}.")
        parameters = inspect.signature(function).parameters.values()
        page = inspect.getdoc(inspect.getmodule(function) if ours else function)
        _registered[name] = Check(
            name=name,
            decide=function,
            family=module.split(".")[2] if ours else "project",
            rank=rank,
            needs=frozenset(needs),
            causes={slug: Cause(given) if isinstance(given, str) else given for slug, given in causes.items()},
            page=_ROW.sub(lambda row: re.sub(r"\n +", " ", row[0]), page or name),
            module=module,
            subject=subject,
            options=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
            instrument=instrument,
            listener=listener,
            names=names,
            long=long,
            steps=steps,
            absent=absent,
        )
        return function

    return register


def registered() -> dict[str, Check]:
    """Every check by name, in causal order: ours, and those that the project has registered so far."""
    _import_ours()
    return dict(sorted(_registered.items(), key=lambda kv: (*_place(kv[1]), kv[0])))


@functools.cache
def _import_ours() -> None:
    """Once a process: to read the folders takes longer than some checks."""
    for family in pkgutil.iter_modules(importlib.import_module(_CHECKS).__path__, f"{_CHECKS}."):
        for found in pkgutil.iter_modules(importlib.import_module(family.name).__path__, f"{family.name}."):
            if found.ispkg:
                importlib.import_module(f"{found.name}.check")


def of(subject: Judged) -> dict[str, Check]:
    """The checks that judge one kind of subject, in causal order."""
    return {name: check for name, check in registered().items() if check.subject == subject}


def _place(check: Check) -> tuple[bool, int, int]:
    return check.subject == "loss", FAMILIES.index(check.family), check.rank
