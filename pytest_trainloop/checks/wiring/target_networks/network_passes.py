"""Which network runs at which line, what its results go into, and which copy of a network is never brought up to date.

A network is what user code calls, by its parameters; of a module that holds several, what it calls in turn.
"""

from __future__ import annotations

import ast
import contextlib
import re
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.target_networks.causes import found
from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.syntax import nodes_within, source_of
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.runs.further_runs import longer_run
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

LEAST_STEPS = 3
"""Steps in which one copy moves and another does not, and in which a line runs the trained network."""

Network = tuple[str, ...]
"""The names of its parameters, in its own order."""

Calls = tuple[str, ...]
"""Of torch, that were made of a network's results."""


@dataclass(frozen=True, slots=True)
class Pass:
    step: int
    network: Network
    line: str
    file: str


class NetworkPasses:
    """What a run made in ``watching`` shows."""

    def __init__(self, held: frozenset[str]) -> None:
        self._held = held
        self.names: dict[Network, str] = {}
        self.without_gradients: list[Pass] = []
        self.meets: set[tuple[Network, Network]] = set()
        """A network, and one that takes its results, or whose results meet these in a call after the same calls."""
        self._inside: nn.Module | None = None
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], dict[Network, Calls]]] = {}
        self._step = 0

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self._inside is None and (network := self._network(watch, module)):
                with watch.suspended():
                    self._inside = module
                    self._note(watch, module, network, args)

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            if module is self._inside:
                self._inside = None
                network = self._network(watch, module)
                if network and not self._held.intersection(network):
                    self._keep(nested.tensors(output), {network: ()})

        before = before_modules(unless_suspended(watch, enter))
        after = after_modules(unless_suspended(watch, leave), always_call=True)
        with hooked(before, after):
            try:
                yield
            finally:
                self._made.clear()

    def _network(self, watch: Watch, module: nn.Module) -> Network:
        """Empty for a module without parameters, and for one that holds trained and other networks."""
        indices = [watch.table.index(p) for p in members.parameters(module)]
        names = tuple(watch.table.entries[i].name for i in indices if i is not None)
        return names if len(self._held.intersection(names)) in (0, len(set(names))) else ()

    def _note(self, watch: Watch, module: nn.Module, network: Network, args: Any) -> None:
        if watch.record.steps != self._step:
            self._step = watch.record.steps
            self._made.clear()
        self.names.setdefault(network, watch.table.modules.get(id(module)) or type(module).__name__)
        self.meets |= {(source, network) for source in self._sources(nested.tensors(args)) if source != network}
        if not torch.is_grad_enabled() and (frames := user_frames(1)):
            line = str(here()[0])
            self.without_gradients.append(Pass(self._step, network, line, frames[0].f_code.co_filename))

    def follow(self, name: str, given: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """A call of torch outside of networks."""
        if not self._made or self._inside is not None:
            return
        sources = self._sources(given)
        self.meets |= {(a, b) for a in sources for b in sources if a != b and sources[a] == sources[b]}
        if sources:
            self._keep(results, {network: (*calls, name) for network, calls in sources.items()})

    def _keep(self, tensors: Iterable[torch.Tensor], networks: dict[Network, Calls]) -> None:
        self._made |= {id(t): (weakref.ref(t), networks) for t in tensors}

    def _sources(self, tensors: Iterable[torch.Tensor]) -> dict[Network, Calls]:
        known = [(t, self._made.get(id(t))) for t in tensors]
        return {n: c for t, made in known if made is not None and made[0]() is t for n, c in made[1].items()}


def target_rebound(seen: NetworkPasses, held: frozenset[str]) -> Iterator[Finding]:
    """Lines that run one network without gradients up to some step, and from then on the trained one of its shape."""
    by_line: dict[str, list[Pass]] = defaultdict(list)
    for each in seen.without_gradients:
        by_line[each.line].append(each)
    for line, passes in by_line.items():
        networks = list(dict.fromkeys(p.network for p in passes))
        if len(networks) != 2 or held.intersection(networks[0]) or not held.issuperset(networks[1]):
            continue
        since = next(n for n, p in enumerate(passes) if p.network == networks[1])
        steps = {p.step for p in passes[since:]}
        later = [p for p in seen.without_gradients if p.line != line and p.step > passes[since].step]
        again = any(p.network == networks[0] for p in (*passes[since:], *later))
        assigned = _assigned(line, passes[0].file)
        online = rf"= *(\w+\.)*{re.escape(seen.names[networks[1]].rpartition('.')[2])}\b"
        assigned = [one for one in assigned if re.search(online, one)] or assigned
        if len(networks[0]) != len(networks[1]) or again or len(steps) < LEAST_STEPS or not assigned:
            continue  # a function that evaluates whichever network it is given
        names = [seen.names[n] for n in networks]
        facts: dict[str, Any] = {"target": names[0], "online": names[1], "before": since}
        facts |= {"after": len(passes) - since, "step": passes[since].step}
        yield found("target_rebound", line, networks[0], change=assigned[0] if len(assigned) == 1 else "", **facts)


def _assigned(line: str, file: str) -> list[str]:
    """The statements that give the network's name at this line the value of another name: of an attribute all in the
    file, of a variable those in the function around the line."""
    source = source_of(file)
    statement = source.statement(int(line.partition("   ")[0].rpartition(":")[2]))
    function = None if statement is None else source.function(statement)
    called = [] if statement is None else [n.func for n in nodes_within(statement) if isinstance(n, ast.Call)]
    scopes: dict[str, ast.AST] = {f.attr: source.tree for f in called if isinstance(f, ast.Attribute)}
    scopes |= {f.id: function for f in called if isinstance(f, ast.Name) and function is not None}
    return [
        source.text(node)
        for name, scope in scopes.items()
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and any(name == (getattr(target, "attr", "") or getattr(target, "id", "")) for target in node.targets)
    ]


def target_left_behind(
    evidence: Evidence, record: Record, seen: NetworkPasses, written: Mapping[str, str]
) -> Iterator[Finding]:
    """A copy of a trained network that nothing moves, whose results go into another such copy, or meet those of one of
    its own shape, that follows its network. ``written``: the line that writes to a parameter."""
    held = {record.name(i) for i in record.held}
    moved = _moves(record)
    start = {p.name: p.start for p in record.parameters}
    trained = [n for n in seen.names if held.issuperset(n)]
    shapes = {p.name: p.shape for p in record.parameters}
    copies = {n: online for n in seen.names if not held & {*n} for online in trained if _same(start, n, online)}
    for still, online in copies.items():
        if moved.keys() & {*still} or not _changed(record, online):
            continue
        for other, followed in copies.items():
            steps = {step for name in other for step in moved.get(name, ())}
            if (still, other) not in seen.meets or online == followed or len(steps) < LEAST_STEPS:
                continue
            in_one_call = (other, still) in seen.meets
            if in_one_call and [shapes[name] for name in still] != [shapes[name] for name in other]:
                continue  # a frozen reference policy, whose log-probabilities meet the target of a critic
            longer = evidence.shared(longer_run)
            if _moves(longer).keys() & {*still} or _changed(longer, still):
                continue
            facts: dict[str, Any] = {
                "network": seen.names[still],
                "source": seen.names[online],
                "other": seen.names[other],
            }
            facts |= {"steps": len(longer.innermost_steps())}
            facts["repair"] = "update {network} where {other} is updated, from {source}".format_map(facts)
            where = next((p.line for p in seen.without_gradients if p.network == still), "")
            change = next((written[name] for name in other if name in written), "")
            yield found("target_left_behind", where, still, change=change, **facts)
            break


def _moves(record: Record) -> dict[str, set[int]]:
    """The steps in which user code moves each parameter."""
    ends = [step.at for step in record.of(Step)]
    moves: dict[str, set[int]] = defaultdict(set)
    for move in record.moves:
        if move.by is None:
            for i in move.parameters:
                moves[record.name(i)].add(sum(end < move.at for end in ends))
    return moves


def _same(start: Any, one: Network, other: Network) -> bool:
    return len(one) == len(other) and all(start[a].same(start[b]) for a, b in zip(one, other, strict=True))


def _changed(record: Record, network: Network) -> bool:
    return bool({record.name(i) for i in record.changed()} & {*network})
