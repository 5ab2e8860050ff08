"""The causes of ``every_term_trains``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_DROPPED = (
    "gradient_reaches_every_param:parameter_unused",
    "gradient_reaches_every_param:graph_cut",
    "loss_contract:part_left_out",
)
"""What other checks see of a term that is not added: its layer is used by nobody."""

_seen = partial(Cause, change=("seen",))
_MOVED = (
    "{moves:?its value changes by {moves:share} when the weights that the loss trains are moved|it is another number "
    "in each step, and no gradient goes through it}"
)

CAUSES = {
    "penalty_off_graph": Cause(
        proof=(
            "a term holds a derivative that was taken without a graph: its value changes with the weights, and it has "
            "no gradient"
        ),
        summary="a derivative is in the loss by its value alone: it was taken without a graph, so it trains nothing",
        measured=_MOVED,
        shown_by=(
            "the term {moves:?changes with|is computed from} the weights and has no gradient; it is added at {added}"
        ),
        repair="torch.autograd.grad(..., create_graph=True)",
        source="https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html",
    ),
    "derivative_off_graph": Cause(
        proof="a derivative that was taken without a graph is added to what has a gradient",
        summary="a derivative is added to the loss, but no gradient flows through it: it was taken without a graph",
        measured="added at {added}",
        shown_by="it was computed from weights that the loss trains, and has no gradient where it is added",
        repair="torch.autograd.grad(..., create_graph=True), where the derivative is to be trained as well",
        settle="derivative.detach() on it says that it is a target",
        source="https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html",
    ),
    "term_detached": _seen(
        proof="a term is added without its gradient, and its value changes with the weights that the loss trains",
        summary="the value of {name} is added to the loss and trains nothing: what it is computed from has no gradient",
        measured=_MOVED,
        shown_by=(
            "{moves:?its value changes with|it is computed from} the weights that this loss trains, and it has no "
            "gradient where it is added"
        ),
        repair="add the tensor itself, without item(), detach() or no_grad()",
        variants={
            "number": {
                "summary": "the value of {name} is added to the loss and trains nothing: it is a plain number there",
                "repair": "add the tensor itself: leave out item(), float() or numpy()",
            },
            "unnamed number": {
                "summary": "a plain number that changes with the weights is added to the loss, and trains nothing",
                "repair": "add the tensor itself: leave out item(), float() or numpy()",
            },
            "end": {
                "summary": "the value of {name} is added to the loss and trains nothing: it is detached as a whole",
                "repair": "add it without detach()",
            },
            "before": {
                "repair": (
                    "compute it outside of no_grad() and without .data or detach() before it; argmax, rounding and "
                    "comparisons have no gradient: use probabilities in their place"
                ),
            },
            "cut off": {
                "summary": (
                    "{name} is added to the loss and trains nothing: it is cut off from {cut_from}, and no step uses "
                    "the gradient that it gives to {goes_to}"
                ),
                "measured": (
                    "none of {passes} backward passes at this line gave {goes_to} a gradient that a step used"
                ),
                "shown_by": (
                    "it is computed from results of {cut_from} that have no history{cleared:?; what it gives to "
                    "{goes_to} is cleared|}"
                ),
                "repair": "give it the result itself, without detach() and outside of no_grad()",
            },
        },
        source="https://github.com/myscience/open-genie/issues/6",
    ),
    "term_between_frozen": _seen(
        proof="a term compares two results of weights that nothing trains: it is a constant",
        summary=("both sides of {names} are computed from {one}, which nothing trains: the term is a constant"),
        measured="value {value:.4g}, without a gradient",
        shown_by="no optimizer holds the weights on either side, and no gradient reaches them",
        repair="compare the result of the model that is trained with that of the teacher",
        explains=("loss_contract:part_detached",),
        variants={
            "two nets": {
                "summary": "{names} compares {one} with {other}, which nothing trains: the term is a constant",
            }
        },
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    ),
    "term_left_out": _seen(
        proof="a number was computed with a gradient, and no backward pass of the run went through it",
        summary="{name} is computed with a gradient and is in no loss that is backpropagated{why:?: {why}|}",
        measured="{count} values in the run, and no backward pass went through any",
        shown_by="other terms of the same steps were backpropagated{untrained:?; {untrained} got no gradient|}",
        repair="add it to the loss, or delete the line",
        explains=_DROPPED,
        settle="no_grad() around what is only logged; parts= says what the loss is the sum of",
        variants={
            "named": {"repair": "loss = loss + {name}"},
            "function": {
                "summary": (
                    "{name} goes into {function}.apply() and into no loss: {why}, so no backward pass reaches {name}"
                ),
                "shown_by": (
                    "a backward pass from the result of {function}.apply() gives {name} a gradient, and none of the "
                    "run goes through it"
                ),
                "repair": "use the result of {function}.apply() in the place of its first argument",
            },
        },
        source="https://github.com/oclivegriffin/crosscode/pull/3",
    ),
    "term_overwritten": _seen(
        proof="a loop computes a loss for each of its turns under one name, and only the last is backpropagated",
        summary="the loop at line {line} computes {name} {count} times, and only the last is backpropagated",
        measured="{lost} of {count} values are replaced before anything reads them, in every step that was watched",
        shown_by=(
            "the earlier ones were computed from other data or other weights{untrained:?; {untrained} got no gradient|}"
        ),
        repair="add them up: loss = 0 before the loop, and loss = loss + ... inside it",
        explains=_DROPPED,
        variants={"named": {"repair": "{name} = 0 before the loop, and {name} = {name} + ... inside it"}},
    ),
    "compared_with_itself": _seen(
        proof=(
            "both sides of a difference are the same calls on the same tensors: it is a constant, whatever the weights "
            "and the batch are"
        ),
        summary=(
            "{names} compares a value with itself: it is {value} for every batch and all weights, and trains nothing"
        ),
        measured="{comparisons:comparison} in the first steps, each of shape {shape}",
        shown_by=(
            "both sides are the same calls on the same tensors, and the loss depends on their difference; "
            "{both:?the slope of one side takes away that of the other|{one:?one side is detached, and the slope of "
            "the other is 0 where they are equal|neither side has a gradient}}"
        ),
        repair="give the comparison the other side: look which name is written on both sides",
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    ),
    "fill_chosen": _seen(
        proof=(
            "the extreme of every row is the value that masked entries were filled with, and a hinge cuts it off: the "
            "term does not depend on the weights"
        ),
        summary=(
            "{names} takes the value of the mask, {fill:.3g}, in every row: {cut} makes {left:.3g} of it, and the term "
            "trains nothing"
        ),
        measured="all {rows} choices, in {calls} of {calls} calls; each had entries of a finite size as well",
        shown_by="no weight changes which entry is the extreme; {cut} at {cut_at} cuts every entry off",
        repair="fill masked entries with -inf where the largest is taken, with inf where the smallest is",
        variants={
            "largest": {
                "repair": (
                    "fill masked entries with -inf where {names} is taken, or take the smallest: turn the sign before "
                    "the mask is filled, not after"
                ),
            },
            "smallest": {
                "repair": (
                    "fill masked entries with inf where {names} is taken, or take the largest: turn the sign before "
                    "the mask is filled, not after"
                ),
            },
        },
        source="https://github.com/jinnnju/PaAno/issues/1",
    ),
    "weight_of_another_name": _seen(
        proof=(
            "the weights have no entry for a term, and one for a like name that no term has, so that the term is not "
            "in the loss"
        ),
        summary="{term!r} is computed and is not in the loss: the weights call it {weight!r}",
        measured="the weight {number:g} of {weight!r} is used by no term, in every step of the run",
        shown_by="both dicts have {others}; no gradient reached {term!r}",
        repair="call both by one name, and look weights up by weights[name], which raises for a name that is not there",
        explains=_DROPPED,
        variants={
            "named": {
                "repair": (
                    "where the dict of weights is built, write {term!r} for {weight!r}; weights[name] raises where "
                    "weights.get(name, 0) gives 0"
                ),
            }
        },
        source="https://github.com/xlliu7/TadTR/issues/21",
    ),
}

found = finding_maker(CAUSES)
