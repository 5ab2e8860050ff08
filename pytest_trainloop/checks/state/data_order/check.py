"""Data come as they should: rows with their labels, in a new order where one is drawn, once and not once a worker.

What it does
    It reads two epochs of ``batches=``, or 48 batches of ``batches(n)``, and of the DataLoaders that ``batches`` and
    ``fit`` hold. It fetches single items of their data sets again and starts their workers. Where ``fit`` iterates a
    loader itself, it notes the order of each epoch that it trains on.

Why is this bad?
    Nothing raises, and the loss falls. A model that learns from shuffled labels learns their frequencies. Two workers
    that each give the whole data set make an epoch twice as long. A shuffle that is the same in every epoch is none.

How it decides
    There are many right orders (with replacement, weighted, sorted by length, curricula, replay, streams without
    end), so no order is called wrong for itself. A fault is what the stream contradicts in itself. Rows are compared
    by their bits.
    Labels come apart where all epochs hold the same rows and the same labels in other pairs. It is a fault if the
    stream's own code stores a tensor of these inputs and one of these labels of the same length, and if the label is
    the target of a loss function of torch that no prediction depends on. Else it is advice: captions in turn, unpaired
    translation, times and classes that a model is conditioned on. A collate function separates labels where it gives
    all rows and all labels of its items in other pairs; labels may be cut to the width of a row. Labels that are drawn
    anew would seldom be as many of each kind: epochs and batches are read until that chance is below 1 in 1000. Labels
    that are renamed entry by entry, or shifted, belong to their rows.
    A shuffle is none where the same order comes in every epoch and was drawn for each. Where nothing is drawn the order
    is the project's choice. A sampler that follows ``set_epoch`` is advice, since the project may call it outside of
    ``fit``. It is a fault where ``fit`` trains two epochs of a loader in one order.
    Workers duplicate where each row comes k times as often with k workers as with none. They share randomness where two
    fetches of one item differ within a worker, and those of both workers are the same.
    An item is changed in place where it is another one after further fetches of it, no other item is, and putting back
    what the data set stores gives the first again. It is fetched under several random states, since a mask may be drawn
    in each fetch. A counter of one entry and running statistics are no such case. What the fetches write must add up: a
    cache keeps its first content, a buffer its last.
    Weights are those of classes where a ``WeightedRandomSampler`` has as many as the data set stores different labels,
    and draws other rows with one for each row.
    One batch only is a fault where ``fit`` begins a ``DataLoader`` of several batches in one order again for each step.
    Records share a tensor where all hold one object that was written in place once a record. A last batch raises where
    ``fit`` raises on it and does not on full ones.

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

from pytest_trainloop.checks.state.data_order.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.data_order.streams import Stream
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(
    needs={"run"},
    causes=CAUSES,
    rank=40,
    steps=1,
    instrument="pytest_trainloop.checks.state.data_order.orders:PassesInRun",
    names="attribute",
)
def data_order(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.data_order import orders
    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams

    if not evidence.repeatable:
        yield from orders.observed(evidence)
        return
    findings: list[Finding] = []
    undecided: list[CannotDecide] = []
    judged, streams = False, Streams(evidence)
    for number, source in enumerate(streams.sources):
        if empty := list(orders.no_batch(source)):
            findings += empty
            continue
        try:
            stream = Stream(evidence, number, source)
        except CannotDecide as reason:
            undecided.append(reason)
            continue
        judged = judged or stream.judged
        undecided += stream.undecided
        if stream.reading.identity:
            findings += _of_stream(stream, undecided)
    try:
        in_fit, trained = orders.in_fit(evidence, streams)
        findings, judged = findings + in_fit, judged or trained
    except CannotDecide as reason:  # nothing can be run where the given loader gives no batch: that is a finding
        undecided.append(reason)
    yield from _once_each(findings)
    if findings or judged:
        return
    nothing = "there is one example batch and no DataLoader: give the DataLoader, or what yields batches, as batches="
    raise undecided[0] if undecided else CannotDecide(nothing, needs="batches=")


def _of_stream(stream: Stream, undecided: list[CannotDecide]) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.data_order import items, orders, streams

    rules = [
        orders.of_epochs(stream),
        orders.leaves_alike(stream),
        orders.labels_apart(stream),
        streams.rows_never_drawn(stream),
        streams.shared_slots(stream.held, stream.streams.loop),
    ]
    workers = stream.is_loader and stream.source.of.num_workers > 0
    if stream.is_loader and not items.only_iterates(stream.source.of):
        rules += [
            items.weights_per_class(stream),
            items.collated(stream),
            items.changed_in_place(stream),
            items.one_noise_for_all(stream),
        ]
        rules += [items.shared_randomness(stream)] if workers else []
    elif workers:
        rules.append(items.duplicated(stream))
    for rule in (*rules, orders.last_batch(stream)):
        try:
            yield from rule
        except CannotDecide as reason:
            undecided.append(reason)


def _once_each(findings: list[Finding]) -> Iterator[Finding]:
    """Of two findings with one cause and line the fault counts, and that which names the line to change: the collate
    function, not the loader. A collate function is often that of several loaders: its repair is given once."""
    known: dict[tuple[str, str], Finding] = {}
    for one in sorted(findings, key=lambda one: (one.level == "fault", bool(one.change)), reverse=True):
        known.setdefault((one.cause, one.where), one)
    sure = any(one.cause == "labels_apart" and one.level == "fault" for one in known.values())
    yield from (one for one in known.values() if one.level == "fault" or one.cause != "labels_apart" or not sure)
