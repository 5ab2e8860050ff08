"""The causes of ``loss_components``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

_DROPPED = (
    "gradient_reaches_every_param:parameter_unused",
    "loss_contract:part_left_out",
    "every_term_trains:term_left_out",
)
"""What other checks see of a term that trains nothing: its layer, or its result, is used by nobody."""

_part = partial(
    Cause,
    measured=(
        "coefficients fitted over {states} settings of the model's weights: {coefficients}{scaled:?, all times "
        "{factor:.4g}|}{fitted:?; unexplained part of the {what} {left:.0e}|}"
    ),
)
_DECLARED = "{names} is {own:?declared at {declared:.4g}|reported at 1} and trained at {trained:.4g}"
_GIVE_THE_LOSS = "with {names} at {trained:.4g} the parts give the loss, at moved weights and other batches too"

CAUSES = {
    "part_detached": _part(
        proof=(
            "the value of the loss holds the part, the part changes with the weights, and the gradient of the loss is "
            "the sum of the other parts' gradients"
        ),
        summary="{names} is in the loss and trains nothing: its gradient is cut off",
        shown_by="the value of the loss changes with {names}; its gradient is that of {others} alone",
        repair="leave out the detach(), no_grad() or item() on its way into the sum",
        explains=("gradient_reaches_every_param:graph_cut", "every_term_trains:term_detached", *_DROPPED),
        source="https://github.com/guopengf/FL-MRCM/issues/10",
        change=("backpropagated",),
    ),
    "part_left_out": _part(
        proof="the gradient of the loss is the sum of the other parts' gradients, at all weights and batches",
        summary="{names} is reported and is not in the loss that is trained: its weight there is 0",
        shown_by="{others} alone give the {what} of the loss, at moved weights too",
        repair="add it to what is backpropagated, or take it out of parts=",
        explains=_DROPPED,
        settle='a term that begins later: declare it with its weight of now, {"kl": (0.0, kl)}',
        variants={"named": {"repair": "loss = ... + {names}; or take {names} out of parts="}},
        source="https://github.com/OpenSparseLLMs/MoM/issues/2",
        change=("backpropagated",),
    ),
    "sign_differs": _part(
        proof="the gradient of the loss holds the part's gradient with the opposite sign",
        summary=f"{_DECLARED}: with the opposite sign",
        shown_by=_GIVE_THE_LOSS,
        repair='turn the sign in the loop, or declare it: {"entropy": (-1.0, entropy)}',
        variants={"named": {"repair": "turn the sign in the loop; or declare {pair} if this sign is intended"}},
        source="https://github.com/DLR-RM/stable-baselines3/issues/127",
        change=("backpropagated",),
    ),
    "weight_differs": _part(
        proof="the gradient of the loss holds the part's gradient at a constant weight, which is not the declared one",
        summary=_DECLARED,
        shown_by=_GIVE_THE_LOSS,
        repair='declare the weight, {"kl": (0.1, kl)}, or train at the one that is declared',
        settle="a declared weight, (weight, value), is judged: another one in the loop is a fault",
        variants={
            "named": {"repair": "if {trained:.4g} is intended: parts={pair}; if not, train at {declared:.4g}"},
            "logged": {
                "summary": "the loss weights parts that are given without a weight: {each}",
                "shown_by": "with these weights the parts give the loss, at moved weights and other batches too",
                "repair": "declare the intended weights: parts={pair}",
            },
        },
        source="https://github.com/microsoft/protein-frame-flow/issues/23",
        change=("backpropagated",),
    ),
    "part_constant": _part(
        proof="the part is the same number at all weights, with dropout too: it has no history, or is exactly 0",
        summary="{names} is {value:.4g} at all weights: it trains nothing",
        shown_by="the weights were moved by 10 % and by 30 %, and it stayed the same",
        repair=(
            "look at what it is computed from: a copy of the weights, results under no_grad(), labels alone; two sides "
            "of a comparison that are the same tensor; a mask or a margin that lets nothing through"
        ),
        settle="a term that is off for now: declare its weight, (0.0, value)",
        change=("part of the loss",),
        source="https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/66",
    ),
    "something_unreported": Cause(
        proof="no weights make the gradient of the loss a sum of the parts' gradients",
        summary=(
            "the loss is not the sum of its parts{weights:?: no weights of them give its gradient, most visibly that "
            "of {most}|}"
        ),
        measured=(
            "the loss is {root:.6g}, its parts add up to {sum:.6g}{by_gradient:?; {left:share} of its gradient is left "
            "when theirs are taken away|}"
        ),
        shown_by="both were taken at equal weights, batch and draws, in float64",
        repair=(
            'name what is missing as a part of its own, {"rest": ...}, or take it out of the loss; or compute the '
            "parts from the inputs that the loop gives its model"
        ),
        variants={
            "decay": {
                "summary": (
                    "the loss is not the sum of its parts: it holds {decay:.3g} times the sum of the squares of "
                    "{weights:?{weights}|the weights}"
                ),
                "repair": 'report it as a part: "decay": {decay:.3g} * sum(p.pow(2).sum() for p in ...)',
            },
            "outside": {
                "summary": (
                    "the loss is not the sum of its parts: it holds something that trains "
                    "{weights:?{weights}|the weights}, which no part reaches"
                ),
            },
        },
        source="https://github.com/NVIDIA-Merlin/models/issues/495",
        change=("parts",),
    ),
}

found = finding_maker(CAUSES)
