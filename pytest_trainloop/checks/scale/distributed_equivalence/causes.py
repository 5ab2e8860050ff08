"""The causes of ``distributed_equivalence``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

RANKS = 2
"""Processes of a launch: a third would show no further fault, and cost a half more."""

STEPS = 8
"""Steps over the loop's own batches: weights may be averaged every few of them on purpose."""

UNREDUCED = "Expected to have finished reduction in the prior iteration"
"""How DistributedDataParallel begins what it says of parameters without a gradient."""

PASS_THE_KNOB_ON = "pass the knob on: wrap the model in DistributedDataParallel where it is above 1"
DRAW_IN_COMMON = "draw what all ranks must have in common from a generator of one seed, or on rank 0 and send it"
"""Repairs where the cause comes about in another way."""

_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_NOTES = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
_DATA = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"

_RAN = f"{RANKS} processes of torch.distributed, {STEPS} steps"
_UNREAD = "{unread:?, and calls no collective: nothing takes notice of the knob|}"
_TIMES = "{ranks} ranks give {factor:.4g} times the gradient{names:? of {names}|} of the same rows in one process"
_BY_RANK = "weights of the ranks' rows: {by_rank}"
_RAISES = "torch raises in the next forward pass: {kind}: " + UNREDUCED

_DIRECTION = "all parameters have the direction that they have in one process"
_ONE_DIRECTION = {
    "direction": {
        "shown_by": _DIRECTION,
        "repair": "where the learning rate is not scaled to match, multiply the loss by {inverse:.4g} with {ranks} "
        "ranks",
    },
    "losses": {"shown_by": _DIRECTION + "; the ranks' losses are {ranks} times that of one process as well"},
}

_compared = partial(
    Cause,
    measured="|g_{ranks}| / |g_1| = {ratio:.4g}, {agrees}, {precision}, {wrong} of {parameters} parameters differ",
    change=("seen",),
)
_ran = partial(Cause, measured=_RAN, change=("seen",))

CAUSES = {
    "never_synchronised": _compared(
        change=("no_sync", "seen"),
        proof="each rank's step reads the gradient of its own rows alone, or all read that of one rank, and nothing "
        "brings the weights together",
        summary="each of {ranks} ranks trains on the gradient of its own rows alone" + _UNREAD,
        shown_by=_BY_RANK,
        repair="wrap the model in DistributedDataParallel and call the wrapper, or all-reduce every gradient before "
        "the step: dist.all_reduce(p.grad); p.grad /= dist.get_world_size()",
        judged="weights may be averaged later: --steps=0 watches a script to its own end",
        variants={
            "one_rank": {
                "summary": "all ranks train on the gradient of rank {kept} alone: the rows of the others do not count"
                + _UNREAD
            },
            "script": {
                "summary": "each of {ranks} ranks trains on the gradient of its own rows alone: nothing brings "
                "gradients or weights together",
                "measured": "",
                "shown_by": "all ranks begin with the same weights, and read different gradients at every step; a "
                "DistributedSampler shares rows out to them",
            },
            "nothing": {
                "summary": "the steps of {ranks} ranks read no gradient, where that of one process reads some" + _UNREAD
            },
        },
        source="https://github.com/pytorch/pytorch/issues/104336",
    ),
    "wrapper_bypassed": _compared(
        proof="the loop holds a DistributedDataParallel and calls it in no step, or not in all, and each rank's step "
        "without a call reads the gradient of its own rows alone",
        summary="DistributedDataParallel wraps the model, and is never called: each of {ranks} ranks trains on its own "
        "rows alone",
        shown_by=_BY_RANK + "; 0 calls of the wrapper",
        repair="call the wrapper: loss = criterion(ddp_model(x), y); ddp_model.module is for saving and evaluation",
        variants={
            "script": {
                "measured": "",
                "shown_by": "the weights of the ranks begin equal and then differ; 0 calls of the wrapper",
            },
            "steps": {
                "summary": "{bare} of {steps:step} bypass the DistributedDataParallel wrapper, the first in step "
                "{step}: there each rank trains on its own rows alone",
                "measured": _RAN,
                "shown_by": "the ranks read different gradients at just these steps, and the same at those with a call",
            },
        },
        source="https://github.com/moojink/openvla-oft/issues/160",
    ),
    "parameters_not_in_wrapper": _compared(
        proof="some parameters get the gradient of a rank's own rows alone, while all others get that of all rows",
        summary="on each rank {names} {names:get} the gradient of its own rows alone, and {others:other parameter} "
        "{several:?get|gets} that of all rows",
        shown_by=_BY_RANK,
        repair="build every layer, and replace parameters, before the model is wrapped; what lies outside of the "
        "wrapper needs one of its own",
        variants={
            "late": {
                "summary": "{names} came into the model after it was wrapped, in place of parameters that "
                "DistributedDataParallel still waits for",
                "measured": _RAN,
                "shown_by": _RAISES,
            },
            "replaced": {
                "summary": "{names} came into the model after it was wrapped: DistributedDataParallel reduces the "
                "gradients of those that they replaced, and each of {ranks} ranks trains on its own rows alone",
                "shown_by": _BY_RANK + "; the wrapped module holds other parameters than when it was wrapped",
                "repair": "wrap the model after the line that replaces its parameters (moved to another device or "
                "dtype, loaded with assign=True, merged), or wrap it again",
            },
            "script": {
                "measured": "",
                "summary": "{names} {names:get} the gradient of each rank's own rows alone, and "
                "{others:other parameter} that of all rows",
                "shown_by": "{names} {names:begin} the same on all ranks and {names:end} different",
            },
        },
        settle="suppress it where each rank is to train its own (experts, tables that are shared out)",
        source=_DDP,
        change=("thawed", "seen"),
    ),
    "last_micro_batch_not_synchronised": _compared(
        change=("no_sync", "seen"),
        proof="of a window of micro-batches the last one reaches only the rank that computed it, and those before it "
        "reach all ranks",
        summary="of {window} micro-batches the last one is not synchronised: each rank adds that of its own rows alone",
        shown_by="weights of the micro-batches: {by_rank}",
        repair="enter no_sync() for all micro-batches of a window but the last: with model.no_sync() if not last else "
        "nullcontext(): ... backward()",
        do_not="synchronise in every micro-batch: it is right, and sends a window's gradients several times",
        source=_DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ),
    "synchronised_every_micro_batch": _compared(
        change=("no_sync", "seen"),
        proof="the gradients are right, and the ranks exchange them once for each micro-batch of a window",
        summary="the ranks exchange their gradients in each of {window} micro-batches of a window",
        shown_by="{times} times the bytes of all gradients before the first step",
        repair="with model.no_sync(): around forward and backward of all micro-batches but the last of a window",
        settle="it costs time only; suppress it where memory forbids to wait (FSDP)",
        source="https://github.com/huggingface/accelerate/issues/106",
    ),
    "mean_of_means": _compared(
        proof="all ranks weigh the same, where in one process each weighs by its valid targets",
        summary="ranks {valid:?with unequal numbers of valid targets|whose rows have unequal weights} weigh {got}, and "
        "{one} in one process",
        shown_by="{valid:?in one process each weighs in proportion to its {valid} valid targets|}",
        repair="sum the loss, all-reduce the number of valid targets, and backpropagate "
        "loss_sum * world_size / targets_of_all_ranks (DistributedDataParallel divides by the number of ranks)",
        source="https://huggingface.co/blog/gradient_accumulation",
    ),
    "summed_over_ranks": _compared(
        proof="every rank weighs as many times what it does in one process as there are ranks",
        summary=_TIMES,
        shown_by="every rank weighs exactly {times} times what it does in one process",
        repair="divide by the number of ranks once: op=dist.ReduceOp.AVG, or p.grad /= dist.get_world_size() after "
        "all_reduce",
        variants=_ONE_DIRECTION,
        source="https://github.com/neuralmagic/sparseml/pull/135",
    ),
    "divided_twice": _compared(
        proof="every rank weighs one over the number of ranks of what it does in one process",
        summary=_TIMES,
        shown_by="every rank weighs exactly 1/{times} of what it does in one process",
        repair="DistributedDataParallel averages over the ranks already: do not divide the loss or the gradients by "
        "the number of ranks again",
        settle="a loss that is a sum over rows becomes a mean over the ranks: multiply it by the number of ranks, or "
        "divide it by the number of rows",
        variants=_ONE_DIRECTION
        | {
            "sum": {
                "summary": _TIMES + ": the loss is a sum over rows, and the mean of the ranks is taken",
                "shown_by": "with all rows on every rank the gradient is that of one process",
                "repair": "multiply the loss by the number of ranks, or the learning rate by {ranks}",
            }
        },
        source=_DDP,
    ),
    "gathered_without_gradient": _compared(
        proof="the ranks' losses are those of one process, rows of different ranks interact, and the gradient is none "
        "of one process",
        summary="the ranks compute the loss of one process, and their gradient has another direction: {outside:.1e} of "
        "it is no weighted sum of the gradients of their rows",
        shown_by="the mean of the ranks' first losses is that of one process to rounding",
        repair="gather with gradients: torch.distributed.nn.functional.all_gather in place of dist.all_gather, which "
        "cuts the graph",
        do_not="put back the rank's own rows alone, unless each rank computes the loss of all rows",
        source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/302",
    ),
    "norm_of_one_shard": _compared(
        proof="the norm by which a rank clips is that of its own part, and in one process that of the whole gradient",
        summary="each rank's gradient is clipped by its own norm before the gradients are reduced",
        shown_by="each rank weighs one over the length of its own gradient: {weights}",
        repair="clip after the gradients are all-reduced, over all parameters; where each rank holds a part, add up "
        "the squared norms of all ranks first (clip_grad_norm_ of a DTensor does)",
        variants={
            "script": {
                "measured": "",
                "summary": "each rank's gradient is clipped by its own norm, {norms}, before the gradients are reduced",
                "shown_by": "the norms that clip_grad_norm_ gave differ, and then all ranks step by the same gradient",
            },
            "norms": {
                "summary": "the ranks clip by norms of {norms}, and one process by {norm:.4g}",
                "shown_by": "the norms that clip_grad_norm_ gave{cuts:?|; on these rows the clip cuts nothing}",
            },
            "after": {
                "summary": "before the clip the ranks have the gradient of one process, and after it they do not",
                "shown_by": "the gradients before the clip agree to rounding",
            },
            "copies": {
                "summary": "each rank clips its copy of {names} by another norm{norms:? ({norms})|}: copies diverge",
                "shown_by": "with all rows on every rank the gradient of these copies is that of one process before "
                "the clip, and another on each rank after it",
            },
            "shards": {
                "summary": "each rank scales its shard of the gradient by another factor than the others",
                "shown_by": "the shards are those of one process times {factors}",
            },
        },
        source="https://docs.pytorch.org/docs/stable/fsdp.html#torch.distributed.fsdp.FullyShardedDataParallel."
        "clip_grad_norm_",
    ),
    "start_differs": _ran(
        proof="at the first step the ranks hold different weights or buffers",
        summary="the ranks begin with different values of {names}{seeds:?: they follow the seed of each rank, and "
        "nothing brings them together|}",
        shown_by="{seeds:?under one seed on all ranks they are the same|also under one seed on all ranks}",
        repair="broadcast them from rank 0 before the first step (DistributedDataParallel does so when it is built), "
        "or build the model under one seed on all ranks",
        settle="under one seed on all ranks they are the same: give all ranks one seed before the model is built, "
        "or broadcast, where your launcher does not",
        variants={
            "script": {
                "summary": "the ranks train different weights of {names}: they are not the same before the first step",
                "shown_by": "in {steps:step} all ranks read the same gradients, which never bring them together",
            }
        },
        source=_NOTES,
        change=("loaded", "optimizer", "seen"),
    ),
    "same_rows_on_every_rank": Cause(
        proof="all ranks compute the same losses and the same gradients, bit for bit, from the loop's own batches",
        summary=f"all {RANKS} ranks train on the same rows: {RANKS} times the work of one",
        measured=_RAN,
        shown_by="the first {same} losses and their gradients are the same on all ranks, bit for bit",
        repair="DataLoader(dataset, sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch) in every epoch",
        settle="give each rank its own rows (DistributedSampler), or another seed to what draws them",
        change=("loader", "seen"),
        variants={
            "script": {
                "summary": "all {ranks} ranks train on the same rows: {ranks} times the work of one",
                "shown_by": "in the first {same:step} all ranks are given the same batches, another one in each step",
            },
            "seeded": {
                "summary": "every rank goes over all rows, and ranks that have the same seed get the same ones at each "
                "step",
                "shown_by": "the first {same} losses and their gradients are the same on all ranks, bit for bit, under "
                "one seed on all ranks",
            },
        },
        source="https://github.com/huggingface/datasets/issues/3423",
    ),
    "rows_left_out": Cause(
        proof="the ranks' samplers cut different data sets, or different orders: some rows are on several ranks and "
        "some on none",
        summary="DistributedSampler splits a data set that already differs between ranks, with {common} rows in "
        "common: each rank reads one row in {samplers} of its own part",
        measured=_RAN,
        shown_by="the subsets that the samplers were given, of {counts} rows",
        repair="give DistributedSampler the same data set on all ranks: cut it by rank once, and draw splits with a "
        "generator of one seed",
        change=("sampler", "loader", "seen"),
        variants={
            "seeds": {
                "summary": "in one epoch {twice} of {rows} rows are on all ranks, and {never} on none",
                "shown_by": "DistributedSampler has the seeds {seeds}, and cuts one order per seed",
                "repair": "DistributedSampler(dataset, seed=seed) with the same seed on all ranks",
            }
        },
        source=_DATA,
    ),
    "same_draws_on_every_rank": _ran(
        proof="what the loop draws at this line is the same on all ranks, bit for bit, while their rows differ and "
        "they were given different seeds",
        summary="every rank draws the same random numbers here, for different rows",
        shown_by="the ranks were given different seeds: the loop gives them the same seed",
        repair="seed what is drawn differently on each rank, after the model is built: torch.manual_seed(seed + rank)",
        settle="suppress it where all ranks are to draw the same (a choice that must be common)",
        source="https://docs.pytorch.org/docs/stable/notes/randomness.html",
        change=("seed", "seen"),
    ),
    "batch_norm_per_rank": _ran(
        proof="batch norms normalise by the rows of their own rank, and their running statistics part",
        summary="{names} {names:normalise} by the rows of one rank",
        shown_by="the running statistics of the ranks begin equal and end different",
        repair="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped (on GPUs), or a norm "
        "without batch statistics",
        settle="suppress it where each rank has rows enough for statistics of its own",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html",
        change=("module", "seen"),
    ),
    "unused_parameters": _ran(
        proof="parameters get no gradient in a backward pass, and DistributedDataParallel waits for them",
        summary="{names:?{names} {names:get}|some parameters get} no gradient in a backward pass, so that "
        "DistributedDataParallel never finishes reducing: no rank gets the gradient of the others",
        shown_by=_RAISES,
        repair="DistributedDataParallel(model, find_unused_parameters=True), or use every parameter in every forward "
        "pass",
        do_not="add 0 * sum(p.sum() for p in model.parameters()) to the loss: a parameter that is not finite makes "
        "all of it NaN",
        source=_DDP,
        change=("wrapper", "seen"),
    ),
    "one_rank_waits": _ran(
        proof="a rank waits in a collective that another rank never enters",
        summary="rank {rank} waits for ever in {names}: {others}",
        shown_by="{call} of rank {rank} at {line}, step {step}; seen from the calls of each rank, not from a clock",
        repair="call every collective on every rank: rank 0 evaluates model.module, not the wrapper, or all ranks "
        "evaluate; a barrier belongs on all ranks",
        variants={
            "uneven": {
                "repair": "give all ranks the same number of batches (DistributedSampler, drop_last=True), or train "
                "under torch.distributed.algorithms.Join([model])"
            },
            "bare": {
                "summary": "rank {rank} waits for ever in {names}: rank {alone} calls the bare model in {bare} of "
                "{steps:step}, the first in step {first}, and there its gradients are in no {names}",
                "repair": "call the wrapper in every step of all ranks: loss = criterion(ddp_model(x), y); a rank that "
                "leaves it out lends its next all_reduce to another step's gradients",
            },
            "building": {
                "summary": "rank {rank} builds DistributedDataParallel and waits for ever in its {names}: another rank "
                "trains without building one",
                "repair": "wrap the model in DistributedDataParallel on all ranks: it has the ranks compare their "
                "parameters as it is built",
            },
        },
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/7773",
    ),
    "written_by_every_rank": _ran(
        proof="several ranks write one and the same file",
        summary="{writers} ranks write one and the same file, {names}: the last one wins, or they mix",
        shown_by="the path is the same on all of them",
        repair="if dist.get_rank() == 0: torch.save(...), and dist.barrier() where the others read it",
        source="https://github.com/kakaobrain/scrl/issues/5",
    ),
    "weights_drift": _ran(
        proof="the ranks begin with the same weights, and their weights part",
        summary="the weights {names} begin equal on all ranks and end different: {first}",
        shown_by="weights, learning rates and gradients at each step, by rank",
        repair="make every change of weights on all ranks, with the same numbers: schedules and stops that follow a "
        "loss need the loss of all ranks",
        settle="suppress it where each rank is to keep a buffer of its own, or broadcast it",
        variants={
            "state": {
                "summary": "{names} {names:begin} equal on all ranks and {names:end} different",
                "shown_by": "no optimizer steps it, and nothing brings it together",
            }
        },
        source=_NOTES,
    ),
}

found = finding_maker(CAUSES)
