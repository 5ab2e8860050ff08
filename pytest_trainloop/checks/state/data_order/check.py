"""Data come as they should: rows with their labels, in a new order where one is drawn, once and not once a worker.

What it does
    It reads two epochs of what the project gives as ``batches=``, or 48 batches of ``batches(n)``, and of the
    DataLoaders that ``batches`` and ``fit`` hold; fetches single items of their data sets again; starts their workers;
    and, where ``fit`` iterates a loader itself, notes the order of each epoch that it trains on.

Why is this bad?
    Nothing raises, and the loss falls: a model that learns from shuffled labels learns their frequencies, two workers
    that give the whole data set each make an epoch twice as long, and a shuffle that is the same in every epoch is
    none.

How it decides
    There are many right orders (with replacement, weighted, sorted by length, curricula, replay, streams without
    end), so no order is called wrong for itself. A fault is what the stream contradicts in itself. Rows are told
    apart by their bits. Inputs and labels come apart where all epochs hold the same rows and the same labels and not
    the same pairs, the stream's own code stores a tensor of these inputs and one of the same length of these labels,
    so that each row has a label, and the label is the target of a loss function of torch and no prediction depends on
    it (else advice: captions in turn, unpaired translation, times and classes that a model is conditioned on). So do
    they where a collate function gives all rows and all labels of its items, and not in the items' pairs; labels may
    be cut to the width of the row that they are put into. Labels that are drawn anew would seldom be as many of each
    kind: epochs and batches are read until that chance is below 1 in 1000. Labels that are renamed, entry by entry, or
    shifted are those of their rows. A shuffle is
    none where the same order comes in every epoch and that order was drawn for each: where nothing is drawn the order
    is the project's choice. A sampler that follows ``set_epoch`` is advice, as the project may call it outside of
    ``fit``; it is a fault where optimizer steps happen between the batches of a loader that comes in one order in two
    epochs of ``fit``. Workers duplicate where each row comes k times as often with k workers as with none. They share
    randomness where two fetches of one item differ within a worker and both workers' are the same. An item is changed
    in place where three fetches under one random state differ, no other item does, and putting back what the data set
    stores gives the first again (a counter of one entry and running statistics are not such). Where a fetch writes what
    it draws (a random mask), the item must change so after fetches under other random states, and what they write must
    add up: a cache keeps its first content, a buffer its last. One batch only is a
    fault where ``fit`` begins a ``DataLoader`` of several batches in one order again for each step. Records share a
    tensor where all hold one object that was written in place once a record. A last batch raises where ``fit`` raises
    on it and does not on full ones.

Faulty
    >>> x, y = torch.randn(64, 8), torch.arange(64) % 3
    >>> def shuffled(n):
    ...     while n > 0:
    ...         rows, labels = torch.randperm(64), torch.randperm(64)       # two orders
    ...         for i in range(0, 64, 16):
    ...             yield x[rows[i:i + 16]], y[labels[i:i + 16]]
    ...             n -= 1
    >>> batches = shuffled

Fixed
    >>> x, y = torch.randn(64, 8), torch.arange(64) % 3
    >>> def shuffled(n):
    ...     while n > 0:
    ...         order = torch.randperm(64)
    ...         for i in range(0, 64, 16):
    ...             yield x[order[i:i + 16]], y[order[i:i + 16]]
    ...             n -= 1
    >>> batches = shuffled

Known limits
    At most 400 batches and 4096 rows of an epoch are read; longer ones are judged by what was read of them. An order
    that a generator of numpy's draws is seen only where the generator is made anew for it. Data that are made on
    the fly never come twice: give the DataLoader itself. Collators that merge rows, leakage between splits, and what
    labels mean are not judged. ``fit`` over its own loader is run for two epochs of at most 50 batches.

    Cost when green: no optimizer step of the loop; 2 where an epoch ends with a smaller batch; one further run (12
    steps) where ``fit`` holds or makes loaders of its own, or fills a buffer that it samples from; two epochs of the
    loader (102 steps at most) where ``fit`` seeds torch and the loader shuffles. Red: the same, and 2 for the target of
    labels that come apart. Under 0.1 s for small data, with workers 0.1 to 0.7 s.

References
    https://docs.pytorch.org/docs/stable/data.html
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import Cause, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "no_batch": Cause(
        proof="len(loader) is 0, its data set is not empty, and drop_last drops the only batch",
        repair="drop_last=False; or a batch size that the data set fills",
        explains=("overfit_one_batch",),
        source="https://github.com/RasmussenLab/vamb/pull/425",
    ),
    "labels_apart": Cause(
        proof="rows and labels are all there, and not in the pairs of another epoch, or of the items before they were "
        "collated",
        repair="order = torch.randperm(len(x)), once an epoch, and x[order], y[order] with it; or one loader over "
        "TensorDataset(x, y)",
        do_not="fix the seed of both shuffles: they part as soon as one of them draws once more",
        settle="a data set that stores inputs and labels row by row, in a DataLoader that is given as batches=",
        explains=("loss_contract:labels_misplaced",),
        source="https://github.com/Borda/kaggle_image-classify/pull/12",
    ),
    "shuffled_alike": Cause(
        proof="an order is drawn for each epoch, and all epochs come in the same one",
        repair="one generator, made once: torch.Generator().manual_seed(seed); or seed + epoch for each epoch. Look "
        "whether an evaluation or a preview reseeds torch",
        do_not="reseed at each epoch's start to have runs repeatable: one seed before the first epoch does that",
        source="https://github.com/AUTOMATIC1111/stable-diffusion-webui/pull/3803",
    ),
    "set_epoch_missing": Cause(
        proof="all epochs come in one order, and set_epoch() with another number gives another",
        repair="loader.sampler.set_epoch(epoch) at the start of each epoch",
        settle="call set_epoch in fit, or let fit iterate its epochs over the loader: then this is judged",
        source="https://github.com/lucidrains/DALLE-pytorch/pull/230",
    ),
    "workers_duplicate": Cause(
        proof="each row comes as many times as often with workers as without as there are workers",
        repair="info = torch.utils.data.get_worker_info(), and itertools.islice(rows, info.id, None, "
        "info.num_workers) in __iter__ where info is not None",
        source="https://github.com/espnet/espnet/pull/2081",
    ),
    "workers_share_randomness": Cause(
        proof="two fetches of one item differ within a worker, and those of both workers (as advice: those of the next "
        "epoch) are the same",
        repair="no seeding in worker_init_fn (torch seeds python, torch and numpy in each worker); or "
        "np.random.seed(torch.initial_seed() % 2**32) there; generators of the data set made in the worker",
        change=("loader",),
        source="https://github.com/TorchDSP/torchsig/pull/361",
    ),
    "changed_in_place": Cause(
        proof="putting back what the data set stores, and that alone, gives the first item again",
        repair="work on a copy: x = self.x[index].clone() (array.copy()), or x = x - mean in place of x -= mean",
        change=("seen",),
        source="https://github.com/facebookresearch/pycls/pull/21",
    ),
    "slots_share_tensor": Cause(
        proof="all records hold one object, which was written in place as often as records were made",
        repair="store tensor.clone() when a record is made",
        source="https://github.com/rail-berkeley/rlkit/issues/98",
    ),
    "last_batch_raises": Cause(
        proof="fit raises on a full batch and the last one in turn, and not on full ones",
        repair="drop_last=True in the training loader; or have the loop skip or join batches that are too small",
        change=("seen",),
        source="https://github.com/azavea/raster-vision/pull/1029",
    ),
    "batch_repeats": Cause(
        proof="every batch comes equally often in a row, and more than once",
        repair="let the start of a batch go on: start = step * batch_size % len(data); a worker process counts for "
        "itself, so share out the indices by get_worker_info()",
        source="https://github.com/dscripka/openWakeWord/pull/202",
    ),
    "one_batch_only": Cause(
        proof="all batches hold the same rows",
        repair="draw the rows of a batch where it is asked for, or read the index that __getitem__ is given",
        source="https://github.com/wandb/examples/issues/444",
    ),
    "one_label_a_batch": Cause(
        proof="each label comes in one block of rows longer than a batch, and no order is drawn",
        repair="shuffle=True in the DataLoader; for an iterable data set a buffer that shuffles",
        source="https://github.com/Deci-AI/super-gradients/issues/416",
    ),
    "one_noise_for_all": Cause(
        proof="the draws of two items, each fetched twice, are equal",
        repair="no manual_seed in __getitem__; a generator that is made once and goes on",
        source="https://github.com/ad12/meddlr/pull/21",
    ),
    "rows_never_drawn": Cause(
        proof="all rows drawn are among a third of what is stored, in five times as many draws as there are rows",
        repair="draw from the whole range: torch.randint(len(data), (batch_size,))",
        source="https://github.com/BlackHC/batchbald_redux/pull/6",
    ),
    "leaves_alike": Cause(
        proof="two of three tensors of one shape are equal in every row, and the third is not",
        repair="draw the positive apart from the anchor, as another row of its class or another view of it",
    ),
}


@check(
    needs={"run"},
    causes=CAUSES,
    rank=40,
    steps=1,
    instrument="pytest_trainloop.checks.state.data_order.in_fit:PassesInRun",
    names="attribute",
)
def data_order(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.data_order.looks import Looks, observed

    if not evidence.repeatable:
        yield from observed(evidence)
        return
    looks = Looks(evidence)
    found: dict[tuple[str, str], Finding] = {}
    for finding in looks.findings():
        known = found.get((finding.cause, finding.where))
        # Of two with one level that counts which names the line to change: the collate function, not the loader.
        if known is None or _rank(finding) > _rank(known):
            found[finding.cause, finding.where] = finding
    faults = {finding.cause for finding in found.values() if finding.level == "fault"}
    for finding in found.values():
        # A collate function is often that of several loaders: its repair is told once.
        if finding.level == "fault" or finding.cause != "labels_apart" or finding.cause not in faults:
            yield finding
    if found or looks.judged:
        return
    if looks.undecided:
        raise looks.undecided[0]
    raise CannotDecide(
        "there is one example batch and no DataLoader: give the DataLoader, or what yields batches, as batches=",
        needs="batches=",
    )


def _rank(finding: Finding) -> tuple[bool, bool]:
    return finding.level == "fault", bool(finding.change)
