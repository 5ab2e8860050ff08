"""Results that no loss uses, and modules that no batch comes to.

Some results are given out with good reason. A library's encoder returns a pooled output next to the hidden states, and
the project takes only the latter; a component returns attention weights that its caller drops; a model returns a head's
output for a task that is not in this batch; an energy's last bias is in the graph that ``autograd.grad``
differentiates. Or a network is called for the features of a hidden layer, which a hook or an attribute keeps, and its
own output is dropped. A result that its module's parent drops, or a network of which nothing is used, has no such
reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.causes import found
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.cuts import search
from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.dependence import Dependences, until_stepped
from pytest_trainloop.instruments.tracing import definitions
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.runs.hooks import unless_suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.recording.record import Parameter
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Shape = tuple[int, ...]

MOST_KEPT = 3
"""Tensors that modules keep which are taken away, one by one."""

_ANY = frozenset("weight bias head heads model net module layer batch target targets label labels out output".split())
"""Words that say nothing of a task."""


def uncalled_modules(evidence: Evidence) -> Iterator[Finding]:
    """Declared modules that were never called and that no loss depends on: a target network that the goal is not
    computed with, a forgotten teacher. What an optimizer holds is left to the parameters."""
    record = evidence.run()
    if not evidence.repeatable or record.raised is not None or not record.ended:
        return
    idle: dict[str, list[Parameter]] = {}
    for p in record.parameters:
        if p.declared and "." in p.name:
            idle.setdefault(p.name.partition(".")[0], []).append(p)
    for name, own in list(idle.items()):
        called = (p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint + p.calls_empty for p in own)
        if any(called) or any(p.index in record.held or record.reached(p.index) for p in own):
            idle.pop(name)
    if not idle or len(named := evidence.fresh_loop().modules) < 2:
        return
    for name, own in idle.items():
        moved = any(p.index in record.end and not p.start.same(record.end[p.index]) for p in own)
        # an average of weights, for evaluation (odd: average_declared_beside_the_net)
        if name not in named or (moved and "target" not in name.lower()):
            continue
        depends = evidence.shared(Dependences).of([p.name for p in own])
        if not any(d.depends or d.alive for d in depends.values()):
            first, made = next(iter(record.backwards()), ""), evidence.shared(MadeAt.of).module(name)
            facts = {"moved": moved, "rounds": record.rounds, "parameters": len(own), "made": made, "level": "advice"}
            yield found("module_uncalled", first, (name,), **facts)


def declared_to_train(evidence: Evidence) -> str:
    """What ``frozen=`` names, where all else is declared to train whatever batches come; else empty."""
    frozen = evidence.run().frozen
    return str(frozen) if frozen == () or (frozen is not None and "batches" in evidence.offers) else ""


def unused_results(evidence: Evidence, independent: Sequence[Parameter]) -> Iterator[Finding]:
    """Parameters that no gradient arrives at and no loss depends on: their result is dropped or given out, or they take
    no part."""
    record = evidence.run()
    used = [p.name for p in independent if p.calls_with_grad]
    touched = search(evidence, used, set())[1] if used else set()
    unused = [name for name in used if name in touched]
    if unused:
        exposed, shapes = given_out(evidence, unused)
        if dropped := [n for n in unused if n not in exposed]:
            yield found("parameter_unused", "", dropped)
        optional = [n for n in unused if n in exposed]
        targets: dict[frozenset[Shape], str] = {}
        by_target: dict[str, list[str]] = {}
        for name in optional:
            results = frozenset(shapes.get(name, ()))
            if results not in targets:
                targets[results] = unread_target(evidence, optional, results)
            by_target.setdefault(targets[results], []).append(name)
        for target, names in by_target.items():
            declared = str(record.frozen) if record.frozen is not None and not target else ""
            sure = bool(target or declared)
            facts = {"target": target, "declared": declared, "sure": sure, "level": "fault" if sure else "advice"}
            if target:
                facts["change"] = definitions.value(str(next((b.place for b in record.backwards()), "")))
            yield found("parameter_unused", "", names, "given out", **facts)
    if never := [p.name for p in independent if p.name not in unused]:
        declared = declared_to_train(evidence)
        facts = {"kept": kept_in_their_place(evidence, never), "level": "fault" if declared else "advice"}
        yield found("parameter_unused", "", never, "no part", declared=declared, **facts)


def kept_in_their_place(evidence: Evidence, names: Sequence[str]) -> str:
    """A tensor without a gradient that a module holds as training begins, and without which a gradient reaches one of
    these parameters: it was computed from them, in an evaluation while the loop was built. Empty where there is none.
    """
    if not evidence.repeatable:
        return ""

    def kept(loop_modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module, str]]:
        for path, module in loop_modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad:
                    yield f"{path}.{name}".lstrip("."), module, name

    fresh = evidence.fresh_loop().modules.items()
    inner = ((f"{p}.{n}".strip("."), m) for p, root in fresh for n, m in members.named_modules(root))
    for path, _, _ in itertools.islice(kept(inner), MOST_KEPT):

        def clear(watch: Watch, path: str = path) -> None:
            for found_at, module, name in list(kept(watch.table.named_modules())):
                if found_at == path:
                    setattr(module, name, None)

        record = evidence.rerun(prepare=clear, enough=lambda r: r.rounds >= 1, may_raise=True)
        if record.raised is None and any(p.name in names and record.reached(p.index) for p in record.parameters):
            return path
    return ""


def given_out(evidence: Evidence, names: Sequence[str]) -> tuple[set[str], dict[str, set[Shape]]]:
    """Those of the named parameters whose unused result is given out with good reason, and the shapes of the results
    that they were computed into and others were not. None where the loop cannot be run again.

    A module returns it as one of several results, of which a batch need not use all. Or a module returns it of which
    other parameters train. Or autograd itself gets it (``autograd.grad`` of an energy; a function of the project's own
    that takes a parameter and has no gradient for it).
    """
    if not evidence.repeatable:
        return set(), {}
    record = evidence.run()
    taught = {p.name for p in record.parameters if record.reached(p.index)}
    given: set[str] = set()
    shapes: dict[str, set[Shape]] = {}

    @contextlib.contextmanager
    def watching(watch: Watch) -> Iterator[None]:
        def name_of(tensor: torch.Tensor) -> str:
            index = watch.table.index(tensor)
            return "" if index is None else watch.table.entries[index].name

        def behind(output: Any) -> set[str]:
            """The parameters that an output was computed with, read off its graph."""
            todo = [t.grad_fn for t in nested.tensors(output) if t.grad_fn is not None]
            seen, leaves = set(todo), set()
            while todo:
                node = todo.pop()
                variable = getattr(node, "variable", None)
                if isinstance(variable, torch.Tensor):
                    leaves.add(name_of(variable))
                for after, _ in node.next_functions:
                    if after is not None and after not in seen:
                        seen.add(after)
                        todo.append(after)
            return leaves

        def leave(module: torch.nn.Module, _args: Any, output: Any) -> None:
            inside = {name_of(p) for p in members.parameters(module)}
            holds = inside & set(names)
            direct = {name_of(p) for p in members.parameters(module, recurse=False)}
            if not holds or holds <= direct or watch.backward is not None:
                return
            with watch.suspended():
                results = [t for t in nested.tensors(output) if t.grad_fn is not None]
                sources = [behind(t) for t in results]
                optional = set().union(*sources) - sources[0].intersection(*sources) if sources else set()
                for result, source in zip(results, sources, strict=True):
                    for name in optional & source & set(names):
                        shapes.setdefault(name, set()).add(tuple(result.shape))
                if inside & taught:  # (odd: classifier_behind_a_hooked_layer, features_read_from_an_attribute)
                    optional |= behind(output)
            given.update(holds & optional)

        def differentiating(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def differentiate(*args: Any, **kwargs: Any) -> Any:
                roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
                with watch.suspended():
                    given.update(behind(roots) & set(names))
                return original(*args, **kwargs)

            return differentiate

        handle = after_modules(unless_suspended(watch, leave))
        try:
            with patched(torch.autograd, "grad", differentiating), patched(torch.autograd, "backward", differentiating):
                yield
        finally:
            handle.remove()

    evidence.rerun(enough=until_stepped(evidence, names), contexts=lambda watch: [watching(watch)])
    return given, shapes


def unread_target(evidence: Evidence, names: Sequence[str], results: Collection[Shape]) -> str:
    """Where in the batch a target of one of these shapes of results is that nothing reads; "" if nowhere.

    A head whose result no loss uses may belong to a task that is not in the batch. Where the batch holds a tensor that
    fits the head's result, bears its name, and makes no difference, bit for bit, to what the loop backpropagates, the
    task is there and its loss is missing. Shape alone is not enough: a policy that is cloned from recorded steps has a
    head for values, and its batch holds the rewards; an id of a camera fits every head that is wide enough.
    """
    if not evidence.repeatable or not results:
        return ""
    candidates: list[Path] = []

    def backpropagated(before_item: Callable[[int, Any], None]) -> list[list[float]]:
        enough, varied = until_stepped(evidence, names), "with one row in place of all rows of a target"
        record = evidence.rerun(before_item=before_item, enough=enough, varied=varied)
        return [[root.value for root in b.roots] for b in record.autograd_passes()]

    def list_candidates(number: int, item: Any) -> None:
        if number == 0:  # named for the head (odd: policy_cloned_from_recorded_steps)
            named = [(p, t) for p, t in nested.paths(item) if _words(nested.shown(p)) & _words(" ".join(names))]
            candidates.extend(p for p, t in named if any(_fits(t, shape) for shape in results))

    def repeating(path: Path, row: int) -> Callable[[int, Any], None]:
        def repeat(_number: int, item: Any) -> None:
            for other, tensor in nested.paths(item):
                if other == path and len(tensor):
                    with torch.no_grad():
                        write(tensor, tensor[row].clone().expand_as(tensor))

        return repeat

    unchanged = backpropagated(list_candidates)
    for path in candidates:
        if all(backpropagated(repeating(path, row)) == unchanged for row in (0, -1)):
            return nested.shown(path)
    return ""


def _words(text: str) -> set[str]:
    """The words of a dotted name, without those that any name may have."""
    return {word for word in re.findall(r"[a-z]{3,}", text.lower()) if word not in _ANY}


def _fits(tensor: torch.Tensor, result: Shape) -> bool:
    """Whether a tensor whose rows differ is a target for a result: values of its shape, or classes of it."""
    if tensor.layout is not torch.strided or tensor.dim() == 0 or len(tensor) < 2 or not result:
        return False
    if torch.equal(tensor, tensor[:1].expand_as(tensor)):
        return False
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return [n for n in shape if n > 1] == [n for n in result if n > 1]
    classes = {result[-1]: result[:-1]} | ({result[1]: result[:1] + result[2:]} if len(result) > 1 else {})
    return any(shape == rest and 1 < int(tensor.max()) + 1 <= count for count, rest in classes.items())
