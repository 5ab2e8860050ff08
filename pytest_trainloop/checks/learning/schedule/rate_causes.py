"""The causes that the record of a run shows: what drives which rate."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

LEARNING = ("overfit_one_batch", "update_ratio")

RATE_CAUSES = {
    "drives_another": Cause(
        proof=(
            "the scheduler moves the rates of an optimizer that makes no step any more, and the one that steps holds "
            "the same weights at a constant rate"
        ),
        repair="build the scheduler after the last optimizer, and from that one: scheduler = Scheduler(optimizer)",
        change=("scheduler",),
        source="https://github.com/pytorch/ignite/issues/545",
    ),
    "two_on_one": Cause(
        proof="two schedulers of one kind drive one optimizer, and another optimizer that steps has none",
        repair="give the second scheduler the optimizer that has none",
        change=("scheduler",),
        source="https://github.com/Lightning-AI/pytorch-lightning/pull/5519",
    ),
    "never_called": Cause(
        proof="the scheduler is built on an optimizer that steps, and fit comes to its end without a call of it",
        repair="scheduler.step(), after each optimizer.step() where its settings count steps, else once a pass",
        settle="give fit the whole loop over the epochs, so that the call is in it",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/voicepaw/so-vits-svc-fork/pull/291",
    ),
    "called_twice": Cause(
        proof="two lines call the same scheduler between each two steps of its optimizer",
        repair="remove one of the two calls",
        change=("seen",),
    ),
    "counted_in_two_units": Cause(
        proof="one line calls the scheduler after each step, and another one calls it at the end of each pass as well",
        repair="remove one of the two calls: keep the one in whose unit the settings count",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/aimagelab/meshed-memory-transformer/issues/71",
    ),
    "base_rate_zero": Cause(
        proof="the scheduler is built after its optimizer's rates have come to 0, and every step since is made at 0",
        repair='before it is built: for group in optimizer.param_groups: group["lr"] = group["initial_lr"]; or build '
        "CosineAnnealingWarmRestarts once",
        explains=LEARNING,
        change=("scheduler", "seen"),
        source="https://github.com/pytorch/pytorch/issues/78003",
    ),
    "factor_zero": Cause(
        proof="a factor of 0 sets every rate to 0 from above half of its peak, and the steps go on at 0",
        repair="gamma=1 where the rate is to stay constant",
        explains=LEARNING,
        change=("scheduler",),
        source="https://github.com/LINCellularNeuroscience/VAME/issues/26",
    ),
    "schedule_overwritten": Cause(
        proof="each rate that the scheduler sets is replaced, by a line or by another scheduler, before a step uses it",
        repair="remove the line that writes the rate, or the scheduler",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/8884",
    ),
    "written_rate_lost": Cause(
        proof="a line writes the rate, and the scheduler replaces it before a step uses it",
        repair="remove the line that writes the rate, or the scheduler",
        change=("seen",),
        source="https://github.com/AnswerDotAI/ModernBERT/pull/124",
    ),
    "lambdas_share_a_variable": Cause(
        proof="the lambdas of the groups have one code, and all read one variable, which the loop around them sets",
        repair="bind the variable: lambda step, factor=factor: ...",
        change=("scheduler",),
        source="https://github.com/peteryuX/retinaface-tf2/pull/34",
    ),
    "optimizer_rebuilt": Cause(
        proof="optimizers with moments and equal settings make one step each, on the same weights",
        repair="build the optimizer once, before the loop",
        explains=LEARNING,
        change=("optimizer", "seen"),
        source="https://github.com/alan-turing-institute/deepsensor/issues/47",
    ),
    "scheduler_rebuilt": Cause(
        proof="a scheduler is built anew for every step, or for every pass at the length of the whole run",
        repair="build the scheduler once, before the loop",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/aimagelab/mammoth/issues/25",
    ),
    "rate_nobody_reads": Cause(
        proof='a number called a rate takes new values, and group["lr"], which steps read, is constant in all groups',
        repair='for group in optimizer.param_groups: group["lr"] = ...',
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/pbaylies/stylegan2/issues/5",
    ),
    "option_nobody_reads": Cause(
        proof=(
            "a key of a group is no option of its optimizer, looks like a misspelling of one or a multiplier of it, "
            "and nothing but torch looks it up while the loop is built or in fit"
        ),
        repair="the option's own name",
        settle="have fit call what reads it",
        change=("group", "optimizer"),
        source="https://github.com/msight-tech/research-ms-loss/issues/27",
    ),
    "rate_written_to_copy": Cause(
        proof="the rate of a group that state_dict() gave is written, nobody reads it, and the optimizer's own stays",
        repair='for group in optimizer.param_groups: group["lr"] = ...',
        settle="have fit save, or load, the edited state dict",
        explains=LEARNING,
        change=("seen",),
        source="https://github.com/pytorch/examples/issues/64",
    ),
    "plateau_mode": Cause(
        proof="the mode is the one for the opposite of the metric: for the loss that is minimized, or by its name",
        repair='ReduceLROnPlateau(optimizer, mode="min")',
        change=("scheduler",),
        source="https://github.com/RMeli/gnina-torch/pull/57",
    ),
    "plateau_metric_stands_still": Cause(
        proof="every call is given the loss of the first one, while the loss moves on",
        repair="hand over the loss of this pass: scheduler.step(loss)",
        change=("seen",),
    ),
    "metric_as_epoch": Cause(
        proof="a scheduler other than ReduceLROnPlateau is called with the loss, or with fractions that rise and fall",
        repair="scheduler.step() without an argument; only ReduceLROnPlateau takes a metric",
        explains=LEARNING,
        change=("seen",),
    ),
    "bound_above_rate": Cause(
        proof="the lower bound of a schedule that lowers the rate lies above the rate of every group",
        repair="eta_min (or min_lr) far below lr: 0, or a hundredth of it",
        change=("scheduler",),
        source="https://github.com/Vision-CAIR/MiniGPT-4/issues/444",
    ),
    "group_at_zero": Cause(
        proof="the group's rate is 0 at all watched steps while gradients arrive and other groups learn",
        repair='write the rate of every group: for group in optimizer.param_groups: group["lr"] = ...',
        settle='frozen=("path",) where it is not to learn',
        change=("seen",),
    ),
    "zero_for_steps": Cause(
        proof="the rate of every group is 0 for two steps or more, while gradients arrive",
        repair="begin a warm-up above 0, (step + 1) / warmup, and divide with / and not with //",
        change=("scheduler",),
        source="https://github.com/Project-MONAI/tutorials/issues/630",
    ),
    "group_without_schedule": Cause(
        proof="the group was added after the schedule began, which moves the rates of all groups before it",
        repair="add the group before the scheduler is built",
        change=("group", "scheduler"),
        source="https://github.com/huggingface/transformers/issues/20029",
    ),
    "one_group_scheduled": Cause(
        proof="a line writes the rate of one group by its index, and the other groups keep theirs at all steps",
        repair='for group in optimizer.param_groups: group["lr"] = ...',
        change=("seen",),
        source="https://github.com/yu-changqian/TorchSeg/issues/84",
    ),
    "group_rates_made_equal": Cause(
        proof="groups are built with different rates, and a line writes one rate into all of them",
        summary="{groups:group} were built with the rates {given}, and a line writes one rate into all of them",
        measured="from the second of {steps:step} on all groups have one learning rate, at first {rate:g}",
        shown_by="a line of fit writes the rate of each group",
        repair=(
            'keep each rate once, base = [g["lr"] for g in optimizer.param_groups], and write base[i] * factor into '
            "group i"
        ),
        change=("seen",),
        settle="build all groups with one lr where one rate is to count",
        source="https://github.com/JUGGHM/PENet_ICRA2021/issues/29",
    ),
    "group_left_empty": Cause(
        proof="a pattern is true of no name, and puts parameters into a group that is empty where it is answered yes",
        summary="the group with lr={rate:g} is empty: {patterns} matches no name, and {names} {names:are} trained with "
        "lr={other:g}",
        measured="asked of {asked:name}, true of none",
        shown_by="with the answer yes, the same code puts {names} into that group",
        change=("seen",),
        source="https://github.com/huggingface/lerobot/pull/280",
    ),
}
