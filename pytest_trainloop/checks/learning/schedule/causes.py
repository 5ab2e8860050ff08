"""The causes of ``schedule``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

LEARNING = ("overfit_one_batch", "update_ratio")
WINDOWS = ("accumulation_equivalence:update_differs", "accumulation_equivalence:scheduled_inside_window")

_seen = partial(Cause, change=("seen",))
_built = partial(Cause, change=("scheduler",))
_plan = partial(_built, judged="give steps= (optimizer steps of the whole training), or epochs=")
_ALL_GROUPS = 'for group in optimizer.param_groups: group["lr"] = ...'
_ALONE = "stepped forward without training (only scheduler.step() is called), "

CAUSES = {
    "drives_another": _built(
        proof=(
            "the scheduler moves the rates of an optimizer that makes no step any more, and the one that steps holds "
            "the same weights at a constant rate"
        ),
        summary=(
            "{kind} moves the learning rates of an optimizer that makes no step{left:? after its first {left}|}; the "
            "{other} that steps stays at {lr}"
        ),
        measured=(
            "{calls:call} moved its rate from {first:g} to {last:g}; the other optimizer makes {steps:step} at a "
            "constant {lr}"
        ),
        shown_by="both optimizers hold {held}",
        repair="build the scheduler after the last optimizer, and from that one: scheduler = Scheduler(optimizer)",
        source="https://github.com/pytorch/ignite/issues/545",
    ),
    "two_on_one": _built(
        proof="two schedulers of one kind drive one optimizer, and another optimizer that steps has none",
        summary="two {kind} drive {driven}, and {without} has no schedule",
        measured="both have {equal:?equal|different} settings; {without} makes {steps:step} at a constant {lr}",
        shown_by="{one} and {other} are both called, {one_calls} and {other_calls} times",
        repair="build the second scheduler on the optimizer that has none",
        source="https://github.com/Lightning-AI/pytorch-lightning/pull/5519",
    ),
    "never_called": _seen(
        proof="the scheduler is built on an optimizer that steps, and fit comes to its end without a call of it",
        summary="{kind} is built and fit never calls it: all {steps:step} are made at {lr:g}",
        measured="0 calls of {kind}.step() in {steps:step} of {optimizer}",
        shown_by="{why}",
        repair="scheduler.step(), after each optimizer.step() where its settings count steps, else once per epoch",
        variants={
            "may come": {
                "summary": "{kind} is built, and no call of it was seen: the {steps:step} that were watched are made "
                "at {lr:g}",
            }
        },
        judged="give fit the whole loop over the epochs, so that the call is in it",
        explains=LEARNING,
        source="https://github.com/voicepaw/so-vits-svc-fork/pull/291",
    ),
    "called_twice": _seen(
        proof="two lines call one scheduler: both between each two steps, or one at each step and one at each epoch",
        summary="{kind} is called twice for each optimizer step, by two lines: its schedule runs double",
        measured="2 calls between each two of {steps:step}: {calls} in all",
        shown_by="{first} and {second} both call {called}",
        variants={
            "each pass": {
                "summary": "{kind} is called once per step and also once per epoch: its count is neither that of the "
                "steps nor that of the epochs",
                "measured": "{steps} calls after {steps:step}, and {calls} calls at the end of {calls:epoch}",
            }
        },
        repair="remove one of the two calls: keep the one in whose unit the settings count",
        explains=LEARNING,
        source="https://github.com/aimagelab/meshed-memory-transformer/issues/71",
    ),
    "optimizer_rebuilt": Cause(
        proof="optimizers with moments and equal settings make one step each, on the same weights",
        summary="{kind} is built again for every step: its moments are lost each time, and every step is a first step",
        measured="{built} {kind} with equal settings make one step each, on the same parameters: {held}",
        shown_by="no weight is changed outside of the steps (so this is no inner loop of meta-learning)",
        repair="build the optimizer once, before the loop",
        explains=LEARNING,
        change=("optimizer", "seen"),
        source="https://github.com/alan-turing-institute/deepsensor/issues/47",
    ),
    "scheduler_rebuilt": _seen(
        proof="a scheduler is built again for every step, or for every epoch at the length of the whole run",
        summary="{kind} is built again for every step, so the learning rate stays at {lr:g}",
        measured="{built} {kind} are built in {steps:step}, each called once or not at all",
        shown_by="every call leaves the same rates: it is the first one of its scheduler",
        variants={
            "each pass": {
                "summary": "{kind} is built again for each epoch, but its length is that of all {built}: it starts "
                "again each time",
                "measured": "{key} = {size}, and each of {built} is called {each} times",
                "shown_by": "{key} equals the calls of all epochs: {built} times {each}",
            }
        },
        repair="build the scheduler once, before the loop",
        explains=LEARNING,
        source="https://github.com/aimagelab/mammoth/issues/25",
    ),
    "lambdas_share_a_variable": _built(
        proof="the lambdas of the groups have one code, and all read one variable, which the loop around them sets",
        summary="the lambdas of {groups:group} all read the last value of {names}: they return equal factors",
        measured="{kind} multiplies the rate of each group by the same factor",
        shown_by="the functions have one code, and share their variable {names}, which a loop sets",
        repair="bind the variable: lambda step, factor=factor: ...",
        source="https://github.com/peteryuX/retinaface-tf2/pull/34",
    ),
    "plateau_mode": _built(
        proof="the mode is the one for the opposite of the metric: for the loss that is minimized, or by its name",
        summary='ReduceLROnPlateau(mode="max") is given the training loss: it lowers the rate where the loss falls',
        measured="the metric begins {values} in {calls:call}",
        shown_by="at every call the metric is the value of the last loss that backward() was called on",
        variants={
            "by name": {
                "summary": 'ReduceLROnPlateau(mode="{mode}") is given {name}, for which {rises:?higher|lower} is '
                "better: it lowers the rate while {name} {rises:?rises|falls}",
                "measured": "{name} is {values} in {calls:call}",
                "shown_by": 'mode="{mode}" waits for a metric that {rises:?falls|rises}',
            }
        },
        repair='ReduceLROnPlateau(optimizer, mode="min")',
        source="https://github.com/RMeli/gnina-torch/pull/57",
    ),
    "plateau_metric_stands_still": _seen(
        proof="every call is given the loss of the first one, while the loss moves on",
        summary="ReduceLROnPlateau is given the first loss, {value:.4g}, at all {calls:call}",
        measured="the loss itself goes from {first:.4g} to {last:.4g} meanwhile",
        shown_by="the metric equals the loss that backward() was called on before the first call, to 1e-6",
        repair="give it the loss of this epoch: scheduler.step(loss)",
    ),
    "metric_as_epoch": _seen(
        proof="a scheduler other than ReduceLROnPlateau is called with the loss, or with fractions that rise and fall",
        summary="{kind}.step() is given a metric, and takes it for the number of the epoch",
        measured="the argument begins {values} in {calls:call}",
        shown_by="{losses:?it is the value of the last loss at every call|fractions that rise and fall are no epochs}",
        repair="scheduler.step() without an argument; only ReduceLROnPlateau takes a metric",
        explains=LEARNING,
    ),
    "bound_above_lr": _built(
        proof="the lower bound of a schedule that lowers the rate lies above the rate of every group",
        summary="{kind}: eta_min={least:g} lies above the rate {most:g}: the schedule raises it",
        measured="{names} {least:g}, rates of the groups at the first step {base:g}",
        shown_by="{kind} moves the rate towards eta_min, from wherever it begins",
        variants={
            "min_lr": {
                "summary": "{kind}: min_lr={least:g} lies above the rate {most:g}: it is never lowered",
                "shown_by": "{kind} sets no rate below min_lr, and leaves those that already are",
            }
        },
        repair="eta_min (or min_lr) far below lr: 0, or a hundredth of it",
        source="https://github.com/Vision-CAIR/MiniGPT-4/issues/444",
    ),
    "milestones_not_whole": _built(
        proof="milestones of MultiStepLR, or step_size of StepLR, are no whole numbers, and calls are counted in these",
        summary="{kind} never reaches {milestones}: calls are counted in whole numbers",
        measured="milestones {all}; the rate stays as it is at {count:milestone}",
        shown_by="torch looks up the number of the call among the milestones, and no call has such a number",
        variants={
            "step size": {
                "summary": "{kind} has step_size={size:g}: calls are counted in whole numbers",
                "measured": "step_size={size:g}, gamma={gamma:g}",
                "shown_by": "torch asks whether the number of the call is a multiple of it, which rounding decides",
                "repair": "step_size is a number of calls, and gamma what the rate is multiplied by",
            }
        },
        repair="milestones=[int(part * total) for part in parts]",
        explains=LEARNING,
        source="https://github.com/Pointcept/Pointcept/issues/379",
    ),
    "schedule_overwritten": _seen(
        proof="each rate that the scheduler sets is replaced, by a line or by another scheduler, before a step uses it",
        summary=(
            "{kind} is called and its rates are never used: before each step a line writes {lr:g} back to group {group}"
        ),
        measured="{calls:call} set it to {given}; all {steps:step} are made at {lr:g}",
        shown_by="between each call of the scheduler and the next step the rate changes without a scheduler",
        variants={
            "by another": {
                "summary": "{kind} is called and its rates are lost: {other} on the same optimizer computes each rate "
                "from the base rate, not from the present one",
                "measured": "{calls:call} of {kind} move the rate, the first from {before:g} to {after:g}; the next "
                "call of {other} sets it to {later:g}",
                "shown_by": "each of them is followed by a call of {other} before the second next step",
            }
        },
        repair="remove the line that writes the rate, or the scheduler",
        explains=LEARNING,
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/8884",
    ),
    "written_lr_lost": _seen(
        proof="a line writes the rate, and the scheduler replaces it before a step uses it",
        summary="a line writes {written:g} and {kind} sets the rate to {lr:g} before any step uses it",
        measured="{lost} of {calls:call} find a rate that no step was made with",
        shown_by="{kind} computes each rate from the base rate, not from the present one",
        repair="remove the line that writes the rate, or the scheduler",
        source="https://github.com/AnswerDotAI/ModernBERT/pull/124",
    ),
    "lr_nobody_reads": _seen(
        proof='a number called a rate takes new values, and group["lr"], which steps read, is constant in all groups',
        summary='{names} changes with the steps and no step reads it: group["lr"] stays at {lr}',
        measured="{values} values in {steps:step}, {first:g} to {last:g}",
        shown_by='torch\'s {kind} reads group["lr"], which is constant at every step in every group',
        repair=_ALL_GROUPS,
        explains=LEARNING,
        source="https://github.com/pbaylies/stylegan2/issues/5",
    ),
    "lr_written_to_copy": _seen(
        proof="the rate of a group that state_dict() gave is written, nobody reads it, and the optimizer's own stays",
        summary=(
            "a rate is written to the groups of state_dict(), which are copies: the rate of {kind} "
            "{still:?stays at|is} {lr}"
        ),
        measured=(
            "{copies:?the {copies} copies were|the copy was} set to {first:g}{last:? ... {last:g}|}; the optimizer is "
            "at {lr}{line:?; written at {line}|}"
        ),
        shown_by=(
            "no copy is loaded, saved or read after that{alone:?, and the dict that held the groups is gone when they "
            "are written|}"
        ),
        repair=_ALL_GROUPS,
        judged="have fit save, or load, the edited state dict",
        explains=LEARNING,
        source="https://github.com/pytorch/examples/issues/64",
    ),
    "zero_for_good": Cause(
        proof="the rate of every group comes to 0 in one call, or where a new scheduler is built, and steps go on at 0",
        summary=(
            "{kind} has {factor}=0: from its call after step {before} on the learning rate is 0 for good, and "
            "{after:more step} are made"
        ),
        measured="{before:step} with rates of up to {peak:g}, then {after:step} at 0",
        shown_by="each later rate is the last one times {factor}, or 0",
        variants={
            "built at 0": {
                "summary": "a new {kind} is built when the learning rate is 0, and starts from it: all {after:step} "
                "since are made at 0",
                "shown_by": "{kind} computes each rate from the current one, which is 0",
                "repair": 'before it is built: for group in optimizer.param_groups: group["lr"] = '
                'group["initial_lr"]; or build CosineAnnealingWarmRestarts once',
            }
        },
        repair="gamma=1 where the rate is to stay constant",
        explains=LEARNING,
        change=("scheduler", "seen"),
        source="https://github.com/pytorch/pytorch/issues/78003",
    ),
    "group_at_zero": _seen(
        proof="the group's rate is 0 at all watched steps, or all planned ones, and gradients arrive; others learn",
        summary="group {group} of {of} has a learning rate of 0 at all {steps:step}: {held} do not learn",
        measured=(
            "gradients that are not 0 arrive; group {other} learns at {lr:g}{line:?; this line writes the rate of "
            "group {other} of {of}|}"
        ),
        shown_by="frozen= of TrainLoop does not name them",
        variants={
            "planned": {
                "summary": "the learning rate of group {group} ({held}) is 0 in all {calls} calls of {kind}",
                "measured": "0 at every call from 0 to {calls}{rises:?, and above 0 from call {rises} on|}; other "
                "groups have up to {peak:.2g}",
                "shown_by": "stepped forward without training no call gives it a rate, and gradients reach it",
            }
        },
        repair=f"write the rate of every group: {_ALL_GROUPS}; frozen= if it should not train",
        settle='frozen=("path",) where it is not to learn',
        explains=("every_param_moves",),
    ),
    "zero_for_steps": _built(
        proof="the rate of every group is 0 for two steps or more, while gradients arrive",
        summary="the learning rate is 0 at the first {steps:step} in every group of {kind}",
        measured="rates of the first steps: {lrs}",
        shown_by="{kind} makes {steps:step} that change no weight",
        repair="begin a warm-up above 0, (step + 1) / warmup, and divide with / and not with //",
        source="https://github.com/Project-MONAI/tutorials/issues/630",
    ),
    "group_without_schedule": Cause(
        proof="the group was added after the schedule began, which moves the rates of all groups before it",
        summary=(
            "group {group} was added after {kind} was built, which moves only the first {known}: {held} stay at {lr:g}"
        ),
        measured=(
            "{calls:call} move group 0 from {first:g} to {last:g}; group {group} is at {lr:g} in all {steps:step}"
        ),
        shown_by="a scheduler knows the groups that its optimizer has when it is built, and leaves others alone",
        variants={
            "by hand": {
                "summary": "group {group} was added within the run, and a line writes the rates of the groups before "
                "it only: {held} stay at {lr:g}",
                "measured": "group {other} goes from {first:g} to {last:g} in the {steps:step} since; group {group} is "
                "at {lr:g} in all of them",
                "shown_by": "the rates of all groups before it change from each step to the next",
            },
            "refused": {
                "summary": "group {group} was added after {kind} was built, which knows {group} of {of} groups and "
                "raises",
                "measured": "{raised}; group {group} holds {held}",
                "shown_by": "a scheduler knows the groups that its optimizer has when it is built",
            },
        },
        repair="add the group before the scheduler is built",
        change=("group", "scheduler"),
        source="https://github.com/huggingface/transformers/issues/20029",
    ),
    "one_group_scheduled": _seen(
        proof="a line writes the rates of some groups by index or by zip(), and the others keep theirs at all steps",
        summary="the rate is written to group {group} of {of} only: {held} stay at {lr:g}",
        measured="group {group} goes from {first:g} to {last:g} in {steps:step}; group {other} does not move",
        shown_by="no scheduler moves a rate; the line that does {zipped:?ends with the shorter list|names one group}",
        repair=_ALL_GROUPS,
        source="https://github.com/yu-changqian/TorchSeg/issues/84",
    ),
    "group_lrs_made_equal": _seen(
        proof="groups are built with different rates, and a line writes one rate into all of them",
        summary="{groups:group} were built with the rates {given}, and a line writes one rate into all of them",
        measured="from the second of {steps:step} on all groups have one learning rate, at first {lr:g}",
        shown_by="a line of fit writes the rate of each group",
        repair=(
            'keep each rate once, base = [g["lr"] for g in optimizer.param_groups], and write base[i] * factor into '
            "group i"
        ),
        settle="build all groups with one lr where one rate is to count",
        source="https://github.com/JUGGHM/PENet_ICRA2021/issues/29",
    ),
    "group_left_empty": _seen(
        proof="a pattern is true of no name, and puts parameters into a group that is empty where it is answered yes",
        summary="the group with lr={lr:g} is empty: {patterns} matches no name, and {names} {names:are} trained with "
        "lr={other:g}",
        measured="tested on {asked:name}, true for none",
        shown_by="with the condition forced to true, the same code puts {names} into that group",
        source="https://github.com/huggingface/lerobot/pull/280",
    ),
    "factors_multiply": Cause(
        proof="the quotients of successive rates are a warm-up or a decay: each call multiplies the last rate",
        summary=(
            "each call of {kind} multiplies the last rate, not the base rate, by the factor of {rises:?a warm-up|a "
            "decay}: after {calls:call} the learning rate is {last:.2g}, {part:.2g} of the first one"
        ),
        measured="{drawn}; the factors are {quotients}",
        shown_by="the quotients of successive rates are exactly {form}",
        repair="multiply the base rate: [base * factor for base in self.base_lrs], not group['lr'] or super().get_lr()",
        change=("scheduler", "seen"),
        explains=LEARNING,
        source="https://github.com/potterhsu/easy-faster-rcnn.pytorch/issues/26",
    ),
    "lr_is_the_factor": Cause(
        proof="LambdaLR multiplies each base rate by a factor whose highest value is that base rate",
        summary="the lambda of {kind} returns the learning rate, and {kind} multiplies it by lr={base:g}: the result "
        "is {peak:.3g}",
        measured="the highest factor of every group is its own lr, or that of one group: {drawn}",
        shown_by="the highest rate of every group is its lr times this factor, to 1e-9",
        repair="return the factor alone: lambda step: decay ** step, without the learning rate",
        change=("scheduler",),
        explains=("overfit_one_batch:not_learning", "overfit_one_batch:learns_slowly"),
        source="https://github.com/lhoyer/MIC/issues/60",
    ),
    "never_falls": _plan(
        proof=f"{_ALONE}the rate is constant to the end and then 0, or rises from 0 to the base rate at the last step",
        summary="{kind} keeps the learning rate at {first:.2g} for {calls} calls, and then sets it to {last:.2g}",
        measured="{drawn}",
        shown_by="stepped forward without training the rate changes at call {end} only",
        variants={
            "rises": {
                "summary": "the learning rate of {kind} rises from 0 to its base rate {last:.2g} in all {calls} calls "
                "and does not fall",
                "shown_by": "stepped forward without training the rate grows by {step:.2g} at each call",
            }
        },
        repair="multiply the base rate by what is left: 1 - step / total, computed with / and for every step",
        explains=LEARNING,
        source="https://github.com/meetps/pytorch-semseg/issues/151",
    ),
    "group_falls_to_zero": _plan(
        proof="one group's rate falls to 0 for good while the warm-up of the others ends",
        summary="the learning rate of group {group} ({held}) falls to 0 in the warm-up of the others and stays there",
        measured="group {group}: {drawn}; group {other}: {others}",
        shown_by="at call {end} group {group} comes to 0 for good, and group {other} to its highest rate {peak:.2g}",
        repair="end that warm-up at the base rate: factor = start + (1 - start) * step / warmup",
        explains=("every_param_moves",),
        source="https://github.com/MultimediaTechLab/YOLO/issues/122",
    ),
    "dips_for_one_call": _plan(
        proof="the rate falls to half or less at one call, and the next call takes it back",
        summary="the learning rate of {kind} is {low:.2g} at call {end} alone: {before:.2g} before, {after:.2g} after",
        measured="{drawn}",
        shown_by="in {calls} calls this happens once, where the second part of the schedule starts",
        repair="let the second scheduler start where the first one ends: step() it once at the end of the warm-up",
        source="https://github.com/ildoonet/pytorch-gradual-warmup-lr/issues/26",
    ),
    "counts_something_else": _plan(
        proof="the schedule is built for calls in one unit (epochs), and is called in another (steps)",
        summary="{kind} is built for {length}, but is called once per {unit}{more:?: {more}|}",
        measured="{numbers}",
        shown_by="{why}",
        repair="build it for as many calls as are made: optimizer steps, where it is called once per step",
        explains=(*LEARNING, *WINDOWS),
        source="https://github.com/Lornatang/SRGAN-PyTorch/issues/1",
    ),
    "per_micro_batch": Cause(
        proof="the scheduler is called once for each micro-batch, and the optimizer steps once for several",
        summary="{kind} is called once for each micro-batch, not once for each step of its optimizer",
        measured="{calls:call} for {steps:step}, in a run of {micro} micro-batches, {window} a step",
        repair="call it right after optimizer.step(), in the same branch",
        judged="give steps= (optimizer steps of the whole training), or epochs=",
        change=("seen",),
        source="https://github.com/h2oai/h2o-llmstudio/issues/663",
    ),
    "runs_out": _plan(
        proof=f"{_ALONE}it raises before the training ends",
        summary="{kind} raises at call {call}, and the training calls it {calls} times",
        measured="call {call} of {calls} raises {message}",
        shown_by="stepped forward without training it raises; {in_all}",
        variants={
            "of fit": {
                "summary": "{kind} is built inside fit for fewer calls than fit makes: call {call} raises",
                "measured": "{sizes}",
                "shown_by": "{message}",
            }
        },
        repair="set total_steps to the number of calls: len(loader) * epochs // accumulate, if it is called once per "
        "step",
        explains=LEARNING,
        source="https://github.com/A4Bio/PiFold/issues/6",
    ),
    "ends_in_warmup": _plan(
        proof=f"{_ALONE}the rate still rises at its end",
        summary="the warm-up takes {call} calls, and the whole training has {calls}: it ends at {part:.0%} of the peak",
        measured="learning rate {reached:.2g} at the most in the training, {peak:.2g} at call {call}",
        shown_by="stepped forward without training {kind} still rises at call {calls}; {in_all}",
        repair="a warm-up of a few percent of the steps, in the unit in which the scheduler is called",
        explains=LEARNING,
        source="https://github.com/Morizeyao/GPT2-Chinese/issues/60",
    ),
    "over_too_early": _plan(
        proof="the last change comes before half of the training, and leaves a hundredth of the peak or less",
        summary=(
            "{kind} is over after {end} of {calls} calls: the rest of the training has a learning rate of {last:.2g}"
        ),
        measured="{drawn}",
        shown_by="stepped forward without training no rate changes after call {end}; {in_all}",
        variants={
            "first pass": {
                "summary": "{kind} is built for 1 of the {passes} epochs of fit: in all others the learning rate is 0",
                "measured": "its last change is at call {end} of {calls}",
                "shown_by": "{sizes}",
            },
        },
        repair="build it for as many calls as the training makes",
        explains=LEARNING,
        source="https://github.com/SafeAILab/EAGLE/pull/107",
    ),
    "fades_out": _plan(
        proof="after three quarters of the training the rate is at most a millionth of its peak, and goes on falling",
        summary=(
            "{kind} has brought the learning rate to {part:.1g} of its peak after three quarters of the training: the "
            "rest trains nothing"
        ),
        measured="{drawn}",
        shown_by=_ALONE + "{in_all}",
        repair=(
            "call it once per epoch, if it counts epochs; use a factor of 0.1 or more, not a learning rate, where each "
            "call multiplies the rate by it"
        ),
        explains=LEARNING,
        source="https://github.com/open-edge-platform/physical-ai-studio/pull/407",
    ),
    "rises_again": _plan(
        proof="the schedule has come to its lowest point before the training is over, and the rate rises again",
        summary=(
            "{kind} is at its lowest after {end} of {calls} calls, and its rate rises again to {part:.0%} of the peak"
        ),
        measured="{drawn}",
        shown_by="stepped forward without training the rate falls until call {end} and rises from there; {in_all}",
        variants={
            "first pass": {
                "summary": "{kind} is built for 1 of the {passes} epochs of fit: its rate rises again in the next one",
                "measured": "its lowest point is at call {end} of {calls}",
                "shown_by": "{sizes}",
            }
        },
        repair="T_max = the number of calls; CosineAnnealingWarmRestarts where restarts are wanted",
        source="https://github.com/ScrollPrize/villa/pull/1495",
    ),
    "barely_begun": _plan(
        proof="the schedule comes to its lowest point after twice the training, which ends above half of the peak",
        summary=(
            "{kind} comes to its lowest point at call {end}, and the training ends at call {calls}, at {part:.0%} of "
            "the peak"
        ),
        measured="{drawn}",
        shown_by="stepped forward without training the rate falls until call {end}; {in_all}",
        repair="build it for as many calls as the training makes",
        source="https://github.com/vllm-project/speculators/pull/1104",
    ),
}

found = finding_maker(CAUSES)
OF_EVERY_CALL = frozenset({"kind"})  # of every finding on a scheduler

RISES = frozenset(
    "acc accs accuracy accuracies auc auroc auprc f1 map miou iou dice psnr ssim bleu rouge meteor cider recall kappa "
    "ndcg mrr reward rewards r2 aucs".split()
)
"""Words of names of metrics of which more is better."""

FALLS = frozenset(
    "loss losses error errors err mse rmse mae nll perplexity ppl wer cer fid epe bpc bpb divergence".split()
)
"""Words of names of metrics of which less is better."""

TURNED = frozenset("neg negative minus inv inverse inverted one best".split())
"""Words that may negate a metric, or name another one."""

PLAIN = ("item", "mean", "cpu", "detach", "numpy", "compute", "avg")
"""Methods and functions that leave the direction of a metric as it is."""
