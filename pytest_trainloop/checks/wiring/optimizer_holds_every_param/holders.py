"""What optimizers hold, what they do not hold, and what is said of it."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.optimizer_holds_every_param.causes import found
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.made_at import MadeAt, class_line
from pytest_trainloop.runs.further_runs import longer_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Optimizer, Parameter, Record
    from pytest_trainloop.runs.evidence import Evidence

    Pair = tuple[str, str]
    """The paths of a copy and of what it was copied from."""

PASSES_OF_A_PART = 3
"""Backward passes that must reach a parameter of a module nobody declared: copies made for one step (an unrolled model,
the model of a client) are no parts of the model."""


def held_twice(evidence: Evidence, record: Record) -> Iterator[Finding]:
    """Findings about tensors that the groups of an optimizer hold more than once."""
    for optimizer in record.optimizers:
        held = Counter(optimizer.parameters)
        if names := record.names([i for i, n in held.items() if n > 1]):
            line, change = _first_step(record, optimizer.index), evidence.shared(MadeAt.of).group(optimizer.index)
            facts = {"kind": optimizer.kind, "entries": held.total(), "count": len(held), "change": change}
            yield found("held_twice", line, names, **facts)


def missing_parameters(record: Record) -> list[Parameter]:
    """Parameters that train nowhere: a gradient arrives, no optimizer holds them and nothing else moves them."""
    held, moved = record.held, record.moved_outside_steps()
    missing = []
    for p in record.parameters:
        if p.role == "foreign" or p.index in held or record.declared_frozen(p.name):
            continue
        passes = sum(any(not a.incoming.zero for a in b.arrivals.get(p.index, ())) for b in record.backwards())
        if passes < (1 if p.declared else PASSES_OF_A_PART):
            continue
        if p.index in moved or not p.start.same(record.end.get(p.index)):
            continue  # the loop steps it by hand (odd: one_parameter_updated_by_hand)
        # in eval mode while the rest trains: a fixed part (odd: loss_network_outside_the_model)
        in_eval = p.calls_with_grad > 0 and p.calls_in_eval == p.calls_with_grad
        if not in_eval or not any(q.calls_with_grad > q.calls_in_eval for q in record.parameters if q is not p):
            missing.append(p)
    pairs, targets = pairs_of_copies(record, missing), set[int]()
    for network in _unheld_networks(record, missing):
        known = [p for p in network if not p.uniform]
        if known and all(p.index in pairs for p in known):
            targets |= {p.index for p in network}  # (odd: target_loaded_every_twenty_episodes)
    missing = [p for p in missing if p.index not in targets]
    # gradients that are only zero so far, in modules of missing ones (LoRA's A behind a zero B)
    modules, known_ones = {(p.owner, p.role) for p in missing}, held.keys() | {p.index for p in missing}
    others = [p for p in record.parameters if (p.owner, p.role) in modules and p.index not in known_ones]
    return missing + [p for p in others if any(True for _ in record.arrivals(p.index))]


def pairs_of_copies(record: Record, missing: Sequence[Parameter]) -> dict[int, Pair]:
    """By missing parameter, the outermost parts in which it and a trained parameter had the same values, bit for bit,
    and have one place. A copy is brought up to date every thousand steps as often as every ten: nothing which a run of
    a few steps leaves out is held against it."""
    held, pairs = record.held, {}
    for p in missing:
        options = []
        for i in sorted(p.equals):
            if i in held and record.reached(i):
                ours, theirs = path(p).split("."), path(record.parameters[i]).split(".")
                while ours and theirs and ours[-1] == theirs[-1]:
                    ours.pop()
                    theirs.pop()
                options.append((".".join(ours), ".".join(theirs)))
        copy, original = min(options, key=lambda pair: len(pair[0]), default=("", ""))
        (holder, _, last), (other, _, other_last) = copy.rpartition("."), original.rpartition(".")
        # layers of one list are often made by deepcopy of the first, and all train (pair: cloned_layers_forgotten)
        of_one_list = holder and holder == other and last.isdigit() and other_last.isdigit()
        if options and not of_one_list:
            pairs[p.index] = copy, original
    return pairs


def _unheld_networks(record: Record, missing: Sequence[Parameter]) -> list[list[Parameter]]:
    """The missing parameters of each network that is called from outside any module and of which no optimizer holds a
    part (odd: target_chosen_by_a_word)."""
    called = {f.below for f in record.root_forwards() if f.below.isdisjoint(record.held)}
    return [network for below in called if (network := [p for p in missing if p.index in below])]


def left_over(record: Record) -> list[Parameter]:
    """Held tensors that no gradient reaches and that are in no module that ran: what is declared does not count where
    other modules ran instead of it (pair: copy_made_inside_fit)."""
    ran = [p for p in record.parameters if p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint]
    indices, some_undeclared = {p.index for p in ran}, any(not p.declared for p in ran)
    silent = [record.parameters[i] for i in sorted(record.held) if not record.reached(i)]
    return [p for p in silent if p.role == "foreign" or p.gone or (some_undeclared and p.index not in indices)]


def path(p: Parameter) -> str:
    """Its name in the model, which several may have had one after another."""
    return p.name.partition(" (")[0]


def not_registered(evidence: Evidence, names: Sequence[str]) -> Iterator[Finding]:
    """One finding for each class of plain objects that carry them, and one for those in lists, tuples and dicts."""
    if not names:
        return
    made, line = evidence.shared(MadeAt.of), evidence.run().step_line()
    by_class: dict[type | None, list[str]] = {}
    for name in names:
        within = made.plain_object(name)
        by_class.setdefault(within and within.kind, []).append(name)
    for kind, group in by_class.items():
        within, change = made.plain_object(group[0]), made.attribute(group[0])
        facts: dict[str, Any] = {"count": len(group)}
        if within is None or kind is None:
            yield found("not_registered", line, group, change=change, **facts)
            continue
        begins = class_line(kind)
        header = re.fullmatch(r"class (\w+)(?:\((.*)\))?:.*", code_of(begins))
        container = dataclasses.is_dataclass(kind) or issubclass(kind, (tuple, list, dict))
        bases = [base for base in (header[2] or "").split(", ") if base not in ("", "object")] if header else []
        lists = "[" in within.path or any("[" in name.removeprefix(within.path) for name in group)
        facts |= {"path": within.path, "kind": kind.__name__, "bases": ", ".join(["nn.Module", *bases])}
        facts |= {"called": "__call__" in vars(kind), "lists": lists, "change": begins or change}
        variant = "other object" if header is None or container else "class of the project"
        yield found("not_registered", line, group, variant, **facts)


def replaced(evidence: Evidence, record: Record, missing: Sequence[Parameter], stale: Sequence[Parameter]) -> Finding:
    """The finding about parameters that replaced those which the optimizer holds."""
    made, held, names = evidence.shared(MadeAt.of), record.held, [p.name for p in missing]
    line = _first_step(record, held[stale[0].index][0])
    facts = {"held": len(stale), "count": len(names), "change": made.optimizer(held[stale[0].index][0])}
    if not any(map(record.reached, held)):
        return found("stale_copy", line, names, **facts)
    shapes, owner = some([str(p.shape) for p in stale], most=3), missing[0].owner
    return found("swapped_after_optimizer", line, names, shapes=shapes, owner=owner, new=made.module(owner), **facts)


def left_out(evidence: Evidence, record: Record, missing: Sequence[Parameter]) -> Iterator[Finding]:
    """Findings about parameters that no optimizer was given."""
    trained = [i for i in record.held if record.reached(i)]
    outside = bool(trained) and all(record.parameters[i].role == "foreign" for i in trained)
    arrives = any(True for i in trained for _ in record.arrivals(i))
    # user code assigns the gradients of what is stepped: master weights, one flat vector
    if masters := outside and not arrives:
        names, longer = {p.name for p in missing}, evidence.shared(longer_run)
        if names & set(longer.names(longer.changed())):
            return  # written into the model after more steps than were watched (odd: keeping_masters_by_hooks)
    made, indices = evidence.shared(MadeAt.of), {p.index for p in missing}
    trainable = sum(p.role != "foreign" and (p.requires_grad or p.index in indices) for p in record.parameters)
    pairs = pairs_of_copies(record, missing) if record.frozen is None else {}
    copied: dict[int, Pair] = {}
    for pair in dict.fromkeys(pairs.values()):
        # a part counts only as a whole (pair: head_that_began_as_a_copy_forgotten)
        part = [p for p in missing if path(p).startswith(f"{pair[0]}.")]
        if all(pair) and all(p.index in pairs for p in part if not p.uniform):
            copied |= {p.index: pair for p in part}

    def said(group: list[Parameter], variant: str, **facts: Any) -> Finding:
        own = group[0].name.split(".")

        def shared(name: str) -> int:
            return sum(itertools.accumulate(map(operator.eq, name.split("."), own), operator.and_))

        indices, held = {p.index for p in group}, record.held
        reached = [b.at for b in record.backwards() if indices & set(b.arrivals)]
        steps = record.innermost_steps()
        next_steps = Counter(next((s.optimizer for s in steps if s.at > at), -1) for at in reached)

        def fits(optimizer: Optimizer) -> tuple[int, int]:
            # one that holds only what another holds too was given the wrong network
            wrong = all(len(held[i]) > 1 for i in optimizer.parameters) and len(record.optimizers) > 1
            near = max(map(shared, record.names(optimizer.parameters)), default=0)
            return (next_steps[optimizer.index] if wrong else 0), near

        nearest = max(record.optimizers, key=fits)
        facts |= {
            "change": made.thawed([p.name for p in group]) or made.group(nearest.index),
            "count": len(group),
            "trainable": trainable,
        }
        line = _first_step(record, nearest.index) or record.step_line()
        return found("not_in_optimizer", line, [p.name for p in group], variant, **facts)

    if copied:
        copy, original = next(iter(copied.values()))
        facts = {"copy": copy, "original": original, "steps": record.rounds, "level": "advice"}
        yield said([p for p in missing if p.index in copied], "copied part", **facts)
    if rest := [p for p in missing if p.index not in copied]:
        # a net that was not declared as the model (odd: super_resolution), or a model around an optimised image
        intended = any(p.declared for p in record.parameters) and not any(p.declared for p in rest)
        intended |= outside and arrives
        if not intended:  # (odd: teacher_loaded_from_a_state_dict)
            loaded = [n for n in _unheld_networks(record, rest) if all(made.loaded(p.name) for p in n)]
            intended = {p.index for p in rest} <= {p.index for network in loaded for p in network}
        level = "advice" if intended and record.frozen is None else "fault"
        yield said(rest, "masters" if masters else "", level=level)


def _first_step(record: Record, optimizer: int) -> str:
    return next((str(s.place) for s in record.innermost_steps() if s.optimizer == optimizer), "")
