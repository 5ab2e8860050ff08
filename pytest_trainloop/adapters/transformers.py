"""A ``transformers.Trainer``, or a subclass of one, as a ``TrainLoop``."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_trainloop.adapters.hf_plan import batches_a_pass, plan_of, planned_schedules
from pytest_trainloop.adapters.swap import swapped
from pytest_trainloop.adapters.training_data import TrainingData
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.fields import a
from pytest_trainloop.declare.loop import TrainLoop
from pytest_trainloop.runs.accelerate_state import gradient_state_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


def from_trainer(trainer: Any, *, batch: Any = None, **fields: Any) -> TrainLoop:
    """A freshly built ``Trainer`` as a loop: its own ``train()`` runs once over the batches that ``fit`` gets.

    >>> @pytest.mark.trainloop
    ... def test_finetuning(tmp_path, accumulate=1):
    ...     args = TrainingArguments(tmp_path, gradient_accumulation_steps=accumulate)
    ...     return from_trainer(MyTrainer(model=my_model(), args=args, train_dataset=my_data()))

    During the runs nothing is logged, reported or evaluated; the schedule spans these batches; the project's own
    callbacks run. ``steps`` and ``epochs`` are those that ``train()`` would make of the trainer's own data and
    settings; its schedule is judged by them. ``save`` is the Trainer's own way to write a checkpoint, ``load`` its own
    way to resume from it, but for the data, which stay those that ``fit`` gets. A Trainer that writes no checkpoints
    one can resume from (``save_strategy="no"``, ``save_only_model=True``) is given neither.

    Parameters
    ----------
    trainer
        a ``transformers.Trainer`` or an instance of a subclass
    batch
        an example batch; default: the first of the trainer's own train dataloader
    fields
        further fields of ``TrainLoop``, such as ``padding``

    Raises
    ------
    UsageError
        transformers is not installed, ``trainer`` is no Trainer, or there is no batch
    """
    _refuse_what_is_no_trainer(trainer)

    def fit(batches: Sequence[Any]) -> Any:
        return _train(trainer, batches)

    def evaluate() -> Any:
        return _evaluate(trainer)

    evaluate.within_fit = True  # type: ignore[attr-defined]
    fit.training_data = lambda: _training_data(trainer)  # type: ignore[attr-defined]
    fit.planned_schedules = lambda: planned_schedules(trainer, fields.get("steps"))  # type: ignore[attr-defined]
    plan = plan_of(trainer, batches_a_pass(trainer) if _has_training_data(trainer) else None)
    offered = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "batch": _first_batch(trainer) if batch is None else batch,
        "fit": fit,
        "steps": plan.steps,
        "epochs": plan.passes,
        "evaluate": evaluate if trainer.eval_dataset is not None else None,
        **_resuming(trainer),
    }
    return TrainLoop(**{**offered, **fields})


def _refuse_what_is_no_trainer(trainer: Any) -> None:
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise UsageError(f"from_trainer needs the package transformers, which cannot be imported ({error})") from error
    if not isinstance(trainer, transformers.Trainer):
        raise UsageError(
            f"from_trainer got {a(trainer)}; a transformers.Trainer is needed, built in the function that calls it"
        )


def _first_batch(trainer: Any) -> Any:
    if not _has_training_data(trainer):
        raise UsageError(
            f"from_trainer got {a(trainer)} without train_dataset; give it one, or from_trainer(..., batch=...)"
        )
    # A dataloader left half-way would count as the active one for every later loop.
    with gradient_state_kept():
        for batch in trainer.get_train_dataloader():
            return batch
    raise UsageError(
        f"from_trainer got {a(trainer)} whose train dataloader is empty; give from_trainer(..., batch=...)"
    )


def _training_data(trainer: Any) -> Iterator[TrainingData]:
    """The loader that Accelerate wraps; the wrapper and the Trainer set its epoch."""
    if not _has_training_data(trainer):
        return
    with gradient_state_kept():
        wrapper = trainer.get_train_dataloader()
    shards = getattr(wrapper, "batch_sampler", None)

    def begin_epoch(number: int) -> None:
        for owner in (wrapper, getattr(shards, "batch_sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(number)

    yield TrainingData("trainer.get_train_dataloader()", getattr(wrapper, "base_dataloader", wrapper), begin_epoch)


def _has_training_data(trainer: Any) -> bool:
    inherited = import_module("transformers").Trainer.get_train_dataloader
    return trainer.train_dataset is not None or type(trainer).get_train_dataloader is not inherited


def _train(trainer: Any, batches: Sequence[Any]) -> Any:
    args = copy.copy(trainer.args)
    args.num_train_epochs, args.max_steps = 1, -1
    args.eval_on_start = False
    # Without model_init: train() would build a second model, and the one given would never train.
    with (
        gradient_state_kept(),
        _silenced(trainer),
        swapped(trainer, args=args, get_train_dataloader=lambda: batches, model_init=None),
    ):
        return trainer.train()


def _resuming(trainer: Any) -> dict[str, Callable[[Path], None]]:
    """``save`` and ``load`` of a Trainer that writes checkpoints to resume from."""
    if trainer.args.save_only_model or str(getattr(trainer.args.save_strategy, "value", "no")) == "no":
        return {}
    return {"save": lambda folder: _save(trainer, folder), "load": lambda folder: _load(trainer, folder)}


def _save(trainer: Any, folder: Path) -> None:
    """As in the middle of ``train()``: the checkpoint, and what callbacks write next to it."""
    args = copy.copy(trainer.args)
    args.output_dir, args.push_to_hub = str(folder), False
    with gradient_state_kept(), _silenced(trainer), _untold(), swapped(trainer, args=args):
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.control = trainer.callback_handler.on_save(args, trainer.state, trainer.control)


def _load(trainer: Any, folder: Path) -> None:
    """``train(resume_from_checkpoint=...)`` with no epoch left to train; the random states are put back after it."""
    checkpoint = import_module("transformers.trainer_utils").get_last_checkpoint(str(folder))
    kept = import_module("transformers").TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
    args = copy.copy(trainer.args)
    args.num_train_epochs, args.max_steps = 1, -1
    args.eval_on_start = args.load_best_model_at_end = False
    epoch = _Nothing(kept.global_step * args.gradient_accumulation_steps)
    with (
        gradient_state_kept(),
        _silenced(trainer),
        _untold(),
        swapped(trainer, args=args, get_train_dataloader=lambda: epoch, model_init=None),
    ):
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer._load_rng_state(checkpoint)


@contextmanager
def _untold() -> Iterator[None]:
    """No progress bar of files, and no word of tied weights that a checkpoint leaves out."""
    logging = import_module("transformers.utils.logging")
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class _Nothing:
    """The batches of an epoch that is over."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _evaluate(trainer: Any) -> Any:
    with gradient_state_kept(), _silenced(trainer):
        return trainer.evaluate()


@contextmanager
def _silenced(trainer: Any) -> Iterator[None]:
    """No progress bars, no reporters, and a last callback that takes back every request to save, evaluate or log."""
    transformers = import_module("transformers")
    reporters = import_module("transformers.integrations.integration_utils").INTEGRATION_TO_CALLBACK.values()
    progress = import_module("transformers.trainer").DEFAULT_PROGRESS_CALLBACK
    loud = (transformers.PrinterCallback, transformers.ProgressCallback, progress, *reporters)

    def veto(_callback: Any, _args: Any, _state: Any, control: Any, **_more: Any) -> None:
        control.should_save = control.should_evaluate = control.should_log = False

    veto_last = type("VetoLast", (transformers.TrainerCallback,), {"on_step_end": veto, "on_epoch_end": veto})()
    handler = trainer.callback_handler
    quiet = [callback for callback in handler.callbacks if not isinstance(callback, loud)]
    with swapped(handler, callbacks=[*quiet, veto_last]):
        yield
