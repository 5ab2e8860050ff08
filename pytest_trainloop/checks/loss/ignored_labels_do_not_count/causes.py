"""The causes of ``ignored_labels_do_not_count``. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

_BETTER = ("padding_invariance", "loss_at_init", "overfit_one_batch:not_learning")

CAUSES = {
    "ignored_labels_count": Cause(
        proof="other labels at the places to be ignored, on this line alone, change the gradient",
        measured="with other labels there the gradient of the first step differs by {difference:.1%}",
        shown_by=(
            "the step was repeated in float64 with labels of other classes at these places: comparisons still saw "
            "{label}, only what this line computes changed"
        ),
        repair="leave these places out, on both sides",
        do_not="label these places with a class: they would train it",
        explains=_BETTER,
        variants={
            "the label itself": {
                "summary": "this line counts {count:label} of {tensor} that {count:?are|is} {label}, to be ignored",
                "repair": (
                    "keep = labels != {label}; use [keep] on both sides, or multiply by keep and divide by keep.sum()"
                ),
            },
            "placeholders": {
                "summary": (
                    "this line counts {count:label} of {tensor} that {count:?were|was} {label}, to be ignored, and "
                    "{count:?have|has} another label in its place"
                ),
                "repair": (
                    "leave these places out after this line: keep = labels != {label}; multiply by keep, and divide by "
                    "keep.sum()"
                ),
            },
        },
        source="https://github.com/qubvel-org/segmentation_models.pytorch/pull/366",
    ),
    "only_ignored_labels_count": Cause(
        proof="on one line other labels at the ignored places change the gradient, and other labels elsewhere do not",
        summary="the mask is inverted: this line counts the labels of {tensor} that are {label}, and no others",
        measured=(
            "the gradient of the first step differs by {difference:.1%} with other labels at these places, and by 0 "
            "with other labels everywhere else"
        ),
        shown_by="the step was repeated in float64 with other labels on this line, at these places and then elsewhere",
        repair="invert the mask: it must be true where a label counts (labels != ignore_index)",
        explains=_BETTER,
        source="https://github.com/QwenAudio/CosyVoice/issues/1449",
    ),
}
found = finding_maker(CAUSES)
