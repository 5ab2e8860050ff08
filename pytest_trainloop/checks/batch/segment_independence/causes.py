"""The causes of ``segment_independence``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

_INTENDED = "rows_interact=True declares it as intended"
_JUDGED = "rows_interact=False or roles=Roles(segments=...) makes it a fault"

_of_data = partial(Cause, explains=(*LEARNING, "causality", "batch_independence"))
_seen = partial(_of_data, change=("seen",))
_MEASURED = "{by_value:?; the values of {by_value} tell where documents or sets begin|}"
_in_the_model = partial(
    _seen,
    measured="in evaluation mode the outputs for {kind} {output} have a gradient with respect to the {entry}s of "
    "{kind} {input}" + _MEASURED,
    settle=_INTENDED,
    judged=_JUDGED,
)
_ALONE = "over {kind} {output} alone nothing of other {kind}s comes into its outputs"

CAUSES = {
    "borders_disagree": _of_data(
        proof="each of two tensors of the batch has a border that the other does not have",
        summary="{one} and {other} disagree about where {kind}s begin",
        measured="by {one} a {kind} begins at {entry} {first}, and {other} has no border there; by {other} one begins "
        "at {entry} {second}, and {one} has no border there",
        shown_by="one of the two was built from other lengths: neither is a finer division of the other",
        repair="make both from the same lengths: borders = torch.tensor([0, *lengths]).cumsum(0)",
        source="https://github.com/hiyouga/LlamaFactory/pull/7754",
        change=("data",),
    ),
    "edges_not_offset": _of_data(
        proof="no edge has a node number beyond the size of the largest graph, and some graphs have no edges",
        summary="{name} only holds node numbers below {largest}, the size of the largest graph: {without} no edges",
        measured="{teller} gives graphs of {sizes} nodes, {nodes} in all, and {name} has {edges:edge}",
        shown_by="each graph's node numbers start at 0 again: some edges occur twice or join two graphs",
        repair="add the number of nodes before it to each graph's edges: edge_index + ptr[i]",
        source="https://github.com/google-deepmind/graph_nets/issues/135",
        change=("data",),
    ),
    "edges_across_graphs": _of_data(
        proof="an edge joins nodes of which the batch says that they are of different graphs",
        summary="{across} of {edges:edge} join nodes of different graphs",
        measured="an edge joins nodes {source} and {target}: counted through the whole batch, node {source} is in "
        "graph {one} and node {target} in graph {other}",
        shown_by="{name} and {teller} disagree; by {teller} graphs have {sizes} nodes",
        repair="offset graph i's edges by the sum of the node counts before it (edge_index + ptr[i]), or build batch "
        "with repeat_interleave(torch.arange(len(sizes)), sizes)",
        source="https://github.com/deepchem/deepchem/pull/3291",
        change=("data",),
    ),
    "numbers_shared": _seen(
        proof="one number is used for entries of two graphs or rows, and each has entries of its own",
        repair="add to the numbers of each graph or row the number of entries before it",
        variants={
            "list": {
                "summary": "nodes of graphs {one} and {other} of the list are looked up by the same numbers",
                "measured": "the edges of graph {other} are moved by {moved}, and those of graph {one}, of "
                "{nodes:node}, by {start}",
                "shown_by": "the graphs have {entries:node} in all, one graph behind the other",
            },
            "matrix": {
                "summary": "nodes of graphs 0 and 1 are looked up by the same numbers: {step} for each graph of "
                "{nodes}",
                "measured": "the number of a node is {step} times its graph and its place in it, among {rows:graph} of "
                "{nodes:node} each",
                "shown_by": "number {step} is node {step} of graph 0 and node 0 of graph 1",
            },
            "one for each graph": {
                "summary": "{name} numbers the nodes within each graph, but is used as an index into the nodes of all "
                "{graphs}",
                "measured": "for graph {graph} it is {node}: a node of graph {other}",
                "shown_by": "each of its {graphs:number} is smaller than its graph has nodes, and {wrong} lie in other "
                "graphs",
            },
            "one for each entry": {
                "summary": "{name} numbers the {entry}s within each graph{nodes:?, from the nodes before it|}, but is "
                "used as an index into the {entry}s of all {graphs}",
                "measured": "entry {place} belongs to graph {graph} and is {number}: that {entry} is of graph {other}",
                "shown_by": "{nodes:?less the nodes before its graph, |}each number is smaller than its graph has "
                "{entry}s, and {wrong} lie in other graphs",
                "repair": "add to the numbers of each graph the {entry}s of the graphs before it; in PyG by __inc__ of "
                "this attribute",
            },
            "documents": {
                "summary": "documents of the same number in all {rows:row} are added up",
                "measured": "sums go to {rows} x {places} places by {name}, which is {most} at most",
                "shown_by": "number {number} is a document of row 0 and another of row 1, and the places from {next} "
                "stay empty",
            },
            "one graph": {
                "summary": "the edges of one graph are used for the nodes of {graphs}: only those of the first get "
                "messages",
                "measured": "the edges join nodes 0 to {last}, and the batch has {graphs} x {nodes} nodes",
                "shown_by": "no edge touches a node from {nodes} on",
            },
        },
        source="https://github.com/pyg-team/pytorch_geometric/issues/1107",
        change=("data", "seen"),
    ),
    "softmax_over_graphs": _in_the_model(
        proof="nothing of other graphs comes into the outputs once the softmax runs over the nodes of one graph alone",
        summary="a softmax runs over the nodes of all {count:graph} of the batch",
        shown_by=f"with the softmax {_ALONE}",
        repair="take the softmax within each graph: torch_geometric.utils.softmax(scores, batch); without it, "
        "w = (scores - scores.max()).exp(); w / w.new_zeros(count, *w.shape[1:]).index_add(0, batch, w)[batch]",
        settle="",
        judged="",
        source="https://github.com/leffff/graphormer-pyg/issues/14",
    ),
    "pooled_over_graphs": _in_the_model(
        proof="nothing of other graphs comes into the outputs once the operation runs over the nodes of one graph "
        "alone",
        summary="{named} is taken over the nodes of all {count:graph} of the batch",
        shown_by=f"with {{named}} {_ALONE}",
        repair="take it within each graph: by index_add or scatter with the number of the graph of each node",
        source="https://github.com/pyg-team/pytorch_geometric/pull/9454",
    ),
    "cut_across_graphs": _in_the_model(
        proof="a part that is taken for one graph holds nodes of two",
        summary="{named} cuts the nodes into {count:part}, and not at the borders of graphs",
        shown_by="{kind}s of {sizes} {entry}s; a part holds those of two",
        repair="split at the borders: nodes.split(sizes), or scatter by the number of the graph of each node",
        settle="",
        judged="",
        source="https://github.com/dariush-salami/attention-based-edge-convolution/issues/1",
    ),
    "convolution_across_documents": _in_the_model(
        proof="nothing of other documents comes into the outputs once the convolution runs over one document alone: "
        "attention keeps them separate",
        summary="{named} runs over the borders of documents that attention separates",
        shown_by=f"with the convolution {_ALONE}: attention in the same model separates documents",
        repair="convolve each document by itself: with seq_idx, or with zeros between documents",
        source="https://github.com/huggingface/transformers/pull/46588",
    ),
    "segments_interact": _in_the_model(
        proof="the outputs for one segment have a gradient with respect to the data of another: a fault where "
        "rows_interact=False is declared",
        summary="{kind}s of one batch affect each other in the model{named:?, through {named}|}",
        shown_by="the gradient of single {kind}s",
        repair="mask what lies in other segments, or declare rows_interact=True",
        variants={
            "softmax": {"shown_by": f"with the softmax {_ALONE}"},
            "statistics": {"shown_by": f"with {{named}} {_ALONE}"},
            "reshaped": {"shown_by": "{kind}s of {sizes} {entry}s; a part holds those of two"},
            "attention": {"shown_by": f"with attention {_ALONE}"},
            "rows": {
                "summary": "{kind}s of one batch affect each other in the model, but not in a batch of their row alone",
                "shown_by": "in that row alone no output of one depended on the other; only there {named} is called",
                "repair": "make the mask for any number of rows, not only for one",
            },
            "training": {
                "summary": "in training {kind}s of one batch affect each other in the model, through {named}",
                "measured": "the gradient of {kind} {number} ({tokens:token}) differs by {difference:share} from that "
                "of this {kind} alone, float64; in evaluation mode no output of it depends on others",
                "shown_by": "with the results of the calls of the {kind} alone both gradients are equal",
            },
        },
        source="https://github.com/vllm-project/speculators/issues/621",
        change=("mask", "seen"),
    ),
    "labels_across_documents": _seen(
        proof="the target of a document's last token is the first token of the next, which it cannot see",
        summary="the last tokens of {across:document} are to predict the first token of the next one",
        measured="the target of the last token of document {first} is the first token of document {next}, at {across} "
        "of {borders:border}" + _MEASURED,
        shown_by="no output for one document depends on another, so that it cannot tell what comes next",
        repair="labels[starts] = ignore_index at the first token of each document, before labels are shifted",
        settle=_INTENDED,
        judged=_JUDGED,
        source="https://github.com/meta-pytorch/torchtune/pull/2613",
        change=("labels", "seen"),
    ),
    "positions_run_on": _seen(
        proof="the gradient of a document between others differs from that of the document alone; with positions "
        "counted from the start of the document both are equal",
        summary="positions run on from document to document: document {number} does not begin at position 0",
        measured="the gradient of document {number} ({tokens:token}) differs by {difference:share} from that of this "
        "document alone, float64" + _MEASURED,
        shown_by="with the entries of the table that the document alone reads both gradients are equal",
        repair="start positions again at each document: position_ids = torch.cat([torch.arange(n) for n in lengths])",
        settle=_INTENDED,
        judged=_JUDGED,
        source="https://github.com/hiyouga/LLaMA-Factory/pull/7318",
        change=("positions", "seen"),
    ),
    "target_past_the_end": _seen(
        proof="the target of an episode's last step changes with the observation after it",
        summary="the target of a terminal step depends on {after}{inverted:?, and that of no other step does|}",
        measured="row {row} has {flags} set, and its target changes with {after}",
        shown_by="{inverted:?targets of rows without {flags} do not change with {after}: the flag is inverted|"
        "inverting {flags} changes no row of this target: it is computed without the flag}",
        repair="target = reward + gamma * (1 - done) * value(next_obs)",
        settle="give flags of time limits a name of their own (truncated), or leave flags out that are not used",
        source="https://github.com/aviralkumar2907/BEAR/issues/4",
    ),
    "returns_across_episodes": _of_data(
        proof="the loss weighs earlier steps differently when the rewards of later episodes come in a different order",
        summary="the weight of a step in the loss depends on {rewards} of the next episode",
        measured="step {step}{of}: {before:.4g}, and {after:.4g} with the rewards after step {end} in another order; "
        "{flags} ends the episode there",
        shown_by="sums over the whole rollout are equal in both runs, and the steps before the end are not all scaled "
        "and shifted by one factor and one offset",
        repair="cut the sum at the end of each episode: running = reward + gamma * running * (1 - done)",
        settle=_INTENDED,
        judged=_JUDGED,
        source="https://github.com/nikhilbarhate99/PPO-PyTorch/issues/8",
        change=("carried",),
    ),
}

found = finding_maker(CAUSES)
