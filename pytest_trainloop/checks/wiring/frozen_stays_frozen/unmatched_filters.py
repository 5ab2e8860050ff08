"""What is to freeze and freezes nothing: filters that match no name, and an attribute that is set on a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.asked_names import AskedNames
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.instruments.tracing.unmatched_names import unmatched_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


def unmatched_filters(evidence: Evidence) -> Iterator[Finding]:
    """Patterns that freeze parameters which train, once they are answered yes for them."""
    record = evidence.shared(AskedNames.of).record
    trained = [p.name for p in record.parameters if p.trainable and p.role == "model" and p.declared] if record else []
    if record is None or any(map(record.declared_frozen, trained)):
        return  # still_trainable
    for one in unmatched_names(evidence, trained, _frozen):
        facts = {"patterns": some(one.patterns), "asked": one.asked}
        if one.nearly:
            yield found("freeze_matches_nothing", one.place, one.nearly, level="advice", repair=one.repair, **facts)
        else:
            yield found("freeze_matches_nothing", one.place, one.starts, "alone", level="advice", **facts)


def _frozen(record: Record, names: Sequence[str]) -> bool:
    return not {p.name for p in record.parameters if p.trainable}.intersection(names)


def set_on_modules(evidence: Evidence) -> list[str]:
    """The paths of the modules that have an attribute ``requires_grad`` of False."""
    modules = [m for prefix, root in evidence.fresh_loop().modules.items() for m in members.named_modules(root, prefix)]
    return [path for path, module in modules if vars(module).get("requires_grad") is False]


def attribute_of_a_module(evidence: Evidence) -> Iterator[Finding]:
    """``module.requires_grad = False`` makes an attribute that nothing reads: its parameters are trained."""
    record = evidence.run()
    moved = record.changed() & {i for o in record.optimizers for i in o.parameters}
    for path in evidence.shared(set_on_modules):
        below = [p for p in record.parameters if p.name.startswith(f"{path}." if path else "")]
        names = [p.name for p in below if p.index in moved and record.reached(p.index)]
        if names and not any(map(record.declared_frozen, names)):
            made = evidence.shared(MadeAt.of).set_at(f"{path}.requires_grad".lstrip("."))
            facts = {"path": path or "the model", "change": made, "level": "advice"}
            yield found("freeze_sets_an_attribute", made, names, **facts)
