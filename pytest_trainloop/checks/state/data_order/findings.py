"""What the looks found, in words."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.wording import count, some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.state.data_order.collated import Collated
    from pytest_trainloop.checks.state.data_order.in_fit import Repeated
    from pytest_trainloop.checks.state.data_order.items import Changed
    from pytest_trainloop.checks.state.data_order.last_batch import LastRaises
    from pytest_trainloop.checks.state.data_order.order import Apart, Sorted
    from pytest_trainloop.checks.state.data_order.passes import Pass
    from pytest_trainloop.checks.state.data_order.sources import Source
    from pytest_trainloop.checks.state.data_order.stored import NeverDrawn, SharedSlot, StoredPair
    from pytest_trainloop.checks.state.data_order.streams import Epoch, Reading
    from pytest_trainloop.checks.state.data_order.workers import Duplicated, SharedRandomness
    from pytest_trainloop.finding import Level

CYCLE = (
    "a generator that begins the loader again, in place of cycle(): def endless(loader): while True: yield from loader"
)
ONCE = (
    "make the generator once, where the loader is built, and let it go on: torch.Generator().manual_seed(seed); or "
    "seed it with seed + epoch"
)

SORTED = {
    "repair": "sort the rows as they are, before their fields are taken apart: rows = sorted(rows, key=..., "
    "reverse=True)",
    "do_not": "sort the labels by a key of their own",
}
REORDERED = {
    "repair": "one order for whole items, before their fields are taken apart: items = [items[i] for i in order]",
    "do_not": "draw an order for each field: they part in every batch",
}


def no_batch(source: Source, dropped: tuple[int, int]) -> Finding:
    rows, size = dropped
    return _finding(
        "no_batch",
        source,
        summary=f"{source.name} gives no batch: it has {count(rows, 'row')}, and drop_last=True drops the only batch",
        measured=f"len(loader) is 0: {count(rows, 'row')} in batches of {size} with drop_last=True",
        shown_by=f"len(loader.dataset) is not 0, and with drop_last=False there is a batch of {count(rows, 'row')}",
    )


def labels_apart(source: Source, apart: Apart, pair: StoredPair | None, level: Level) -> Finding:
    stored = (
        f"; {pair.inputs} and {pair.labels} hold these very rows and labels, {pair.rows} each: every row has one"
        if pair is not None
        else ""
    )
    return _finding(
        "labels_apart",
        source,
        level=level,
        summary=f"{apart.changed} of {apart.rows} rows of {apart.inputs} come with another row's {apart.labels} in "
        f"another epoch of {source.name}",
        measured=f"{apart.inputs} has the same rows in both epochs, {apart.labels} the same values, and the pairs of "
        "them differ",
        shown_by=f"two epochs of {source.name}, row by row{stored}",
        culprits=(apart.inputs, apart.labels),
    )


def collated_apart(source: Source, loader: Any, apart: Collated, level: Level) -> Finding:
    collate = _of_project(loader.collate_fn)
    name = getattr(collate, "__name__", type(collate).__name__)
    labels = (
        f"each row of {apart.labels} agrees with an item wherever it has a label"
        if apart.cut
        else f"all values of {apart.labels} are those of the items"
    )
    return _finding(
        "labels_apart",
        source,
        level=level,
        summary=f"{name}() of {source.name} gives {apart.changed} of {apart.rows} rows of {apart.inputs} the "
        f"{apart.labels} of another item",
        measured=f"all rows of {apart.inputs} are those of the items, {labels}, and {apart.changed} of {apart.rows} "
        "pairs are not",
        shown_by=f"the items of one batch of {source.name} as the data set gives them, and the same items after "
        f"{name}()",
        culprits=(apart.inputs, apart.labels),
        change=_function(collate),
        **(SORTED if apart.sorts else REORDERED),
    )


def shuffled_alike(source: Source, reading: Reading, epochs: Sequence[Epoch], times: int) -> Finding:
    drawn = epochs[0].draws[-1][0]
    sampler = next((one.sampler for one in reading.passes), "")
    return _finding(
        "shuffled_alike",
        source,
        summary=f"{source.name} is shuffled, and comes in the same order in all of {times} epochs",
        measured=f"{count(epochs[0].rows, 'row')} in one order, in {times} of {times} epochs",
        shown_by=f"{drawn}() drew the order of each epoch{f' for the {sampler}' if sampler else ''}, and gave the same "
        "numbers each time",
        culprits=(sampler or drawn,),
        repair=ONCE,
    )


def kept_by_cycle(source: Source, kept: Pass) -> Finding:
    return _finding(
        "shuffled_alike",
        source,
        where=kept.where,
        summary="itertools.cycle() gives the first epoch again and again: it is shuffled, and all further epochs come "
        "in its order",
        measured=f"one pass over a loader of {count(kept.rows, 'row')}, and its batches go on after its end",
        shown_by=f"{kept.draws[-1][0]}() drew the order of the first epoch, cycle() holds its batches, and the "
        "loader is not iterated again",
        culprits=("cycle()",),
        repair=CYCLE,
    )


def repeated_in_fit(repeated: Repeated) -> Finding:
    """A loader that the loop trained on in one order."""
    if repeated.by_cycle:
        return Finding(
            cause="shuffled_alike",
            summary="the loop trains on itertools.cycle() of a loader: the first epoch's shuffled batches again and "
            "again, in one order",
            measured=f"one pass over a loader of {count(repeated.rows, 'row')}, and optimizer steps after its end",
            shown_by=f"{repeated.drawn}() drew the order of that pass, and cycle() holds its batches",
            culprits=("cycle()",),
            kinds=("call",),
            where=repeated.where,
            repair=CYCLE,
        )
    if repeated.set_epoch:
        return Finding(
            cause="set_epoch_missing",
            level="fault",
            summary=f"the loop trains {repeated.epochs} epochs in one order: the {repeated.sampler} draws it by its "
            "epoch, which nothing sets",
            measured=f"{count(repeated.rows, 'row')} in one order, in {repeated.epochs} of {repeated.epochs} epochs",
            shown_by=f"{repeated.drawn}() drew the order of each epoch, and gave the same numbers each time; optimizer "
            "steps were made in between",
            culprits=(f"{repeated.set_epoch}.set_epoch()",),
            kinds=("missing call",),
            where=repeated.where,
            repair=f"loader.{repeated.set_epoch}.set_epoch(epoch) at the start of each epoch",
        )
    return Finding(
        cause="shuffled_alike",
        summary=f"the loop trains {repeated.epochs} epochs in one order, although the loader shuffles",
        measured=f"{count(repeated.rows, 'row')} in one order, in {repeated.epochs} of {repeated.epochs} epochs",
        shown_by=f"{repeated.drawn}() drew the order of each epoch for the {repeated.sampler}, and gave the same "
        "numbers each time; optimizer steps were made in between",
        culprits=(repeated.sampler,),
        kinds=("call",),
        where=repeated.where,
        repair=f"{ONCE}; where a seed is set at each epoch's start (manual_seed), set it once before the first",
    )


def set_epoch_missing(source: Source, path: str, epochs: Sequence[Epoch], in_fit: Repeated | None) -> Finding:
    again = f", and in {in_fit.epochs} epochs of fit over it" if in_fit is not None else ""
    return _finding(
        "set_epoch_missing",
        source,
        level="advice" if in_fit is None else "fault",
        summary=f"{source.name} comes in the same order in every epoch as long as nobody calls {path}.set_epoch()",
        measured=f"{count(epochs[0].rows, 'row')} in one order in {len(epochs)} epochs{again}",
        shown_by="set_epoch() with another number gives another order"
        + ("; optimizer steps were made in all of these epochs" if in_fit is not None else ""),
        culprits=(f"{path}.set_epoch()",),
        kinds=("missing call",),
        repair=f"loader.{path}.set_epoch(epoch) at the start of each epoch",
    )


def workers_duplicate(source: Source, dataset: Any, twice: Duplicated) -> Finding:
    kind = type(dataset).__name__
    return _finding(
        "workers_duplicate",
        source,
        summary=f"{twice.workers} workers give each row {twice.workers} times an epoch: every one of them iterates the "
        f"whole {kind}",
        measured=f"{count(twice.rows, 'row')} without workers, {twice.workers * twice.rows} with {twice.workers}",
        shown_by=f"each row comes {twice.workers} times as often with num_workers={twice.workers} as with none",
        culprits=(f"{kind}.__iter__",),
        kinds=("call",),
        change=_method(dataset, "__iter__"),
    )


def workers_share_randomness(source: Source, shared: SharedRandomness) -> Finding:
    who = f"by {shared.generator}, which every worker copies" if shared.generator else f"since {shared.setter}() seeds"
    if shared.across_workers:
        return _finding(
            "workers_share_randomness",
            source,
            summary="all workers draw the same random numbers"
            + (f", {who}" if shared.generator else f": {shared.setter or 'the data set'} seeds them alike"),
            measured="one item fetched four times by two workers: each worker's two differ, and both workers' are the "
            "same",
            shown_by="the first two fetches agree bit for bit, so do the next two, and these are others than the first",
            culprits=(shared.setter or shared.generator or "worker_init_fn",),
        )
    return _finding(
        "workers_share_randomness",
        source,
        level="advice",
        summary="workers draw the same random numbers in every epoch",
        measured="one item fetched twice by each of two workers, in two epochs: the second epoch is the first again",
        shown_by="the fetches differ within an epoch, and agree bit for bit with those of the next",
        culprits=(shared.setter or shared.generator or "worker_init_fn",),
    )


def changed_in_place(source: Source, dataset: Any, changed: Changed) -> Finding:
    kind = type(dataset).__name__
    return _finding(
        "changed_in_place",
        source,
        summary=f"fetching an item of {kind} changes what is stored: item {changed.index} is another one each time",
        measured=f"item {changed.index} is another one after further fetches of it, which draw what they write into "
        f"{some(list(changed.stored))}"
        if changed.drawn
        else f"three fetches of item {changed.index} under one random state differ, and "
        f"{some(list(changed.stored))} changed",
        shown_by=f"with {some(list(changed.stored))} put back the item is what it was at first"
        + ("; what each fetch writes adds to what those before it wrote" if changed.drawn else ""),
        culprits=tuple(changed.stored[:2]),
        change=_method(dataset, "__getitem__"),
    )


def one_noise_for_all(source: Source, dataset: Any, noise: tuple[str, int]) -> Finding:
    name, draws = noise
    return _finding(
        "one_noise_for_all",
        source,
        level="advice",
        summary=f"every item of {type(dataset).__name__} draws the same random numbers, each time it is fetched",
        measured=f"{count(draws, 'draw')} an item, the first by {name}(): equal in two items, each fetched twice",
        culprits=(f"{name}()",),
        change=_method(dataset, "__getitem__"),
    )


def slots_share_tensor(slot: SharedSlot) -> Finding:
    where = f"{slot.path}[...]{slot.slot}"
    return Finding(
        cause="slots_share_tensor",
        level="fault" if slot.written is not None else "advice",
        summary=f"all {slot.records} records of {slot.path} hold one and the same "
        f"{'tensor' if slot.written is not None else 'array'} of shape {slot.shape}, with the values of the last",
        measured=f"{where} is one object in {slot.records} of {slot.records} records"
        + (f", written in place {slot.written} times" if slot.written is not None else ""),
        shown_by="the records' objects are identical, and what is written into it changes all of them"
        if slot.written is not None
        else "",
        culprits=(where,),
        kinds=("call",),
        repair=f"store {'tensor.clone()' if slot.written is not None else 'array.copy()'} when a record is made",
    )


def last_batch_raises(source: Source, last: LastRaises) -> Finding:
    return _finding(
        "last_batch_raises",
        source,
        where=last.where,
        summary=f"the last batch of an epoch, of {count(last.rows, 'row')}, makes fit raise {last.summary}",
        measured=f"{source.name} ends an epoch with {count(last.rows, 'row')}, after batches of {last.full}",
        shown_by="a fresh loop raises on a full batch and that one in turn, and does not on full ones",
        culprits=("DataLoader" if source.kind == "loader" else source.name,),
        smallest=count(last.rows, "row"),
        repair=(
            f"have {type(sampler).__name__}, which makes the batches, leave out or join the last one (drop_last cannot "
            "be given with a batch_sampler); or have the loop skip batches that are too small"
            if (sampler := _own_batch_sampler(source)) is not None
            else ""
        ),
    )


def _own_batch_sampler(source: Source) -> Any:
    """The sampler that was given to the loader as ``batch_sampler``; such a loader has no batch size of its own."""
    loader = source.of if source.kind == "loader" else None
    return getattr(loader, "batch_sampler", None) if getattr(loader, "batch_size", 0) is None else None


def batch_repeats(source: Source, times: int) -> Finding:
    return _finding(
        "batch_repeats",
        source,
        level="advice",
        summary=f"{source.name} gives each batch {times} times in a row",
        measured=f"runs of {times} equal batches, and nothing else",
        culprits=(source.name,),
    )


def one_batch_only(source: Source, batches: int) -> Finding:
    return _finding(
        "one_batch_only",
        source,
        level="advice",
        summary=f"{source.name} gives the same rows in every batch",
        measured=f"{batches} of {batches} batches hold the same rows",
        culprits=(source.name,),
    )


def first_batch_only(source: Source, batches: int) -> Finding:
    return _finding(
        "one_batch_only",
        source,
        summary=f"fit trains on the first of {batches} batches only: it begins {source.name} again for each step",
        measured="one batch taken in each pass over the loader, which gives its batches in one order",
        shown_by="the passes over the batches in the watched run, and two epochs of the loader without a draw",
        culprits=(source.name,),
        repair="for batch in loader: ...; or batches = iter(loader) once, and next(batches) for each step",
    )


def one_label_a_batch(source: Source, blocks: Sorted) -> Finding:
    return _finding(
        "one_label_a_batch",
        source,
        level="advice",
        summary=f"{blocks.leaf} comes sorted: {blocks.alone} of {blocks.batches} batches hold one label only",
        measured=f"{blocks.labels} labels, each in one block of rows, and no order is drawn",
        culprits=(blocks.leaf,),
    )


def rows_never_drawn(source: Source, never: NeverDrawn) -> Finding:
    return _finding(
        "rows_never_drawn",
        source,
        level="advice",
        summary=f"{never.rows - never.seen} of {never.rows} rows of {never.path} are never drawn",
        measured=f"{never.draws} rows drawn, all of them among the same {never.seen}",
        culprits=(never.path,),
    )


def leaves_alike(source: Source, names: tuple[str, str, str], rows: int) -> Finding:
    a, b, third = names
    return _finding(
        "leaves_alike",
        source,
        level="advice",
        summary=f"{a} and {b} are equal in every row, and {third} is not",
        measured=f"{rows} of {rows} rows",
        culprits=(a, b),
    )


def _finding(cause: str, source: Source, **fields: Any) -> Finding:
    fields = {"where": source.where, "culprits": (source.name,), **fields}
    fields.setdefault("kinds", tuple("input" if c.startswith("batch[") else "call" for c in fields["culprits"]))
    return Finding(cause=cause, **fields)


def _of_project(collate: Any) -> Any:
    """The collate function of the project that a library's object calls, as the Trainer of transformers wraps it."""
    if isinstance(collate, functools.partial):
        return _of_project(collate.func)
    if _function(collate) or inspect.isroutine(collate) or not hasattr(collate, "__dict__"):
        return collate
    held = (one.func if isinstance(one, functools.partial) else one for one in vars(collate).values())
    return next((one for one in held if callable(one) and _function(one)), collate)


def _function(function: Any) -> str:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or layer(code.co_filename) != 2:
        return ""
    return str(place_of(code.co_filename, code.co_firstlineno))


def _method(owner: Any, name: str) -> str:
    """The line that defines a method, in a class of the project's own."""
    code = getattr(inspect.unwrap(getattr(type(owner), name, None) or _method), "__code__", None)
    if code is None or layer(code.co_filename) != 2:
        return ""
    return str(place_of(code.co_filename, code.co_firstlineno))
