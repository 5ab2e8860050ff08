"""The causes of ``schedule`` that lie in its length: what each proves, and what to write."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

LEARNING = ("overfit_one_batch", "update_ratio")

WINDOWS = ("accumulation_equivalence:update_differs", "accumulation_equivalence:scheduled_inside_window")

_SETTLE = "give steps= (optimizer steps of the whole training), or epochs= (its passes)"

PLAN_CAUSES = {
    "counts_something_else": Cause(
        proof="the schedule ends after as many calls as there are of one unit, and is called once for each of another",
        repair="build it for as many calls as are made: steps of the optimizer, where it is called once a step",
        change=("scheduler",),
        settle=_SETTLE,
        explains=(*LEARNING, *WINDOWS),
        source="https://github.com/Lornatang/SRGAN-PyTorch/issues/1",
    ),
    "per_micro_batch": Cause(
        proof="the scheduler is called once for each micro-batch, and the optimizer steps once for several",
        repair="call it right after optimizer.step(), in the same branch",
        change=("seen",),
        settle=_SETTLE,
        explains=(*LEARNING, *WINDOWS),
        source="https://github.com/h2oai/h2o-llmstudio/issues/663",
    ),
    "runs_out": Cause(
        proof="stepped forward without training (only scheduler.step() is called), it raises before the training ends",
        repair="total_steps = the number of calls: len(loader) * epochs // accumulate, where it is called once a step",
        change=("scheduler",),
        explains=LEARNING,
        settle=_SETTLE,
        source="https://github.com/A4Bio/PiFold/issues/6",
    ),
    "ends_in_warmup": Cause(
        proof="stepped forward without training (only scheduler.step() is called), the rate still rises at its end",
        repair="a warm-up of a few percent of the steps, in the unit in which the scheduler is called",
        change=("scheduler",),
        explains=LEARNING,
        settle=_SETTLE,
        source="https://github.com/Morizeyao/GPT2-Chinese/issues/60",
    ),
    "over_too_early": Cause(
        proof="the last change comes before half of the training, and leaves a hundredth of the peak or less",
        repair="build it for as many calls as the training makes",
        change=("scheduler",),
        explains=LEARNING,
        settle=_SETTLE,
        source="https://github.com/SafeAILab/EAGLE/pull/107",
    ),
    "rises_again": Cause(
        proof="the schedule has come to its lowest point before the training is over, and the rate rises again",
        repair="T_max = the number of calls; CosineAnnealingWarmRestarts where restarts are meant",
        change=("scheduler",),
        settle=_SETTLE,
        source="https://github.com/ScrollPrize/villa/pull/1495",
    ),
    "barely_begun": Cause(
        proof="the schedule comes to its lowest point after twice the training, which ends above half of the peak",
        repair="build it for as many calls as the training makes",
        change=("scheduler",),
        settle=_SETTLE,
        source="https://github.com/vllm-project/speculators/pull/1104",
    ),
    "zero_throughout": Cause(
        proof="stepped forward without training (only scheduler.step() is called), the group's rate is 0 at every call",
        change=("group",),
        repair="give the group a rate, or take it out of the optimizer; frozen= where it is meant not to train",
        explains=("every_param_moves",),
    ),
}
