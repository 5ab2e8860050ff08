"""Memory does not grow with the number of steps.

What it does
    It marks the nodes of every graph that is backpropagated in the first steps of the watched run, and looks after nine
    steps which of them are alive.

Why is this bad?
    A loss that is added up without ``item()`` or ``detach()`` holds the graph of every step since. Memory grows by a
    little each step, and the run ends with "out of memory" after hours. A hidden state that is not detached between
    batches makes each backward pass longer than the one before, or raises in the second.

How it decides
    A graph that has been backpropagated is freed: nothing can go through it again, so nobody means to keep it. It must
    be gone three steps later. A mark lies in the node itself and goes with it, so nothing is measured and no bound is
    guessed. Where the graphs of all steps but the last three are alive, the loop runs for 36 steps; where those of the
    first steps are alive then, the tensors that Python holds tell how: one that reaches all of these graphs is a sum
    that runs; as many tensors as steps in one container were put there; where the backward pass of each step went
    through all earlier graphs, a tensor was carried over. Graphs that are never backpropagated (an episode under way)
    carry no mark. What frees them in time passes: lists that are emptied, windows, the output of the last step, cycles
    that Python's collector finds. It is advice where a deque with ``maxlen`` holds them, or where every pass retained
    them and they can still be used, and where the run ended before step 36.

Faulty
    >>> total = 0.0
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     total += loss

Fixed
    >>> total = 0.0
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    ...     total += loss.item()

Known limits
    Only graphs that were backpropagated are looked at. Tensors without a history that pile up (outputs for a metric, a
    replay buffer) are not, nor is an average of weights that is made outside ``torch.no_grad()``, whose graph no pass
    goes through. Fewer than six optimizer steps are a skip. What is kept from one call of ``fit`` to the next is not
    seen. Where nothing is kept no step is made for this check, or nine where the watched run made fewer; where graphs
    are kept, 36 steps and about two seconds for the search through Python's objects.

References
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.memory_growth.growth import Growth, Held, Look
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import RefusedBackward
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "running_sum": Cause(
        proof="one tensor reaches the graphs of all earlier steps, and no backward pass went through it",
        repair="add loss.item(), or loss.detach(), which needs no transfer from the device",
        change=("seen",),
        source="https://github.com/BatsResearch/labelmodels/issues/4",
    ),
    "kept_tensors": Cause(
        proof="one container holds a tensor of each earlier step, and each reaches the graph of its step",
        repair="put loss.item(), or output.detach(), into it",
        do_not="call torch.cuda.empty_cache(): the graphs are in use",
        change=("seen",),
        source="https://github.com/sktime/pytorch-forecasting/pull/1924",
    ),
    "carried_graph": Cause(
        proof="the backward pass of a step goes through the graphs of earlier steps",
        repair="detach what is carried over, where a step begins: hidden = hidden.detach()",
        do_not="set retain_graph=True: every pass would go through all earlier steps",
        change=("seen",),
        explains=("overfit_one_batch",),
        source="https://github.com/sgadgil6/cnslab_fmri/issues/4",
    ),
    "held_outside_python": Cause(
        proof="the graphs of all earlier steps are alive, and nothing that Python can look into holds them",
        repair="keep tensors with ctx.save_for_backward(), not as attributes of ctx; empty what an extension keeps",
        source="https://github.com/dmlc/dgl/pull/1060",
    ),
}

INSTRUMENT = "pytest_trainloop.checks.state.memory_growth.growth:Growth"


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=1, instrument=INSTRUMENT, names="attribute")
def memory_growth(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.memory_growth.growth import Growth, further_record

    record = further_record(evidence)
    if record.refused is not None and (record.raised is not None or not evidence.repeatable):
        yield from _refused(record.refused, evidence.shared(Growth.of))
        return
    if record.graphs is None:
        if not record.autograd_passes():
            raise DoesNotApply("no backward pass of autograd was seen")
        if record.raised is not None:
            raise CannotDecide(f"fit raised {record.raised.summary} before six optimizer steps")
        raise CannotDecide(
            f"{count(record.rounds, 'optimizer step')} happened; six are needed to distinguish growth from what one "
            "step leaves to the next"
        )
    if not record.graphs.all_kept:
        return
    look = evidence.shared(Growth.of).look
    if look is not None:
        for held in look.holders:
            yield _kept(look, held)


def _kept(look: Look, held: Held) -> Finding:
    cause = "carried_graph" if look.carried else held.how
    name = held.name or ("a tensor" if held.kind == "Tensor" else f"a {held.kind}")
    summary = {
        "running_sum": f"{name} keeps the graph of every step that was added to it",
        "kept_tensors": f"{name} keeps the graph of every step",
        "carried_graph": f"{name} carries the graph of each step into the next",
        "held_outside_python": f"{held.name or 'something outside of Python'} keeps the graph of every step",
    }[cause]
    level, why = _level(look, held)
    return Finding(
        cause=cause,
        level=level,
        summary=summary,
        measured=_measured(look),
        shown_by="; ".join(filter(None, (_shown_by(cause, held), why))),
        culprits=(held.name or held.kind or "autograd graph",),
        where=held.where,
        repair=_repair(cause, held),
    )


def _level(look: Look, held: Held) -> tuple[Level, str]:
    """The level, and what makes it advice."""
    from pytest_trainloop.checks.state.memory_growth.growth import MOST

    if held.bounded is not None:
        return "advice", f"it is a deque with maxlen={held.bounded}, so it stops growing"
    if look.usable:
        return "advice", "every backward pass retained its graph, which can still be used"
    if look.rounds < MOST:
        return "advice", f"the run ended before step {MOST}, so that it may be emptied later"
    return "fault", ""


def _measured(look: Look) -> str:
    text = f"after {look.rounds} optimizer steps the graphs of steps 1 to {look.windows} are all alive"
    if look.nodes >= look.windows:
        text += f", about {round(look.nodes / look.windows)} nodes each"
    return text if look.growth is None else f"{text}; {look.growth / 2**20:.2f} MiB more each step on the device"


def _shown_by(cause: str, held: Held) -> str:
    if cause == "running_sum":
        return "it reaches the graphs of all these steps; each was backpropagated and freed, so none can be used again"
    if cause == "kept_tensors":
        return f"the {held.kind} leads to {count(held.items, 'tensor')} that reach the graphs of these steps"
    if cause == "held_outside_python" and held.kind and not held.name:
        return f"no Python object refers to the {held.items} tensors that reach the graphs, made by {held.kind}"
    if cause == "carried_graph":
        return "the backward pass of each step went through the graphs of all earlier ones"
    return CAUSES[cause].proof


def _repair(cause: str, held: Held) -> str:
    if cause == "carried_graph" and held.name:
        last = held.name.rpartition(".")[2]
        detached = f"{last}.detach()" if held.kind == "Tensor" else f"tuple(each.detach() for each in {last})"
        return f"detach {held.name} where a step begins: {last} = {detached}"
    if cause == "held_outside_python" and not held.name:
        return (
            "what this line makes is handed, with its graph, to something that is no Python object (a Future, an "
            "extension, the ctx of a custom Function): hand over loss.detach(), or empty it after the step"
        )
    if held.name.endswith("._backward_hooks"):
        return "keep the handle that register_hook() returns, and call handle.remove() after the backward pass"
    return ""


def _refused(refused: RefusedBackward, growth: Growth) -> Iterator[Finding]:
    changed = "modified by an inplace" in refused.message
    since = "whose weights the optimizer has changed since" if changed else "which the pass of that step had freed"
    for held in growth.carried or ():
        name = held.name or "a tensor"
        yield Finding(
            cause="carried_graph",
            summary=f"{name} carries the graph of a step into the next, whose backward pass raises",
            measured=f"backward() raised: {refused.message.splitlines()[0][:120]}",
            shown_by=f"this pass came to the graph of an earlier step, {since}",
            culprits=(held.name or "autograd graph",),
            where=held.where or str(refused.place),
            repair=_repair("carried_graph", held),
        )
