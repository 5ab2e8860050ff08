"""Data come as they should: rows with their labels, in a new order where one is drawn, once and not once a worker.

What it does
    It reads two epochs of ``batches=``, or 48 batches of ``batches(n)``, and of the DataLoaders that ``batches`` and
    ``fit`` hold. It fetches single items of their data sets again and starts their workers. Where ``fit`` iterates a
    loader itself, it notes the order of each epoch that it trains on.

Why is this bad?
    Nothing raises, and the loss falls. A model that learns from shuffled labels learns their frequencies. Two workers
    that each give the whole data set make an epoch twice as long. A shuffle that is the same in every epoch is none.

How it decides
    1. No order is wrong in itself: replacement, weights, curricula and replay are right. A fault is what the stream
       contradicts in itself. Rows are compared by their bits.
    2. An order is judged if all epochs hold the same rows. A shuffle is none if an order was drawn for each epoch and
       all are equal. Without a draw the order is the project's choice.
    3. Labels are judged if all epochs hold the same rows and labels in other pairs. It is a fault if the stream's own
       code stores inputs and labels of one length, and the label is a torch loss's target that no prediction depends
       on. A collate function separates labels if it gives all rows and all labels of its items in other pairs. Epochs
       are read until new draws would explain that in less than 1 of 1000 cases. Labels renamed entry by entry, or
       shifted, belong to their rows.
       An image and its mask get the same content: it must arrive at the same places.
    4. Items are fetched again, under several random states, and by workers. What fetches write must add up: a cache
       keeps its first content, a buffer its last. Counters of one entry and running statistics are no fault.
    5. Rows that a collate function mixes (mixup, CutMix) are written as mixtures of two items. Their targets must mix
       the same two, in the same shares.

    | seen | cause | advice if |
    |---|---|---|
    | labels have other pairs than stored or collated | ``labels_apart`` | not stored together, or no loss's target |
    | the target is cut elsewhere than its input | ``labels_apart`` | no draw cuts the target |
    | every epoch has the same drawn order, or ``cycle()`` repeats it | ``shuffled_alike`` |  |
    | the sampler follows ``set_epoch`` and nobody calls it | ``set_epoch_missing`` | ``fit`` trains no two epochs so |
    | each row comes k times as often with k workers | ``workers_duplicate`` |  |
    | both workers draw equal numbers, fetches in one differ | ``workers_share_randomness`` | only epochs are equal |
    | putting back what is stored gives the first item again; two splits set one attribute | ``changed_in_place``,
      ``split_overwrites`` |  |
    | a weighted sampler has one weight for each label | ``weights_per_class`` |  |
    | ``fit`` begins the loader again for each step | ``one_batch_only`` | only all batches are equal |
    | all records hold one tensor or list, written each time | ``slots_share_tensor`` | a numpy array |
    | only a smaller last batch raises; ``drop_last`` drops the only one | ``last_batch_raises``, ``no_batch`` |  |
    | batches, labels, noise, rows or leaves repeat | ``batch_repeats``, ``one_label_a_batch``, ``one_noise_for_all``,
      ``rows_never_drawn``, ``leaves_alike`` | always |

When it is skipped
    It skips a single example batch without a DataLoader, and streams that cannot be read.

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
    that a generator of numpy's draws is seen only where the generator is made again for it. Data that are made on the
    fly never come twice: give the DataLoader itself.

    Collators that merge rows, leakage between splits, and what labels mean are not judged. ``fit`` over its own loader
    is run for two epochs of at most 50 batches.

    Cost when green: no optimizer step of the loop; 2 where an epoch ends with a smaller batch. One further run (12
    steps) where ``fit`` holds or makes loaders of its own, or fills a buffer that it samples from. Two epochs of the
    loader (102 steps at most) where ``fit`` seeds torch and the loader shuffles. 2 steps where two tensors of the
    batch have places of one number. Red: the same, and 2 for the target of
    labels in other pairs. Under 0.1 s for small data, with workers 0.1 to 0.7 s.

References
    https://docs.pytorch.org/docs/stable/data.html
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import importlib.util
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
    if importlib.util.find_spec("numpy") is None:
        raise CannotDecide("items and orders are read with numpy, which is not installed", needs="pip install numpy")
    from pytest_trainloop.checks.state.data_order import orders
    from pytest_trainloop.checks.state.data_order.streams import Stream, Streams
    from pytest_trainloop.instruments.batches.own_data import makes_own_data

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
    if undecided:
        raise undecided[0]
    if evidence.shared(makes_own_data):
        raise CannotDecide("the loop makes its own data, and is given none that have an order")
    raise CannotDecide(nothing, needs="batches=")


def _of_stream(stream: Stream, undecided: list[CannotDecide]) -> Iterator[Finding]:
    from pytest_trainloop.checks.state.data_order import collations, items, mixed, orders, places, streams

    rules = [
        orders.of_epochs(stream),
        orders.leaves_equal(stream),
        orders.labels_reordered(stream),
        places.cut_at_two_places(stream),
        stream.streams.assigned.overwritten(stream.now.of),
        streams.rows_never_drawn(stream),
        streams.shared_slots(stream.held, stream.streams.loop),
    ]
    workers = stream.is_loader and stream.source.of.num_workers > 0
    if stream.is_loader and not items.only_iterates(stream.source.of):
        rules += [
            items.weights_per_class(stream),
            collations.collated(stream),
            mixed.mixed(stream),
            mixed.first_alone(stream),
            streams.last_rows_never_drawn(stream),
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
