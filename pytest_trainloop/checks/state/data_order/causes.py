"""The causes of ``data_order``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.registry import Cause, finding_maker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.finding import Finding

_seen = partial(Cause, change=("seen",))
_ONE_ORDER = "{rows:row} in one order, in {epochs} of {epochs} epochs"
_SAME_DRAW = "{drawn}() drew the order of each epoch{sampler:? for {sampler}|}, and gave the same numbers each time"
_STEPS = "optimizer steps were made in between"
_ONE_GENERATOR = (
    "create the generator once, where the loader is built, and do not seed it again: "
    "torch.Generator().manual_seed(seed); or seed it with seed + epoch"
)
_CYCLE = {
    "measured": "one epoch of a loader of {rows:row}, then further {trained:?optimizer steps|batches}",
    "shown_by": "{drawn}() drew the order of the first epoch, and cycle() gives its batches again: the loader is not "
    "iterated a second time",
    "repair": "use a generator that iterates the loader again, in place of cycle(): def endless(loader): while True: "
    "yield from loader",
}

CAUSES = {
    "no_batch": Cause(
        proof="len(loader) is 0, its data set is not empty, and drop_last drops the only batch",
        summary="{names} gives no batch: it has {rows:row}, and drop_last=True drops the only batch",
        measured="len(loader) is 0: {rows:row} in batches of {size} with drop_last=True",
        shown_by="len(loader.dataset) is not 0, and with drop_last=False there is a batch of {rows:row}",
        repair="drop_last=False; or a batch size that the data set fills",
        explains=("overfit_one_batch",),
        source="https://github.com/RasmussenLab/vamb/pull/425",
        change=("loader", "seen"),
    ),
    "labels_apart": Cause(
        change=("collated",),
        proof="rows and labels are all there, and not in the pairs of another epoch, or of the items before they were "
        "collated",
        summary="{changed} of {rows} rows of {inputs} come with another row's {labels} in another epoch of {stream}",
        measured="two epochs hold the same rows of {inputs} and the same values of {labels}, in other pairs",
        shown_by="two epochs of {stream}, row by row{stored:?; {stored_inputs} and {stored_labels} hold these rows and "
        "labels, {stored} each: every row has one|}",
        repair="order = torch.randperm(len(x)), once an epoch, and x[order], y[order] with it; or one loader over "
        "TensorDataset(x, y)",
        do_not="fix the seed of both shuffles: the orders differ again as soon as one of them draws once more",
        variants={
            "collated": {
                "summary": "{function}() of {stream} gives {changed} of {rows} rows of {inputs} the {labels} of "
                "another item",
                "measured": "all rows of {inputs} are those of the items, {cut:?each row of {labels} agrees with an "
                "item wherever it has a label|all values of {labels} are those of the items}, and {changed} of {rows} "
                "pairs are not",
                "shown_by": "the items of one batch of {stream}, before {function}() and after it",
                "repair": "{sorting:?sort whole items, before their fields are separated: rows = sorted(rows, key=..., "
                "reverse=True)|use one order for whole items, before their fields are separated: items = [items[i] for "
                "i in order]}",
                "do_not": "{sorting:?sort the labels by a key of their own|draw an order for each field: they differ "
                "in every batch}",
            },
            "cut": {
                "summary": "{moved:?{inputs} and {labels} are cut by two draws|{inputs} is cut by a draw, and {labels} "
                "is not}: a prediction for one place is compared with {labels} of another",
                "measured": "{changed} of {rows} places of {labels} meet places of {inputs} that differ from row to "
                "row",
                "shown_by": "both were given the same content, in which each entry names its place; what reached the "
                "model and what reached the loss were compared",
                "repair": "cut both in one call: both = transform(torch.cat([x, y])); or draw the place once, and cut "
                "both there",
                "do_not": "fix a seed for both calls: every row is then cut at the same place",
            },
            "mixed": {
                "summary": "{function}() of {stream} mixes the inputs of two items and {shares:?exchanges the shares "
                "of their labels|the labels of other items}: {changed} of {rows} rows of {labels} contradict {inputs}",
                "measured": "each row of {inputs} is a mixture of two items; {changed} rows of {labels} "
                "{shares:?give the first of them the share of the second|have the class of a third}",
                "shown_by": "the items of one batch of {stream}, before {function}() and after it",
                "repair": "{shares:?lam * y + (1 - lam) * y[order], as in lam * x + (1 - lam) * x[order]|draw the "
                "order once: order = torch.randperm(len(x)), and x[order], y[order] with it}",
                "do_not": "fix a seed before each of two orders: they differ again as soon as one draws once more",
            },
        },
        judged="a data set that stores inputs and labels row by row, in a DataLoader that is given as batches=",
        explains=("loss_contract:labels_misplaced",),
        source="https://github.com/Borda/kaggle_image-classify/pull/12",
    ),
    "split_overwrites": Cause(
        change=("seen",),
        proof="an attribute of one data set is assigned through two of its splits, and no item is fetched in between",
        summary="{splits} splits share one data set: its {name} is assigned twice, and all of them get the second",
        measured="what was assigned first, at {first}, was replaced before an item was fetched",
        shown_by="random_split and Subset hold the data set itself, and no copy of it",
        repair="give each split a data set of its own: Subset(ImageSet(files, train_transform), indices); or apply the "
        "transform in a class around the split",
        source="https://github.com/growingnet/gromo/pull/58",
    ),
    "shuffled_alike": Cause(
        proof="an order is drawn for each epoch, and all epochs come in the same one",
        summary="{stream} is shuffled, and comes in the same order in all of {epochs} epochs",
        measured=_ONE_ORDER,
        shown_by=_SAME_DRAW,
        repair=f"{_ONE_GENERATOR}. Look whether an evaluation or a preview reseeds torch",
        do_not="reseed at each epoch's start to have runs repeatable: one seed before the first epoch does that",
        variants={
            "in fit": {
                "summary": "the loop trains {epochs} epochs in one order, although the loader shuffles",
                "shown_by": f"{_SAME_DRAW}; {_STEPS}",
                "repair": f"{_ONE_GENERATOR}; where manual_seed is called at the start of each epoch, call it once "
                "before the first",
            },
            "cycle": {
                "summary": "itertools.cycle() repeats the first epoch: it is shuffled, and all further epochs come in "
                "its order",
                **_CYCLE,
            },
            "cycle in fit": {
                "summary": "the loop trains on itertools.cycle() of a loader: the first epoch's shuffled batches again "
                "and again, in one order",
                **_CYCLE,
            },
        },
        source="https://github.com/AUTOMATIC1111/stable-diffusion-webui/pull/3803",
    ),
    "set_epoch_missing": Cause(
        proof="all epochs come in one order, and set_epoch() with another number gives another",
        summary="{stream} comes in the same order in every epoch unless {path}.set_epoch() is called",
        measured="{rows:row} in one order in {epochs} epochs{in_fit:?, and in {in_fit} epochs of fit over it|}",
        shown_by="set_epoch() with another number gives another order{in_fit:?; optimizer steps were made in all of "
        "these epochs|}",
        repair="loader.sampler.set_epoch(epoch) at the start of each epoch",
        variants={
            "in fit": {
                "summary": "the loop trains {epochs} epochs in one order: {sampler} draws it by its epoch, which "
                "nothing sets",
                "measured": _ONE_ORDER,
                "shown_by": f"{_SAME_DRAW}; {_STEPS}",
            },
        },
        judged="call set_epoch in fit, or let fit iterate its epochs over the loader: then this is judged",
        source="https://github.com/lucidrains/DALLE-pytorch/pull/230",
    ),
    "workers_duplicate": Cause(
        proof="each row comes as many times as often with workers as without as there are workers",
        summary="{workers} workers give each row {workers} times an epoch: each of them iterates the whole {dataset}",
        measured="{rows:row} without workers, {all_rows} with {workers}",
        shown_by="each row comes {workers} times as often with num_workers={workers} as with none",
        repair="info = torch.utils.data.get_worker_info(), and itertools.islice(rows, info.id, None, "
        "info.num_workers) in __iter__ where info is not None",
        source="https://github.com/espnet/espnet/pull/2081",
    ),
    "workers_share_randomness": Cause(
        proof="two fetches of one item differ within a worker, and those of both workers (as advice: those of the next "
        "epoch) are the same",
        summary="all workers draw the same random numbers: {seeder} gives them the same seed",
        measured="two workers fetched one item twice each: the two fetches of a worker differ, and both workers give "
        "the same two",
        shown_by="the first fetches of both workers agree bit for bit, so do their second fetches, and first and "
        "second differ",
        repair="remove the seeding in worker_init_fn (torch seeds python, torch and numpy in each worker); or call "
        "np.random.seed(torch.initial_seed() % 2**32) there; create generators of the data set in the worker",
        change=("loader",),
        variants={
            "generator": {
                "summary": "all workers draw the same random numbers, by {generator}, which every worker copies"
            },
            "epochs": {
                "summary": "workers draw the same random numbers in every epoch",
                "measured": "one item fetched twice by each of two workers, in two epochs: the second epoch equals the "
                "first",
                "shown_by": "the fetches differ within an epoch, and agree bit for bit with those of the next",
            },
        },
        source="https://github.com/TorchDSP/torchsig/pull/361",
    ),
    "changed_in_place": _seen(
        proof="putting back what the data set stores, and that alone, gives the first item again",
        summary="fetching an item of {dataset} changes the stored data: item {index} is different at each fetch",
        measured="three fetches of item {index} under one random state differ, and {stored} changed",
        shown_by="with {stored} put back the item is what it was at first",
        repair="work on a copy: x = self.x[index].clone() (array.copy()), or x = x - mean in place of x -= mean",
        variants={
            "drawn": {
                "measured": "item {index} differs after further fetches of it, which write random values into {stored}",
                "shown_by": "with {stored} put back the item is what it was at first; what each fetch writes adds to "
                "what those before it wrote",
            }
        },
        source="https://github.com/facebookresearch/pycls/pull/21",
    ),
    "slots_share_tensor": Cause(
        proof="all records hold one object, and what it holds was written again for each of them",
        summary="all {records} records of {path} hold one and the same {written:?tensor|array} of shape {shape}, with "
        "the values of the last",
        measured="{names} is one object in {records} of {records} records{written:?, written in place {written} "
        "times|}",
        shown_by="the records' objects are identical, and what is written into it changes all of them",
        repair="store a copy when a record is made: tensor.clone(), or array.copy()",
        variants={
            "list": {
                "summary": "all {records} records of {path} hold one and the same {kind}, with the values of the last",
                "measured": "{names} is one object in {records} of {records} records, and held other values earlier in "
                "the run",
                "repair": "store a copy when a record is made: list(steps); or begin with a new list in place of "
                "clear()",
            }
        },
        source="https://github.com/rail-berkeley/rlkit/issues/98",
    ),
    "last_batch_raises": _seen(
        proof="fit raises on a full batch and the last one in turn, and not on full ones",
        summary="the last batch of an epoch, of {rows:row}, makes fit raise {raised}",
        measured="{stream} ends an epoch with {rows:row}, after batches of {size}",
        shown_by="a fresh loop raises when a full batch and this one alternate, and not on full batches alone",
        repair="drop_last=True in the training loader; or have the loop skip or join batches that are too small",
        variants={
            "batch sampler": {
                "repair": "have {sampler}, which makes the batches, leave out or join the last one (drop_last cannot "
                "be given with a batch_sampler); or have the loop skip batches that are too small"
            }
        },
        source="https://github.com/azavea/raster-vision/pull/1029",
        change=("loader", "seen"),
    ),
    "batch_repeats": Cause(
        proof="every batch comes equally often in a row, and more than once",
        summary="{names} gives each batch {times} times in a row",
        measured="runs of {times} equal batches, and nothing else",
        repair="advance the start of each batch: start = step * batch_size % len(data); a worker process counts for "
        "itself, so share out the indices by get_worker_info()",
        source="https://github.com/dscripka/openWakeWord/pull/202",
    ),
    "one_batch_only": Cause(
        proof="all batches hold the same rows",
        summary="{names} gives the same rows in every batch",
        measured="{batches} of {batches} batches hold the same rows",
        repair="draw the rows of a batch when it is requested, or read the index that __getitem__ is given",
        variants={
            "begun again": {
                "summary": "fit trains on the first of {batches} batches only: it begins {names} again for each step",
                "measured": "one batch taken from each new iterator of a loader that gives its batches in one order",
                "shown_by": "the iterators made in the watched run, and two epochs of the loader in which nothing is "
                "drawn",
                "repair": "for batch in loader: ...; or batches = iter(loader) once, and next(batches) for each step",
            }
        },
        source="https://github.com/wandb/examples/issues/444",
    ),
    "one_label_a_batch": Cause(
        proof="each label comes in one block of rows longer than a batch, and no order is drawn",
        summary="{names} is sorted: {alone} of {batches} batches hold one label only",
        measured="{labels} labels, each in one block of rows, and no order is drawn",
        repair="set shuffle=True in the DataLoader; for an iterable data set use a shuffle buffer",
        source="https://github.com/Deci-AI/super-gradients/issues/416",
        change=("loader", "seen"),
    ),
    "one_noise_for_all": Cause(
        proof="the draws of two items, each fetched twice, are equal",
        summary="every item of {dataset} draws the same random numbers, each time it is fetched",
        measured="{draws:draw} an item, the first by {names}: equal in two items, each fetched twice",
        repair="remove manual_seed from __getitem__; use one generator that is created once",
        source="https://github.com/ad12/meddlr/pull/21",
    ),
    "rows_never_drawn": Cause(
        change=("index of data",),
        proof="all rows drawn are among a third of what is stored, in five times as many draws as there are rows",
        summary="{missing} of {rows} rows of {names} are never drawn",
        measured="{draws} rows drawn, all of them among the same {drawn}",
        repair="draw from the whole range: torch.randint(len(data), (batch_size,))",
        variants={
            "the first one": {
                "summary": "{function}() of {stream} gives {lost} of the first item alone: a batch has nothing of the "
                "{others} others there, and {kept} of all {rows}",
                "measured": "{lost} has 1 row, that of the first item, and {kept} has {rows}",
                "shown_by": "the items of two batches of {stream}, before {function}() and after it",
                "repair": "stack those of all items, padded to one width: torch.stack([item[...] for item in items])",
            },
            "the last ones": {
                "summary": "the last {missing} of {rows} rows of {names} are in no batch of any epoch",
                "measured": "{epochs} epochs hold the same {drawn} of {rows} rows, {shuffled:?in other orders|in one "
                "order}; a batch has {size}",
                "repair": "{shuffled:?shuffle all rows and cut the order to whole batches afterwards|drop_last=False, "
                "or shuffle=True, which drops other rows in each epoch}",
            },
        },
        source="https://github.com/BlackHC/batchbald_redux/pull/6",
    ),
    "weights_per_class": Cause(
        proof="the sampler has as many weights as there are labels, draws no other rows than as many first ones, and "
        "does with a weight for each row",
        summary="{names} has {weights} weights for {rows} rows: it draws only the first {weights} rows",
        measured="{drawn} different rows in an epoch of {samples} rows",
        shown_by="{labels} holds {weights} different labels for {rows} rows, and with a weight for each of these rows "
        "the sampler draws {others} different ones",
        repair="WeightedRandomSampler(class_weights[labels], num_samples=len(labels)): one weight for each row",
        source="https://github.com/deep-voice/soundbay/pull/49",
        change=("sampler", "loader"),
    ),
    "leaves_alike": Cause(
        change=("index of data", "collated"),
        proof="two of three tensors of one shape are equal in every row, and the third is not",
        summary="{a} and {b} are equal in every row, and {third} is not",
        measured="{rows} of {rows} rows",
        repair="draw the positive independently of the anchor, as another row of its class or another view of it",
    ),
}

_made = finding_maker(CAUSES)


def found(cause: str, at: Any, culprits: Sequence[str], variant: str = "", **facts: Any) -> Finding:
    """A finding whose culprits are calls, where nothing else is said: other names would be looked up in the record of a
    run, which a loop without a batch cannot make."""
    facts.setdefault("kinds", ("call",) * len(culprits))
    return _made(cause, at, culprits, variant, **facts)
