"""The causes of ``no_typos``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

OF_EVERY_CALL = ("intended", "effect")
"""Facts that every finding has."""

_ROOT_OF = (
    "frozen_stays_frozen",
    "step_order",
    "gradient_reaches_every_param",
    "every_param_moves",
    "optimizer_holds_every_param",
    "train_mode",
    "target_networks",
    "loss_contract",
    "loss_formula",
    "every_term_trains",
    "learnable_targets",
    "loss_at_init",
    "finite",
    "padding_invariance",
    "batch_independence",
    "batch_roles_hold",
    "segment_independence",
    "causality",
    "input_dependence",
    "accumulation_equivalence",
    "update_ratio",
    "overfit_one_batch",
    "schedule",
    "data_order",
    "evaluation_is_pure",
)
"""Checks of what a statement of any kind may break."""

_slip = partial(
    Cause,
    measured="with `{intended}` {effect}",
    shown_by="both runs have the same seed and the same batches",
    explains=_ROOT_OF,
)

CAUSES = {
    "result_not_kept": _slip(
        proof="a call returns a changed copy, and its value is lost",
        summary="`{names}()` returns a changed copy, and this line does not keep it: `{kept}` stays as it was",
        repair="keep the result, x = x.clamp(0), or call the in-place form, x.clamp_(0)",
        source="https://github.com/facebookresearch/ParlAI/pull/3068",
    ),
    "method_not_called": _slip(
        proof="a statement names a method without calling it",
        summary="this line names `{names}` and does not call it: the parentheses are missing",
        repair="add the parentheses",
        source="https://docs.astral.sh/ruff/rules/useless-expression/",
    ),
    "comparison_as_statement": _slip(
        proof="a statement compares with == and loses the result",
        summary="this line compares `{names}` with a value and does not set it: == in place of =",
        repair="assign with =",
        source="https://docs.astral.sh/ruff/rules/useless-comparison/",
    ),
    "attribute_without_effect": _slip(
        proof="an attribute is set that nothing reads, with a name close to requires_grad",
        summary="nothing reads `{attribute}`, which this line sets on `{object}`",
        repair="write requires_grad, or call requires_grad_(False)",
        source="https://github.com/udacity/deep-learning-v2-pytorch/issues/12",
    ),
    "plus_behind_the_equals_sign": _slip(
        proof="=+ replaces a value, where += would add to it",
        summary="=+ assigns: this line replaces `{names}` and adds nothing to it",
        repair="write += with the plus first",
        source="https://rules.sonarsource.com/python/RSPEC-2757/",
    ),
    "name_repeated": _slip(
        proof="a name is in the place of another one that fits: twice in a tuple or a call, or left in a copied line",
        summary="`{read}` is taken twice in this line, and `{unread}` is never read",
        repair="use the other name in the second place",
        variants={
            "operands": {
                "summary": "`{read}` is given twice, where `{unread}` fits: of a value and itself this is nothing new"
            },
            "copied": {
                "summary": "this line is a copy of line {above} with `{read}` left in it, and nothing reads `{unread}`",
            },
        },
        source="https://github.com/Sahandfer/CEM/issues/5",
    ),
    "key_misspelt": _slip(
        proof="a key is looked up with a default, no dict has it, and nothing reads a key that is almost it",
        summary="no dict of the project has the key `{read}`, which this line looks up, and nothing reads `{unread}`",
        repair="use the key that the dict has",
        source="https://github.com/IntelLabs/distiller/issues/191",
    ),
    "state_not_carried": _slip(
        proof="nothing reads the new state of a recurrent layer, and each round of a loop gives it the same old one",
        summary="each round of this loop gives {function}() `{read}` again, and nothing reads its new state `{unread}`",
        repair="give it the state of the round before",
        source="https://github.com/pytorch/examples/issues/88",
    ),
    "reshape_for_permute": _slip(
        proof="a reshape to the axes of a tensor in another order keeps the order of its entries, and so mixes them",
        summary="`{names}` makes {made} of {given}: the axes in another order, and the entries in the old one",
        repair="permute or transpose the axes",
        source="https://github.com/Selen-Suyue/DensePolicy2D/issues/3",
    ),
    "return_inside_loop": _slip(
        proof="the last statement of a loop returns what the loop adds up, so that it has one round",
        summary="this return is inside of the loop that adds `{summed}` up, so only its first round counts",
        repair="move the return behind the loop",
        source="https://github.com/microsoft/ProDA/issues/33",
    ),
    "arguments_swapped": _slip(
        proof="two arguments are given by position, each under the other's name",
        summary="{function}() takes `{one}` before `{other}`, and this call gives them the other way round",
        repair="give them in the order of the parameters, or by keyword",
        settle="rename the variables, or give them by keyword, if the order is intended",
        source="https://github.com/WenjieDu/PyGrinder/issues/42",
    ),
    "argument_not_given": _slip(
        proof="a variable is never read, and a function that takes an argument of this name is called without it",
        summary="nothing reads `{names}`, and this call of {function}(), which takes `{argument}`, does not give it",
        repair="give the argument",
        settle="remove the variable, or let its name begin with _, if the argument is left out on purpose",
        source="https://github.com/lucidrains/DALLE2-pytorch/issues/235",
    ),
    "results_swapped": _slip(
        proof="two results are unpacked, each under the other's name",
        summary="{function}() returns `{returned}`, and this line unpacks it in another order",
        repair="unpack the results in the order in which they are returned",
        settle="rename the variables if the order is intended",
        source="https://github.com/QuantEcon/lecture-python.myst/pull/762",
    ),
}

found = finding_maker(CAUSES)
