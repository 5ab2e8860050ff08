"""The causes of ``padding_invariance``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.checks.batch.explained import LEARNING
from pytest_trainloop.core.registry import Cause, finding_maker

MEASURED = (
    "relative difference {difference:share}; |g| with padding / without = {ratio:.4g}, {direction}, loss {loss:.5g} "
    "and {other_loss:.5g}, all {parameters} parameters, {precision}"
)
EQUAL = "both gradients are equal"
"""What ``shown_by`` says where an experiment takes the difference away."""

_REFERENCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn."


def _says(text: str) -> str:
    return (
        "{group:?{group}: |}" + text + ": the gradient of the same rows, padded to {total} positions and cut to "
        "{real}, differs by {difference:share}{undeclared:?; if padding must not count, declare padding=Padding(...)|}"
    )


def _shown(text: str) -> str:
    return text + "{reason:? ({reason})|}; these positions are padding: {known}"


_COUNTS = "batch_roles_hold:left_out_places_count"
_padding = partial(
    Cause,
    measured=MEASURED,
    explains=(*LEARNING, _COUNTS),
    change=("seen",),
    judged="padding=Padding(...) makes it a fault",
)
_counts = partial(_padding, explains=(_COUNTS,))

_ATTENDED, _POOLED = "attention looks at padded positions", "padded positions are pooled with the real ones"
_SHIFTED = "positions are counted from the left edge, where the padding is"
_BOTH = {"shown_by": _shown(f"with both set right {EQUAL}, and with either alone not")}
_PACK = "pack the sequences: pack_padded_sequence(x, lengths, enforce_sorted=False)"
_READS = "the loss includes padded positions: {by} reads a target there"

CAUSES = {
    "pad_row_drawn": _padding(
        proof="the initialisation overwrites the row of padding_idx, and the gradients agree once it is zero again",
        summary=_says("the row of padding_idx={pad} in {table} is drawn at random, and padding adds it to the result"),
        shown_by=_shown(f"with zeros in this row {EQUAL}; another seed draws other values for it"),
        repair="put zeros back after this line, under no_grad(): embedding.weight[embedding.padding_idx] = 0; look-ups "
        "give this row no gradient",
        change=("drawn", "module"),
        judged="",
        source="https://github.com/datawhalechina/torch-rechub/pull/176",
    ),
    "padded_keys_attended": _padding(
        proof="the gradients agree once attention ignores padded keys",
        summary=_says(_ATTENDED),
        shown_by=_shown(f"with padded keys left out there {EQUAL}"),
        repair="give attention the mask: key_padding_mask (true at padding), attn_mask, or attention_mask of Hugging "
        "Face models",
        variants={
            "inverted": {
                "summary": _says("the attention mask is inverted: real positions look at padded ones only"),
                "shown_by": _shown("the weights of all real keys are exactly zero, and those of padded ones are not"),
                "repair": "invert the mask: key_padding_mask is True at padding, attn_mask of "
                "scaled_dot_product_attention is True at keys to attend to",
            },
            "masked": {
                "summary": _says(f"{_ATTENDED}: its mask leaves them visible"),
                "repair": "hide padded keys in the mask: key_padding_mask is True at padding, attn_mask of "
                "scaled_dot_product_attention is True at keys to attend to",
            },
            "queries": {
                "summary": _says("the attention mask hides padded queries, not padded keys"),
                "shown_by": _shown(
                    f"all weights of a padded query are equal, as where all its scores are masked; with padded keys "
                    f"left out {EQUAL}"
                ),
                "repair": "the last axis of the scores holds the keys: give the mask (rows, positions) as "
                "mask[:, None, None, :], not as mask[:, None, :, None]",
            },
            "positions too": {"summary": _says(f"{_ATTENDED}, and {_SHIFTED}"), **_BOTH},
            "pooling too": {"summary": _says(f"{_ATTENDED}, and {_POOLED}"), **_BOTH},
        },
        source=_REFERENCE + "MultiheadAttention.html",
        change=("padding mask", "seen"),
    ),
    "padding_pooled": _padding(
        proof="the gradients agree once pooling and last states read real positions only, or once a mask is inverted",
        summary=_says(_POOLED),
        shown_by=_shown(f"over real positions only {EQUAL}"),
        repair="pool by the mask: (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True); pack sequences, or read "
        "each row at its own last position",
        variants={
            "inverted": {
                "summary": "{group:?{group}: |}{masks} is 1 where ids are padding: it is inverted",
                "shown_by": _shown(f"with {{masks}} inverted {EQUAL}"),
                "repair": "invert the mask where it is made: 1 at real positions, as in (ids != pad_id)",
            },
            "a maximum": {
                "repair": "leave padded positions out of the maximum: x.masked_fill(mask == 0, -torch.inf), the mask "
                "in the shape of x",
            },
            "positions too": {"summary": _says(f"{_POOLED}, and {_SHIFTED}"), **_BOTH},
        },
        source=_REFERENCE + "utils.rnn.pack_padded_sequence.html",
    ),
    "positions_shifted": _padding(
        judged="padding=Padding(...) makes it a fault, unless all batches have one length",
        proof="the gradients agree once positions are counted from the first real one",
        summary=_says(_SHIFTED),
        shown_by=_shown(f"the padding itself adds nothing: with positions counted from the first real one {EQUAL}"),
        repair="position_ids = (mask.cumsum(1) - 1).clamp(min=0), or pad on the right",
        source="https://github.com/TransformerLensOrg/TransformerLens/issues/1609",
        change=("positions", "seen"),
    ),
    "mean_over_padding": _padding(
        proof="padding scales the gradient by exactly the share of real positions, or the gradients agree once the "
        "loss averages real positions only",
        summary=_says("the loss of {real} real positions is divided by all {total}"),
        shown_by=_shown(
            "both gradients are parallel: that with padding is exactly {factor:.4g} times the one without, the share "
            "of real positions"
        ),
        repair="divide by the number of real entries: (loss * mask).sum() / mask.expand_as(loss).sum()",
        variants={
            "of one term": {
                "summary": _says("{by}() divides by the number of all positions, and padded ones are zero in it"),
                "shown_by": _shown(f"with the mean over real positions only {EQUAL}"),
            },
        },
        source="https://github.com/DeepX-inc/machina/pull/198",
        change=("loss", "seen"),
    ),
    "padded_targets": _padding(
        proof="the loss compares outputs at padded positions with targets; or, once padded positions do not count in "
        "the loss, only the gradient of the real ones is left",
        summary=_says(_READS),
        shown_by=_shown("outputs at padded positions beyond the first have non-zero gradients"),
        repair="take padded positions out before the mean: ignore_index, or (loss * mask).sum() / mask.sum()",
        variants={
            "reduced": {"summary": _says(_READS + ", and {reduction}() counts it")},
            "aligned": {
                "summary": _says("ctc_loss aligns padded positions too: input_lengths counts them"),
                "repair": "give the length of each row after the model as input_lengths",
            },
            "no target": {
                "summary": _says("outputs at padded positions count in the loss"),
                "shown_by": _shown(
                    "without their terms of the loss only the gradient of the real positions is left{divided:?, "
                    "divided by all positions|}"
                ),
            },
            "first token": {
                "summary": _says("outputs at padded positions count in the loss"),
                "shown_by": _shown("without their terms of the loss only the gradient of the real positions is left"),
                "repair": "give the first real token the ignored label too: a padded position predicts it",
            },
        },
        source="https://github.com/open-edge-platform/physical-ai-studio/pull/873",
        change=("loss", "seen"),
    ),
    "other_pad_id": _padding(
        proof="rows are filled with one padding id, and the gradients agree once it is the one that the model expects",
        summary=_says("the model takes the id {taken} for padding, and rows are filled with {filled:g}"),
        shown_by=_shown(f"with {{taken}} in the padding {EQUAL}"),
        variants={
            "ids": {
                "repair": "fill rows with {taken}: pad_sequence(..., padding_value={taken}); or give the model pad id "
                "{filled:g}",
            },
        },
        repair="fill rows with the id that the model takes for padding: pad_sequence(..., padding_value=pad_id)",
        source="https://github.com/CarperAI/trlx/issues/474",
        change=("ids", "seen"),
    ),
    "mask_of_another": _padding(
        proof="padded positions count exactly where the mask of another sequence says that they are real",
        summary="{group} is masked with the mask of {other}: its padding counts where {other} has real "
        "positions{undeclared:?; if padding must not count, declare padding=Padding(...)|}",
        measured="relative difference {difference:share} with other values there, float64",
        shown_by="other values in padded positions change the gradient where the other sequence is real, and nowhere "
        "else; these positions are padding: {known}",
        repair="mask each sequence with its own mask",
        variants={"named": {"repair": "give {group} its own mask: pass it at the call that handles {group}"}},
        source="https://github.com/QwenAudio/CosyVoice/issues/1449",
    ),
    "padding_counts": _counts(
        judged="padding=Padding(...) makes it a fault, unless the loop draws random numbers",
        proof="the gradient changes with padding, and no other cause explains it",
        summary=_says("the loss changes with padding{by:?, first through {by}|}"),
        shown_by=_shown(
            "not determined; ruled out as single causes: padded keys, pooling, shifted positions, a factor{draws:?; "
            "{draws} may draw what is trained on, by the length of the batch|}"
        ),
        repair="mask padded positions before each layer that mixes positions",
        variants={
            "recurrent": {
                "shown_by": _shown(f"over real positions only {EQUAL}: {{why}}"),
                "repair": _PACK,
            },
            "statistics": {
                "summary": _says("the statistics of a batch norm are taken over padded positions too"),
                "shown_by": _shown(f"with its running statistics {EQUAL}, and with those of the batch not"),
                "repair": "normalise real positions only: x[mask] = norm(x[mask]); or use a norm of each position "
                "(nn.LayerNorm)",
            },
        },
        source="https://github.com/OpenNMT/OpenNMT-py/issues/272",
    ),
}

found = finding_maker(CAUSES)
