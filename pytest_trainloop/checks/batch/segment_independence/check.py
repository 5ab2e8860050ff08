"""Graphs, documents and episodes that share one axis of a batch do not meet.

What it does
    It reads which entries of the example batch belong to one graph, document or episode: from the number of the graph
    of each node, offsets, borders, position ids that start again, flags of the last step. Then it makes one forward
    pass in evaluation mode and takes the gradient of the outputs for one segment with respect to the data of the
    others; it looks at the edges; and it puts the rewards of later episodes into another order and looks at what the
    loss weighs earlier steps by. A document that is kept apart trains once alone and once behind others.

Why is this bad?
    A pooling without the vector that says which graph, edges without offsets, returns that run on into the next
    episode: shapes fit and the loss falls, while each example is judged by its neighbours in the batch.

How it decides
    The gradient of one segment's outputs with respect to the data of another is exactly 0 where they are kept apart,
    without a tolerance. Where it is not, the step on one segment alone is a tape of calls, and the step on the batch
    is compared with it call by call. A kind of call is the cause if nothing else of other segments comes in once its
    results are those of the tape: a softmax, or a mean or another statistic, over the nodes of all graphs. This is a
    fault, and so is a reshape into parts across the borders of graphs. Batch norms with running statistics keep
    segments apart, those without are left alone. What else lets segments meet is advice, and a fault where
    rows_interact=False or roles=Roles(segments=...) is declared: documents packed into one row may be meant to
    see each other.
    Where they do not, and targets are the next token, the target of a document's last token must not be the first one
    of the next document: no output can tell it. And the gradient of a document behind others must be that of the
    document alone (1e3 eps in float64, the loss of all other documents left out). If it is so once tables are read as
    for the document alone, positions run on: advice, and a fault where rows_interact=False is declared.
    A convolution over the borders of documents is a fault where attention in the same model keeps them apart.

    Documents under names that are not known are found by their values: whole numbers for each token that are constant
    within a document and count up by 1 at its end, or a mask of pairs of positions that keeps blocks of a row apart.
    So are sets by a sorted vector of numbers from 0 and a tensor with one entry for each. Numbers that are embedded, or
    are targets of a loss, are no such numbers, and documents that end at the same places in all rows are windows. What
    is found so is advice, and a fault where rows_interact=False is declared. Other numbers that are the same for
    several tokens in a row, and that nothing explains, are asked for.

    Edges are judged by the data: both ends of each must lie in one graph. Where nodes are of several kinds nothing is
    said. Numbers by which the model looks up nodes are judged in the same way: the edges of graphs that come in a list,
    one node for each graph, places made of an adjacency's indices, the edges of one graph for several, sums by a number
    of the document that begins again in each row. Graphs that follow each other in one axis never share a number.
    The weight of a step in the loss must not depend on rewards of a later episode. These are put into another order,
    which leaves every statistic over the rollout as it is, and weights of earlier steps that are all scaled by one
    factor and shifted by one offset are standardised. Flags may mark the last step of an episode or the first of the
    next: only what is wrong by both is reported. Rewards that are called intrinsic may run on.

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
    https://github.com/hiyouga/LLaMA-Factory/pull/7318 (positions of packed documents)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.segment_independence.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide, DoesNotApply
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=32, steps=2)
def segment_independence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.segment_independence import numbers, rollouts
    from pytest_trainloop.checks.batch.segment_independence.passes import SegmentPasses
    from pytest_trainloop.instruments.batches.episodes import read_episodes, read_transitions

    if evidence.declared("rows_interact"):
        raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
    passes = evidence.shared(SegmentPasses)
    crossed = list(rollouts.returns_across_episodes(evidence, passes.batch, declared=passes.declared))
    yield from crossed or rollouts.target_past_the_end(evidence, passes.batch)
    met = passes.meeting()
    if passes.disagreement is not None:
        yield numbers.borders_disagree(*passes.disagreement)
    elif passes.lookups.finding is not None:
        yield passes.lookups.finding
    elif passes.segments is not None:
        by_edges = list(numbers.edges_join_graphs(passes.segments))
        unclear = not passes.declared and passes.segments.kind == "graph" and not by_edges
        if unclear and met is not None and met.cause == "segments_interact":
            # graphs may be compared on purpose (odd: matching_of_pairs_of_graphs)
            at = f" ({met.where})" if met.where else ""
            wanted = "rows_interact=True if that is intended, rows_interact=False if not"
            raise CannotDecide(f"{met.summary}{at}: declare {wanted}", needs="rows_interact=")
        yield from by_edges or ([*passes.labels, *passes.trains_otherwise()] if met is None else [met])
    elif passes.keys:
        raise CannotDecide(f"{passes.keys[0]} does not say where segments begin: it has one value in each row")
    elif passes.unclear:
        raise CannotDecide(
            f"the numbers in {passes.unclear} may be those of documents in each row: declare "
            f'roles=Roles(segments="{passes.unclear}") if tokens must depend on their own document only, '
            "rows_interact=True if not",
            needs="roles=",
        )
    elif read_episodes(passes.batch) is None and read_transitions(passes.batch) is None:
        raise DoesNotApply(
            'no document, graph or episode numbers were found in the batch; declare them: roles=Roles(segments="key")'
        )
