"""The causes of ``memory_growth``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

BOUNDED = "; it is a deque with maxlen={bounded}, so it stops growing"
USABLE = "; every backward pass retained its graph, which can still be used"
ENDED = "; the run ended before step {most}, so that it may be emptied later"
"""What makes a finding advice, as ``shown_by`` says it."""

DETACH = "detach {holder} where a step begins: {last} = {detached}"
"""The repair of a carried graph whose tensor has a name."""

_kept = partial(
    Cause,
    summary="{holder} keeps the graph of every step",
    measured="after {rounds} optimizer steps the graphs of steps 1 to {windows} are all alive{each:?, about {each} "
    "nodes each|}{more:?; {more} MiB more each step on the device|}",
    change=("seen",),
)

CAUSES = {
    "running_sum": _kept(
        proof="one tensor reaches the graphs of all earlier steps, and no backward pass went through it",
        summary="{holder} keeps the graph of every step that was added to it",
        shown_by="it reaches the graphs of all these steps; each was backpropagated and freed, so none can be used "
        "again{why}",
        repair="add loss.item(), or loss.detach(), which needs no transfer from the device",
        source="https://github.com/BatsResearch/labelmodels/issues/4",
        change=("given", "seen"),
    ),
    "kept_tensors": _kept(
        proof="one container holds a tensor of each earlier step, and each reaches the graph of its step",
        shown_by="the {kind} leads to {items:tensor} that reach the graphs of these steps{why}",
        repair="put loss.item(), or output.detach(), into it",
        do_not="call torch.cuda.empty_cache(): the graphs are in use",
        variants={
            "hooks": {
                "repair": "keep the handle that register_hook() returns, and call handle.remove() after the backward "
                "pass"
            },
        },
        source="https://github.com/sktime/pytorch-forecasting/pull/1924",
    ),
    "carried_graph": _kept(
        proof="the backward pass of a step goes through the graphs of earlier steps",
        summary="{holder} carries the graph of each step into the next",
        shown_by="the backward pass of each step went through the graphs of all earlier ones{why}",
        repair="detach what is carried over, where a step begins: hidden = hidden.detach()",
        do_not="set retain_graph=True: every backward pass would go through all earlier steps",
        explains=("overfit_one_batch",),
        variants={
            "refused": {
                "summary": "{holder} carries the graph of a step into the next, whose backward pass raises",
                "measured": "backward() raised: {message}",
                "shown_by": "this backward pass reached the graph of an earlier step, {modified:?whose weights the "
                "optimizer has changed since|which the backward pass of that step had freed}",
            },
        },
        source="https://github.com/sgadgil6/cnslab_fmri/issues/4",
    ),
    "held_outside_python": _kept(
        proof="the graphs of all earlier steps are alive, and nothing that Python can look into holds them",
        shown_by="nothing that Python can look into holds them{why}",
        repair="keep tensors with ctx.save_for_backward(), not as attributes of ctx; empty what an extension keeps",
        change=(),
        variants={
            "passed": {
                "shown_by": "{kind:?no Python object refers to the {items} tensors that reach the graphs, made by "
                "{kind}|nothing that Python can look into holds them}{why}",
                "repair": "what this line makes is given, with its graph, to something that is no Python object (a "
                "Future, an extension, the ctx of a custom Function): hand over loss.detach(), or empty it after the "
                "step",
            },
        },
        source="https://github.com/dmlc/dgl/pull/1060",
    ),
}

found = finding_maker(CAUSES)
