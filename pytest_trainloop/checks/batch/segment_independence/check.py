"""Graphs, documents and episodes that share one axis of a batch do not meet.

What it does
    It reads which entries of the example batch belong to one graph, document or episode. Sources are graph numbers of
    nodes, offsets, borders, position ids that start again, or flags of the last step.

    Then it makes one forward pass in evaluation mode and takes the gradient of the outputs for one segment with respect
    to the data of the others. It looks at the edges. It puts the rewards of later episodes into a different order and
    looks at what the loss weighs earlier steps by. A document that is kept separate trains once alone and once behind
    others.

Why is this bad?
    A pooling without the vector that says which graph, edges without offsets, returns that run on into the next
    episode: shapes fit and the loss falls, while each example is judged by its neighbours in the batch.

How it decides
    1. The gradient of one segment's outputs with respect to another's data must be exactly 0, without a tolerance.
    2. If it is not, the step on one segment alone is compared with the step on the batch, call by call. A kind of call
       is the cause if nothing else of other segments comes in once its results are those of the segment alone. Losses
       may join graphs, so there only a softmax, a reshape or a pooled statistic is named.
    3. Numbers are judged by the data. Both ends of an edge must lie in one graph (not judged for several kinds of
       nodes), and graphs in one axis never share a number (docs/how-it-decides.md#segments-of-one-axis).
    4. Documents that are separate train alone and behind others. The gradients must agree to 1e3 eps in float64, the
       loss of the other documents left out.
    5. Rewards of later episodes get a different order. Weights of earlier steps must stay, or all get one factor and
       one offset. What only one reading of the flags shows is not reported. An environment's ``step()`` tells the end
       by the flag that it returns with the reward.
    6. Declared means ``rows_interact=False`` or ``roles=Roles(segments=...)``: then advice of segments becomes a fault.
       Segments found by values alone give advice. Embedded numbers and targets of a loss number no segments, and
       documents that end at equal places in all rows are windows.

    | seen | cause | advice if |
    |---|---|---|
    | two tensors of the batch disagree on borders | ``borders_disagree`` |  |
    | an edge joins two graphs, or numbers start at 0 in each | ``edges_across_graphs``, ``edges_not_offset`` |  |
    | a number is looked up for two graphs or rows | ``numbers_shared`` |  |
    | a reshape makes parts across the borders of graphs | ``cut_across_graphs`` |  |
    | a softmax over the nodes of all graphs | ``softmax_over_graphs`` |  |
    | a mean or statistic over the nodes of all graphs | ``pooled_over_graphs`` | of data without weights |
    | a convolution, while attention keeps documents separate | ``convolution_across_documents`` |  |
    | any other call | ``segments_interact`` | undeclared, unless a row alone keeps them separate |
    | a document's last target is the next one's first token | ``labels_across_documents`` | undeclared |
    | the gradient agrees once tables are read as for one document | ``positions_run_on`` | undeclared |
    | rewards of later episodes change earlier weights | ``returns_across_episodes`` | time limits, intrinsic |
    | the target of a last step changes with the next observation | ``target_past_the_end`` | flags may be time limits |

When it is skipped
    It skips graphs that interact by other calls (declare ``rows_interact=``), numbers that nothing explains, and a
    batch without segments.

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
    rewards and flags under their usual names, or from what ``step()`` of an environment returns.
    ``rows_interact=True`` declares that segments meet on purpose, ``rows_interact=False`` that they must not, and so
    does ``roles=Roles(segments="doc")``, under any name.

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
    from pytest_trainloop.checks.batch.segment_independence import numbers, own_rollouts, rollouts
    from pytest_trainloop.checks.batch.segment_independence.segment_probe import SegmentPasses
    from pytest_trainloop.instruments.batches.episodes import read_episodes, read_transitions
    from pytest_trainloop.instruments.batches.own_data import makes_own_data

    if evidence.declared("rows_interact"):
        raise DoesNotApply("rows_interact=True declares that rows interact on purpose")
    passes = evidence.shared(SegmentPasses)
    crossed = list(rollouts.returns_across_episodes(evidence, passes.batch, declared=passes.declared))
    played = None
    if not crossed and passes.plays and evidence.shared(makes_own_data):
        played = own_rollouts.across_played_episodes(evidence, declared=passes.declared)
        crossed = played or []
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
    elif played is None and read_episodes(passes.batch) is None and read_transitions(passes.batch) is None:
        raise DoesNotApply(
            'no document, graph or episode numbers were found in the batch; declare them: roles=Roles(segments="key")'
        )
