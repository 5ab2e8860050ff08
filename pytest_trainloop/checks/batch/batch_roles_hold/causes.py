"""The causes of ``batch_roles_hold``. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

CAUSES = {
    "left_out_places_count": Cause(
        proof="the gradient changes with the values where the batch says that nothing counts",
        summary="{tensor} counts where {teller} leaves it out",
        measured="the gradient of the first step changes by {difference:share} with other values in {places:place} of "
        "{tensor}, float64",
        shown_by="{known}; all other tensors, the weights and the seed were the same",
        repair="apply the mask before positions are joined or summed, along the axis of positions; cut it at the end "
        "where the targets are cut: mask[:, 1:] goes with ids[:, 1:]",
        variants={
            "labels": {
                "summary": "{tensor} holds targets where {teller} leaves it out, and they are trained",
                "repair": "labels = labels.masked_fill(mask == 0, -100), after all that writes to labels",
            },
            "in one term": {
                "summary": "{tensor} counts where {teller} leaves {other} out",
                "shown_by": "with other values of {other} at the same places the gradient stays",
                "repair": "average the term of {tensor} over the places that {teller} keeps, as that of {other}",
            },
            "inverted": {
                "summary": "{teller} is used the wrong way round: {tensor} counts where {teller} leaves it out, and "
                "nowhere else",
                "repair": "invert the mask where it is used: mask == 0; key_padding_mask of torch is True at padding",
            },
        },
        explains=LEARNING,
        settle="skip this cause, or leave the mask or the lengths out of roles=, if these values may be read",
        source="https://github.com/verl-project/verl/issues/3562",
        change=("loss", "seen"),
    ),
    "role_without_effect": Cause(
        proof="the gradient stays the same with other values in the tensor, as its role allows them",
        summary="no gradient depends on {tensor}, which is declared as {role}",
        measured="the gradient of the first step is the same with {edit} in {tensor}, float64",
        shown_by="roles=Roles({role}=...) declares it; all other tensors, the weights and the seed were the same",
        repair="read the tensor in the model or in the loss, weights as (loss * w).sum() / w.sum(); or leave it out of "
        "roles=",
        variants={
            "mask": {
                "repair": "pass {tensor} to the model, or multiply the loss of each place by it before it is reduced"
            },
        },
        settle="leave it out of roles= if the model needs none, as a causal one that is padded on the right",
        explains=(*LEARNING, "padding_invariance", "segment_independence", "input_dependence"),
        source="https://github.com/MaximumEntropy/Seq2Seq-PyTorch/issues/6",
    ),
    "nothing_counts": Cause(
        proof="every entry of the weights, or of the mask, leaves its place out",
        summary="{tensor} leaves out everything: all of its {entries} entries are {value}",
        measured="{tensor} has shape {shape} and one value",
        shown_by="roles=Roles({role}=...) declares it",
        repair="look at what makes the tensor: it is cast, divided or inverted before it reaches the batch",
        explains=LEARNING,
        source="https://github.com/huggingface/trl/pull/4201",
        change=("data",),
    ),
    "first_value_kept": Cause(
        proof="the second step depends on the tensor of the first batch, and not on that of its own",
        summary="the second step reads {tensor} of the first batch in place of its own",
        measured="with {tensor} of the first batch in the second one, the gradient of the second step is the same; "
        "with {tensor} of the second batch in the first one, it changes by {difference:share}, float64",
        shown_by="a first step on the second batch depends on its own {tensor}; weights were put back after the first "
        "step",
        repair="cache nothing that is computed from a batch, as in GCNConv(cached=False); or compute it for each batch",
        explains=LEARNING,
        source="https://github.com/pyg-team/pytorch_geometric/issues/619",
    ),
}
found = finding_maker(CAUSES)
