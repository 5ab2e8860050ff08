"""The causes of ``distributed_equivalence``. No torch."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

CAUSES = {
    "never_synchronised": Cause(
        proof="each rank's step reads the gradient of its own rows alone, or all read that of one rank, and nothing "
        "brings the weights together",
        repair="wrap the model in DistributedDataParallel and call the wrapper, or all-reduce every gradient before "
        "the step: dist.all_reduce(p.grad); p.grad /= dist.get_world_size()",
        change=("seen",),
    ),
    "wrapper_bypassed": Cause(
        proof="the loop holds a DistributedDataParallel and never calls it, and each rank's step reads the gradient of "
        "its own rows alone",
        repair="call the wrapper: loss = criterion(ddp_model(x), y); ddp_model.module is for saving and evaluation",
        change=("seen",),
    ),
    "parameters_not_in_wrapper": Cause(
        proof="some parameters get the gradient of a rank's own rows alone, while all others get that of all rows",
        repair="build every layer, and replace parameters, before the model is wrapped; what lies outside of the "
        "wrapper needs one of its own",
        change=("seen",),
    ),
    "last_micro_batch_not_synchronised": Cause(
        proof="of a window of micro-batches the last one reaches only the rank that computed it, and those before it "
        "reach all ranks",
        repair="enter no_sync() for all micro-batches of a window but the last: with model.no_sync() if not last else "
        "nullcontext(): ... backward()",
        do_not="synchronise in every micro-batch: it is right, and sends a window's gradients several times",
        change=("seen",),
    ),
    "synchronised_every_micro_batch": Cause(
        proof="the gradients are right, and the ranks exchange them once for each micro-batch of a window",
        repair="with model.no_sync(): around forward and backward of all micro-batches but the last of a window",
        settle="it costs time only; suppress it where memory forbids to wait (FSDP)",
        change=("seen",),
    ),
    "mean_of_means": Cause(
        proof="all ranks weigh the same, where in one process each weighs by its valid targets",
        repair="sum the loss, all-reduce the number of valid targets, and backpropagate "
        "loss_sum * world_size / targets_of_all_ranks (DistributedDataParallel divides by the number of ranks)",
        change=("seen",),
    ),
    "summed_over_ranks": Cause(
        proof="every rank weighs as many times what it does in one process as there are ranks",
        repair="divide by the number of ranks once: op=dist.ReduceOp.AVG, or p.grad /= dist.get_world_size() after "
        "all_reduce",
        change=("seen",),
    ),
    "divided_twice": Cause(
        proof="every rank weighs one over the number of ranks of what it does in one process",
        repair="DistributedDataParallel averages over the ranks already: do not divide the loss or the gradients by "
        "the number of ranks again",
        settle="a loss that is a sum over rows becomes a mean over the ranks: multiply it by the number of ranks, or "
        "divide it by the number of rows",
        change=("seen",),
    ),
    "gathered_without_gradient": Cause(
        proof="the ranks' losses are those of one process, rows of different ranks interact, and the gradient is none "
        "of one process",
        repair="gather with gradients: torch.distributed.nn.functional.all_gather in place of dist.all_gather, which "
        "cuts the graph",
        do_not="put back the rank's own rows alone, unless each rank computes the loss of all rows",
        change=("seen",),
    ),
    "norm_of_one_shard": Cause(
        proof="the norm by which a rank clips is that of its own part, and in one process that of the whole gradient",
        repair="clip after the gradients are all-reduced, over all parameters; where each rank holds a part, add up "
        "the squared norms of all ranks first (clip_grad_norm_ of a DTensor does)",
        change=("seen",),
    ),
    "start_differs": Cause(
        proof="at the first step the ranks hold different weights or buffers",
        repair="broadcast them from rank 0 before the first step (DistributedDataParallel does so when it is built), "
        "or build the model under one seed on all ranks",
        settle="under one seed on all ranks they are the same: seed every rank alike before the model is built, or "
        "broadcast, where your launcher does not",
        change=("seen",),
    ),
    "same_rows_on_every_rank": Cause(
        proof="all ranks compute the same losses and the same gradients, bit for bit, from the loop's own batches",
        repair="DataLoader(dataset, sampler=DistributedSampler(dataset)), and sampler.set_epoch(epoch) in every epoch",
        settle="give each rank its own rows (DistributedSampler), or another seed to what draws them",
        change=("loader", "seen"),
    ),
    "rows_left_out": Cause(
        proof="the ranks' samplers cut different data sets, or different orders: some rows are on several ranks and "
        "some on none",
        repair="give DistributedSampler the same data set and the same seed on all ranks",
        change=("loader", "seen"),
    ),
    "same_draws_on_every_rank": Cause(
        proof="what the loop draws at this line is the same on all ranks, bit for bit, while their rows differ and "
        "they were given different seeds",
        repair="seed what is drawn for each rank apart, after the model is built: torch.manual_seed(seed + rank)",
        settle="suppress it where all ranks are to draw the same (a choice that must be common)",
        change=("seen",),
    ),
    "batch_norm_per_rank": Cause(
        proof="batch norms normalise by the rows of their own rank, and their running statistics part",
        repair="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped (on GPUs), or a norm "
        "without batch statistics",
        settle="suppress it where each rank has rows enough for statistics of its own",
        change=("seen",),
    ),
    "unused_parameters": Cause(
        proof="parameters get no gradient in a backward pass, and DistributedDataParallel waits for them",
        repair="DistributedDataParallel(model, find_unused_parameters=True), or use every parameter in every forward "
        "pass",
        do_not="add 0 * sum(p.sum() for p in model.parameters()) to the loss: a parameter that is not finite makes "
        "all of it NaN",
        change=("seen",),
    ),
    "one_rank_waits": Cause(
        proof="a rank waits in a collective that another rank never enters",
        repair="call every collective on every rank: rank 0 evaluates model.module, not the wrapper, or all ranks "
        "evaluate; a barrier belongs on all ranks",
        change=("seen",),
    ),
    "written_by_every_rank": Cause(
        proof="several ranks write one and the same file",
        repair="if dist.get_rank() == 0: torch.save(...), and dist.barrier() where the others read it",
        change=("seen",),
    ),
    "weights_drift": Cause(
        proof="the ranks begin with the same weights, and their weights part",
        repair="make every change of weights on all ranks, with the same numbers: schedules and stops that follow a "
        "loss need the loss of all ranks",
        settle="suppress it where each rank is to keep a buffer of its own, or broadcast it",
        change=("seen",),
    ),
}
