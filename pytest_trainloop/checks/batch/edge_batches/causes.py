"""The causes of ``edge_batches``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from pytest_trainloop.core.registry import Cause, finding_maker

_LOADER = "the project's DataLoader as batches= says whether such a row comes alone: if it does, this is a fault"
_WEIGHTS = "The gradient of two rows is the sum of the gradients of each row, with weights [{weights}] (float64)"

CAUSES = {
    "row_axis_squeezed": Cause(
        proof="one row goes through once squeeze removes only what it removes from a full batch, and its gradient is "
        "what it is among other rows",
        summary="on a batch of one row {names} removes the row axis too: fit raises {raised}",
        measured="{before} becomes {after}{raised_at:? at {raised_at}|}",
        shown_by=f"with the axis kept, one row goes through. {_WEIGHTS}",
        repair="name the axis: squeeze(-1), squeeze(1); or flatten(1), which keeps rows",
        change=("seen",),
        explains=("data_order:last_batch_raises",),
        variants={
            "silent": {
                "summary": "on a batch of one row {names} removes the row axis too: nothing is raised, and the "
                "gradient is wrong",
                "measured": "{before} becomes {after}; the row's gradient is {differs}, compared with the axis kept",
                "shown_by": f"with the axis kept, the row counts as it does among others. {_WEIGHTS}",
            }
        },
        source="https://github.com/layumi/Person_reID_baseline_pytorch/issues/77",
    ),
    "leftover_batch": Cause(
        proof="the loader's own last batch ends the loop or makes its weights NaN, and full ones do not",
        summary="the last batch of an epoch has {rows}: {failure}",
        measured="{data} rows of data in batches of {batch_size} leave {rows}"
        "{op:?; the first operation that is not finite is {op}()|}",
        shown_by="the dataset and collate_fn of the loader made that batch. Full batches go through",
        repair="drop_last=True in the training loader; or have the loop skip or join batches that are too small",
        change=("loader", "seen"),
        explains=("data_order:last_batch_raises",),
        source="https://github.com/openvinotoolkit/nncf/pull/379",
    ),
    "nan_when_all_ignored": Cause(
        proof="a row in which nothing counts makes every weight NaN, and a row in which something does makes none",
        summary="a batch in which nothing counts makes {weights:?{weights} weights NaN|the loss NaN, and weights stay "
        "finite}: {op}() divides by zero",
        measured="nothing counts in {empty} of {rows} rows of the example batch",
        shown_by="a batch of one row in which something counts leaves all weights finite",
        repair="sum the losses and divide by the count, at least 1 (reduction='sum', clamp(min=1)); or skip such a "
        "batch before backward()",
        change=("seen",),
        judged=_LOADER,
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3796",
    ),
    "nan_at_length_one": Cause(
        proof="a row of length one, cut to it, makes weights NaN, and a longer one cut so makes none",
        summary="a row of length one makes {weights} weights NaN: {op}() is the first operation that is not finite",
        measured="row {row} of the example batch has length one",
        shown_by="a longer row, cut to its own length, leaves all weights finite",
        repair="leave rows of length one out of the data; take a standard deviation over time with unbiased=False, "
        "and add an eps",
        change=("seen",),
        judged=_LOADER,
        source="https://github.com/facebookresearch/fairseq/issues/1863",
    ),
    "index_out_of_table": Cause(
        proof="the loop raises IndexError on a row that ends in the declared padding",
        summary="the padding id {pad} is outside {table}, which has {rows} rows",
        measured="fit raises {raised}",
        shown_by="in this run {words}. No row of the example batch contains it",
        change=("module", "seen"),
        source="https://github.com/lucidrains/audiolm-pytorch/issues/18",
    ),
}

found = finding_maker(CAUSES)
