"""Graphs, documents and episodes that stand behind each other in one batch do not meet.

What it does
    It reads which entries of the example batch belong to one graph, document or episode: from the number of the graph
    of each node, offsets, borders, position ids that start again, flags of the last step. Then it makes one forward
    pass in evaluation mode and takes the gradient of the outputs for one segment with respect to the data of the
    others; it looks at the edges; and it puts the rewards of later episodes into another order and looks at what the
    loss weighs earlier steps by.

Why is this bad?
    A pooling without the vector that says which graph, edges without offsets, returns that run on into the next
    episode: shapes fit and the loss falls, while each example is judged by what happens to stand beside it.

How it decides
    The gradient of one segment's outputs with respect to the data of another is exactly 0 where they are kept apart,
    without a tolerance. A cause is a fault where the same operation within each graph makes it exactly 0: a softmax, a
    mean or another statistic over the nodes of all graphs, a reshape into equal parts across their borders. Batch norms
    with running statistics keep segments apart, those without are left alone. What else lets segments meet is advice,
    and a fault where rows_interact=False or roles=Roles(segments=...) is declared: documents packed into one row may be
    meant to see each other.
    Where they do not, and targets are the next token, the target of a document's last token must not be the first one
    of the next document: no output can tell it.
    Edges are judged by the data: both ends of each must lie in one graph. Where nodes are of several kinds nothing is
    said. Numbers by which the model looks up nodes are judged in the same way: the edges of graphs that come in a list,
    one node for each graph, places made of an adjacency's indices, the edges of one graph for several, sums by a number
    of the document that begins again in each row. Graphs and rows whose nodes or documents stand behind each other
    never share a number.
    A convolution over the borders of documents is a fault where attention in the same model keeps them apart.
    The weight of a step in the loss must not depend on rewards of a later episode. These are put into another order,
    which leaves every statistic over the rollout as it is, and weights of earlier steps that are all scaled and shifted
    alike are standardised. Flags may mark the last step of an episode or the first of the next: only what is wrong by
    both is reported. Rewards that are called intrinsic may run on.

Faulty
    >>> class GraphNet(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
    ...
    ...     def forward(self, data):
    ...         nodes, graph = self.body(data["x"]).tanh(), data["batch"]
    ...         return self.head(nodes.mean(0, keepdim=True).expand(4, -1))
    ...
    >>> model = GraphNet()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> graph = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    >>> batch = {"x": torch.randn(10, 4), "batch": graph}, torch.tensor([0, 1, 2, 1])

Fixed
    >>> class GraphNet(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
    ...
    ...     def forward(self, data):
    ...         nodes, graph = self.body(data["x"]).tanh(), data["batch"]
    ...         return self.head(nodes.new_zeros(4, 16).index_add(0, graph, nodes))
    ...
    >>> model = GraphNet()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> graph = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    >>> batch = {"x": torch.randn(10, 4), "batch": graph}, torch.tensor([0, 1, 2, 1])

Known limits
    What leaks without a gradient is not seen, and of episodes only returns that the loop computes from a batch with
    rewards and flags under their usual names. ``rows_interact=True`` declares that segments meet on purpose,
    ``rows_interact=False`` that they must not, and so does ``roles=Roles(segments="doc")``, under any name.

References
    https://pytorch-geometric.readthedocs.io/en/latest/advanced/batching.html (one graph of many, by offsets)
    https://huggingface.co/blog/packing-with-FA2 (documents in one row)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.errors import CannotDecide, DoesNotApply
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.batches.segments import Segments
    from pytest_trainloop.checks.batch.segment_independence.interaction import Interaction
    from pytest_trainloop.checks.batch.segment_independence.labels import BorderLabels
    from pytest_trainloop.checks.batch.segment_independence.lookups import SharedNumbers
    from pytest_trainloop.checks.batch.segment_independence.returns import Crossing
    from pytest_trainloop.checks.batch.segment_independence.targets import PastTheEnd
    from pytest_trainloop.runs.evidence import Evidence

EXPLAINS = (*LEARNING, "causality", "batch_independence")
SETTLE = "rows_interact=True says that it is meant, rows_interact=False or roles=Roles(segments=...) makes it a fault"

CAUSES = {
    "borders_disagree": Cause(
        proof="each of two tensors of the batch has a border that the other does not have",
        repair="make both from the same lengths: borders = torch.tensor([0, *lengths]).cumsum(0)",
        explains=EXPLAINS,
    ),
    "edges_not_offset": Cause(
        proof="no edge has a node number beyond the size of the largest graph, and some graphs have no edges",
        repair="add the number of nodes before it to each graph's edges: edge_index + ptr[i]",
        explains=EXPLAINS,
    ),
    "edges_across_graphs": Cause(
        proof="an edge joins nodes of which the batch says that they are of different graphs",
        repair="offset graph i's edges by the sum of the node counts before it (edge_index + ptr[i]), or build batch "
        "with repeat_interleave(torch.arange(len(sizes)), sizes)",
        explains=EXPLAINS,
    ),
    "numbers_shared": Cause(
        proof="one number stands for entries of two graphs or rows, and each has entries of its own",
        repair="add to the numbers of each graph or row the number of entries before it",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "softmax_over_graphs": Cause(
        proof="with the softmax over the nodes of each graph no output depends on another graph",
        repair="take the softmax within each graph: torch_geometric.utils.softmax(scores, batch); without it, "
        "w = (scores - scores.max()).exp(); w / w.new_zeros(count, *w.shape[1:]).index_add(0, batch, w)[batch]",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "pooled_over_graphs": Cause(
        proof="with the operation over the nodes of each graph alone no output depends on another graph",
        repair="take it within each graph: by index_add or scatter with the number of the graph of each node",
        explains=EXPLAINS,
        change=("seen",),
        settle=SETTLE,
    ),
    "cut_across_graphs": Cause(
        proof="a part that stands for one graph holds nodes of two",
        repair="split at the borders: nodes.split(sizes), or scatter by the number of the graph of each node",
        explains=EXPLAINS,
        change=("seen",),
    ),
    "convolution_across_documents": Cause(
        proof="with the convolution within each document no output depends on another, and attention keeps them apart",
        repair="convolve each document by itself: with seq_idx, or with zeros between documents",
        explains=EXPLAINS,
        change=("seen",),
        settle=SETTLE,
    ),
    "segments_interact": Cause(
        proof="the outputs for one segment have a gradient with respect to the data of another: a fault where "
        "rows_interact=False is declared",
        repair="mask what lies in other segments, or declare rows_interact=True",
        explains=EXPLAINS,
        change=("seen",),
        settle=SETTLE,
    ),
    "labels_across_documents": Cause(
        proof="the target of a document's last token is the first token of the next, which it cannot see",
        repair="labels[starts] = ignore_index at the first token of each document, before labels are shifted",
        explains=EXPLAINS,
        change=("seen",),
        settle=SETTLE,
    ),
    "target_past_the_end": Cause(
        proof="the target of an episode's last step changes with the observation after it",
        repair="target = reward + gamma * (1 - done) * value(next_obs)",
        explains=EXPLAINS,
        change=("seen",),
        settle="give flags of time limits a name of their own (truncated), or leave flags out that are not used",
    ),
    "returns_across_episodes": Cause(
        proof="with the rewards of later episodes in another order, the loss weighs earlier steps differently",
        repair="cut the sum at the end of each episode: running = reward + gamma * running * (1 - done)",
        explains=EXPLAINS,
        settle=SETTLE,
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=32)
def segment_independence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.segment_independence.interaction import SegmentPasses
    from pytest_trainloop.checks.batch.segment_independence.returns import crossing
    from pytest_trainloop.checks.batch.segment_independence.targets import past_the_end

    declared, roles = evidence.declared("rows_interact"), evidence.declared("roles")
    if declared:
        raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
    if roles is not None and roles.segments:
        declared = False
    episodes, crossed = evidence.shared(crossing)
    if crossed is not None:
        yield _crossing(crossed, declared)
    transitions, beyond = evidence.shared(past_the_end)
    if beyond is not None and crossed is None:
        yield _past_the_end(beyond)
    passes = evidence.shared(SegmentPasses)
    met = passes.interaction()
    if passes.disagreement is not None:
        yield _contradicting(*passes.disagreement)
        return
    if passes.lookups.found is not None:
        yield _sharing(passes.lookups.found)
        return
    if passes.segments is None and (episodes or transitions):
        return
    if passes.segments is None:
        if roles is not None and roles.segments:
            raise CannotDecide(f"{roles.segments[0]} does not say where segments begin: it has one value in each row")
        raise DoesNotApply(
            'no document, graph or episode numbers were found in the batch; declare them: roles=Roles(segments="key")'
        )
    edges = list(_edges(passes.segments))
    if edges:
        yield from edges
    elif met is not None:
        yield _finding(met, declared)
    elif passes.labels.across:
        yield _labelled(passes.labels, declared)


def _contradicting(one: Segments, other: Segments, first: int, second: int) -> Finding:
    return Finding(
        cause="borders_disagree",
        summary=f"{one.teller} and {other.teller} disagree about where {one.kind}s begin",
        measured=f"by {one.teller} a {one.kind} begins at {one.entry} {first}, and {other.teller} has no border there; "
        f"by {other.teller} one begins at {one.entry} {second}, and {one.teller} has no border there",
        shown_by="one of the two was built from other lengths: neither is a finer division of the other",
        culprits=(one.teller, other.teller),
        kinds=("input", "input"),
        smallest=f"{one.entry}s 0 to {max(first, second)}",
    )


def _sharing(found: SharedNumbers) -> Finding:
    return Finding(
        cause="numbers_shared",
        summary=found.summary,
        measured=found.measured,
        shown_by=found.shown_by,
        culprits=(found.culprit,),
        where=found.where,
        smallest=found.smallest,
    )


def _edges(segments: Segments) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.segment_independence.edges import edges_of

    edges = edges_of(segments)
    if edges is None:
        return
    if edges.restarts:
        yield Finding(
            cause="edges_not_offset",
            summary=f"{edges.name} only holds node numbers below {max(segments.sizes)}, the size of the largest graph: "
            f"{_graphs(edges.without)} no edges",
            measured=f"{segments.teller} gives graphs of {_sizes(segments)} nodes, {sum(segments.sizes)} in all, and "
            f"{edges.name} has {edges.count} edges",
            shown_by="each graph's node numbers start at 0 again: some edges stand in it twice or join two graphs",
            culprits=(edges.name,),
            kinds=("input",),
            smallest=f"graphs {min(edges.without[0], 1)} and {max(edges.without[0], 1)}",
        )
    elif edges.first is not None:
        source, target, one, other = edges.first
        yield Finding(
            cause="edges_across_graphs",
            summary=f"{edges.across} of {edges.count} edges join nodes of different graphs",
            measured=f"an edge joins nodes {source} and {target}: counted through the whole batch, node {source} is in "
            f"graph {one} and node {target} in graph {other}",
            shown_by=f"{edges.name} and {segments.teller} disagree; by {segments.teller} graphs have "
            f"{_sizes(segments)} nodes",
            culprits=(edges.name,),
            kinds=("input",),
            smallest=f"graphs {min(one, other)} and {max(one, other)}",
        )


def _graphs(numbers: Sequence[int]) -> str:
    """The numbers of graphs, and the verb: "graphs 2 and 3 have"."""
    *others, last = map(str, numbers)
    return f"graphs {', '.join(others)} and {last} have" if others else f"graph {last} has"


def _sizes(segments: Segments) -> str:
    sizes = [str(n) for n in segments.sizes[:4]]
    return ", ".join(sizes) + (", ..." if segments.count > 4 else "")


def _finding(met: Interaction, declared: bool | None) -> Finding:
    op, segments = met.op, met.segments
    a_graph = segments.kind == "graph"
    cause = {"softmax": "softmax_over_graphs", "statistics": "pooled_over_graphs", "reshaped": "cut_across_graphs"}.get(
        met.why, "segments_interact"
    )
    if not a_graph:
        cause = "convolution_across_documents" if met.why == "convolution" else "segments_interact"
    named = op.named if op else ""
    through = f", through {named}" if op else ""
    if cause == "segments_interact" and a_graph and declared is None:
        raise CannotDecide(
            f"graphs of one batch meet in the model{through}{f' ({op.place})' if op else ''}: declare "
            "rows_interact=True if that is meant, rows_interact=False if not",
            needs="rows_interact=",
        )
    summary = {
        "softmax_over_graphs": f"a softmax runs over the nodes of all {segments.count} graphs of the batch",
        "pooled_over_graphs": f"{named} is taken over the nodes of all {segments.count} graphs of the batch",
        "cut_across_graphs": f"{named} cuts the nodes into {segments.count} parts, and not at the borders of graphs",
        "convolution_across_documents": f"{named} runs over the borders of documents that attention keeps apart",
        "segments_interact": f"{segments.kind}s of one batch meet in the model{through}",
    }[cause]
    advised = declared is None and (cause == "segments_interact" or (cause == "pooled_over_graphs" and not met.learned))
    shown = {
        "softmax": f"with the softmax within each {segments.kind} every such gradient is exactly 0",
        "statistics": f"with {named} within each {segments.kind} every such gradient is exactly 0",
        "reshaped": f"{segments.kind}s of {_sizes(segments)} {segments.entry}s; a part holds those of two",
        "attention": f"with the scores between {segments.kind}s masked every such gradient is exactly 0",
        "convolution": "with the convolution within each document every such gradient is exactly 0, so that attention "
        "in the same model keeps them apart",
        "unknown": f"the gradient of single {segments.kind}s",
    }[met.why]
    return Finding(
        cause=cause,
        level="advice" if advised else "fault",
        summary=summary,
        measured=f"in evaluation mode the outputs for {segments.kind} {met.output} have a gradient with respect to the "
        f"{segments.entry}s of {segments.kind} {met.input}",
        shown_by=shown,
        culprits=(op.named if op else segments.teller,),
        where=str(op.place) if op else "",
        smallest=_smallest(met),
    )


def _smallest(met: Interaction) -> str:
    segments = met.segments
    if not met.alone:
        return f"all {segments.count} {segments.kind}s"
    one, other = sorted((met.output, met.input))
    sizes = segments.sizes
    return f"{segments.kind}s {one} and {other}, of {sizes[one]} and {sizes[other]} {segments.entry}s"


def _labelled(found: BorderLabels, declared: bool | None) -> Finding:
    first = found.across[0]
    return Finding(
        cause="labels_across_documents",
        level="advice" if declared is None else "fault",
        summary=f"the last tokens of {len(found.across)} documents are to predict the first token of the next one",
        measured=f"the target of the last token of document {first} is the first token of document {first + 1}, at "
        f"{len(found.across)} of {found.borders} borders",
        shown_by="no output for one document depends on another, so that it cannot tell what comes next",
        culprits=(found.loss,),
        kinds=("call",),
        where=found.where,
        smallest=f"documents {first} and {first + 1}",
    )


def _crossing(found: Crossing, declared: bool | None) -> Finding:
    from pytest_trainloop import nested

    rewards, flags = nested.shown(found.episodes.rewards), nested.shown(found.episodes.flags)
    of = f" of {found.line}" if found.line else ""
    meant = found.episodes.limits or found.episodes.streams > 1 or found.model_reads_flags
    return Finding(
        cause="returns_across_episodes",
        level="advice" if meant and declared is None else "fault",
        summary=f"what the loss weighs a step by depends on {rewards} of the next episode",
        measured=f"step {found.step}{of}: {found.before:.4g}, and {found.after:.4g} with the rewards after step "
        f"{found.end} in another order; {flags} ends the episode there",
        shown_by="sums over the whole rollout are the same in both, and the steps before the end are not all scaled "
        "and shifted alike",
        culprits=(rewards,),
        kinds=("input",),
        where=found.place,
        smallest=f"steps {found.step} to {found.end + 2}{of}",
    )


def _past_the_end(found: PastTheEnd) -> Finding:
    from pytest_trainloop import nested

    given = found.transitions
    flags, after = (nested.shown(path) for path in (given.flags[0], given.after))
    return Finding(
        cause="target_past_the_end",
        level="fault" if found.inverted or given.certain else "advice",
        summary=f"the target of a terminal step depends on {after}"
        + (", and that of no other step does" if found.inverted else ""),
        measured=f"row {found.row} has {flags} set, and its target changes with {after}",
        shown_by=f"targets of rows without {flags} do not change with {after}: the flag is inverted"
        if found.inverted
        else f"inverting {flags} changes no row of this target: it is computed without the flag",
        culprits=(flags,),
        kinds=("input",),
        where=found.place,
        repair=f"target = reward + gamma * (1 - {flags}) * value({after})",
        smallest=f"row [{found.row}]",
    )
