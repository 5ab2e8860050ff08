"""A LightningModule, with or without its Trainer, as a ``TrainLoop``; of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pytest_trainloop.adapters.lightning_plan import configured_schedules, declared_length
from pytest_trainloop.adapters.swap import swapped
from pytest_trainloop.adapters.training_data import TrainingData
from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.declare.fields import a
from pytest_trainloop.declare.loop import TrainLoop
from pytest_trainloop.runs.projection import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from pytest_trainloop.runs.projection import Planned

_MANY = 1_000_000
"""Epochs; more than any checkpoint was written after."""

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def from_lightning(
    module: Any, trainer: Any = None, *, datamodule: Any = None, batch: Any = None, batches: Any = None, **fields: Any
) -> TrainLoop:
    """A freshly built LightningModule as a loop: ``trainer.fit`` runs once over the batches that ``fit`` gets.

    >>> @pytest.mark.trainloop
    ... def test_classifier(accumulate=1):
    ...     trainer = Trainer(accelerator="cpu", accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    ...     return from_lightning(MyModule(), trainer, batch=example_batch())

    During the runs nothing is logged or drawn. Validation inside ``fit`` takes one batch; ``evaluate`` is
    ``trainer.validate`` over two. ``save`` is ``trainer.save_checkpoint``, ``load`` is what
    ``trainer.fit(ckpt_path=...)`` restores before it trains. A second ``fit`` goes on with the optimizers' states, the
    epoch and the step count of the first; the schedule starts again with the batches that it gets. ``steps`` and
    ``epochs`` are the ``max_steps`` and ``max_epochs`` of the trainer, where it is given some. A trainer with
    ``enable_checkpointing=False`` is given neither ``save`` nor ``load``.

    Parameters
    ----------
    module
        a ``LightningModule`` of ``lightning`` or ``pytorch_lightning``
    trainer
        its ``Trainer``; default: a quiet one on the device of the module
    datamodule
        a ``LightningDataModule``, for validation data and the default of ``batch``
    batch, batches
        as in ``TrainLoop``; default: the first batch of the datamodule's or the module's ``train_dataloader()``
    fields
        further fields of ``TrainLoop``, such as ``padding``

    Raises
    ------
    UsageError
        Lightning is not installed, ``module`` is no LightningModule of the trainer's package, or there is no batch
    """
    package = _package_of(module)
    if trainer is not None and not isinstance(trainer, package.Trainer):
        raise UsageError(
            f"from_lightning got {a(trainer)} as trainer; a {package.__name__}.Trainer is needed,"
            " as the module is of that package"
        )
    if datamodule is not None and not isinstance(datamodule, package.LightningDataModule):
        raise UsageError(
            f"from_lightning got {a(datamodule)} as datamodule; a {package.__name__}.LightningDataModule is needed"
        )
    if batch is None and batches is None:
        batch = _first_batch(package, module, datamodule)
    writes, own = trainer is None or trainer.checkpoint_callbacks, trainer is None
    if trainer is None:
        with _quiet_warnings(package):
            trainer = package.Trainer(
                accelerator="cpu" if module.device.type == "cpu" else "auto",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )

    # The functions hold module, trainer and the rest themselves: what they can touch is found by these names.
    strategy = trainer.strategy

    def fit(given: Sequence[Any], *, validating: bool = True) -> None:
        _fit(package, module, trainer, strategy, datamodule, given, validating=validating)

    def evaluate() -> Any:
        return _validate(package, module, trainer, datamodule)

    evaluate.within_fit = True  # type: ignore[attr-defined]
    fit.without_evaluation = partial(fit, validating=False)  # type: ignore[attr-defined]
    fit.training_data = lambda: _training_data(package, module, datamodule)  # type: ignore[attr-defined]
    plan = Counts(fields.get("steps"), None, fields.get("epochs"))
    if not own:
        plan = declared_length(trainer, plan)
        fit.planned_schedules = lambda: _planned(package, module, trainer, datamodule, plan)  # type: ignore[attr-defined]
    offered = {
        "model": module,
        "batch": batch,
        "batches": batches,
        "fit": fit,
        "steps": plan.steps,
        "epochs": plan.passes,
    }
    if _validates(package, module, trainer, datamodule):
        offered["evaluate"] = evaluate
    if writes:
        offered["save"] = lambda path: _save(package, trainer, path)
        offered["load"] = lambda path: _load(package, module, trainer, datamodule, path)
        if "load" not in fields:
            offered["renews"] = ("rng",)  # Lightning's own checkpoints hold no random states
    return TrainLoop(**{**offered, **fields})


class _Loader:
    """Batches as one dataloader; Lightning takes a list for a list of dataloaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _package_of(module: Any) -> ModuleType:
    loaded = [package for package in map(sys.modules.get, _PACKAGES) if package]
    for package in loaded:
        if isinstance(module, package.LightningModule):
            return package
    if not any(find_spec(name.partition(".")[0]) for name in _PACKAGES):
        raise UsageError("from_lightning needs the package lightning or pytorch_lightning; neither is installed")
    raise UsageError(
        f"from_lightning got {a(module)}; a LightningModule is needed, built in the function that calls it"
    )


def _first_batch(package: ModuleType, module: Any, datamodule: Any) -> Any:
    loader = _own_loader(package, module, datamodule)
    if loader is not None:
        for batch, _, _ in package.utilities.CombinedLoader(loader, "max_size_cycle"):
            return batch
    owner = module if datamodule is None else datamodule
    raise UsageError(
        f"from_lightning got no batch, and {type(owner).__name__}.train_dataloader() gives none;"
        " give from_lightning(..., batch=...)"
    )


def _own_loader(package: ModuleType, module: Any, datamodule: Any) -> Any:
    """What ``train_dataloader()`` gives: a loader, or a nest of several; None where there is none."""
    if datamodule is not None:
        datamodule.prepare_data()
        datamodule.setup("fit")
        return datamodule.train_dataloader()
    return module.train_dataloader() if _defines(module, "train_dataloader", package.LightningModule) else None


def _training_data(package: ModuleType, module: Any, datamodule: Any) -> Iterator[TrainingData]:
    loader = _own_loader(package, module, datamodule)
    if loader is None:
        return
    name = f"{'model' if datamodule is None else 'datamodule'}.train_dataloader()"
    for one in package.utilities.CombinedLoader(loader, "max_size_cycle").flattened:
        yield TrainingData(name, one, partial(_set_epoch, one))


def _set_epoch(loader: Any, number: int) -> None:
    """As Lightning's fit loop does before an epoch."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for owner in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)


def _validates(package: ModuleType, module: Any, trainer: Any, datamodule: Any) -> bool:
    """Whether there are validation data, and something to do with them."""
    if not trainer.limit_val_batches or not _defines(module, "validation_step", package.LightningModule):
        return False
    return _defines(module, "val_dataloader", package.LightningModule) or _defines(
        datamodule, "val_dataloader", package.LightningDataModule
    )


def _defines(owner: Any, name: str, base: Any) -> bool:
    """Whether an object has a method of its own, from its class or set on itself (``from_datasets``)."""
    if owner is None:
        return False
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _fit(
    package: ModuleType,
    module: Any,
    trainer: Any,
    strategy: Any,
    datamodule: Any,
    batches: Sequence[Any],
    *,
    validating: bool,
) -> None:
    def configured() -> None:
        if not validating and not _waits_for_metrics(module, trainer, strategy):
            trainer.limit_val_batches = 0

    with _quiet_warnings(package), _silenced(package, trainer), _moments_kept(trainer, strategy, module, configured):
        _run(module, trainer, datamodule, _Loader(batches))


def _run(module: Any, trainer: Any, datamodule: Any, loader: _Loader, **options: Any) -> None:
    if datamodule is None:
        trainer.fit(module, train_dataloaders=loader, **options)
        return
    with swapped(datamodule, train_dataloader=lambda: loader):
        trainer.fit(module, datamodule=datamodule, **options)


def _validate(package: ModuleType, module: Any, trainer: Any, datamodule: Any) -> Any:
    with _quiet_warnings(package):
        if trainer.training:
            return _validate_within_fit(trainer)
        with _silenced(package, trainer, validation_batches=2):
            return trainer.validate(module, datamodule=datamodule, verbose=False)


def _save(package: ModuleType, trainer: Any, path: Path) -> None:
    with _quiet_warnings(package), _silenced(package, trainer):  # the callbacks of a run: no Checkpoint
        type(trainer).save_checkpoint(trainer, path)


def _planned(package: ModuleType, module: Any, trainer: Any, datamodule: Any, plan: Counts) -> Sequence[Planned]:
    """The schedules that Lightning configures for the trainer's own data and length; nothing is trained."""
    if trainer.fast_dev_run or not module.automatic_optimization or _own_loader(package, module, datamodule) is None:
        raise CannotDecide("the trainer has no data and length of its own to plan by")
    found: list[Planned] = []
    length = {name: getattr(trainer, name) for name in ("limit_train_batches", "overfit_batches")}
    configured = {"run": lambda: found.extend(configured_schedules(trainer, plan))}
    epochs = trainer.fit_loop.max_epochs
    with (
        _quiet_warnings(package),
        _silenced(package, trainer),
        swapped(trainer, **length),
        swapped(trainer.fit_loop, max_epochs=epochs, **configured),
    ):
        trainer.fit(module, datamodule=datamodule)
    return found


def _load(package: ModuleType, module: Any, trainer: Any, datamodule: Any, path: Path) -> None:
    """Have Lightning restore everything that it restores, and train nothing."""
    with (
        _quiet_warnings(package),
        _silenced(package, trainer),
        swapped(trainer.fit_loop, run=lambda: None, max_epochs=_MANY),
    ):
        _run(module, trainer, datamodule, _Loader([None]), ckpt_path=path, weights_only=False)


@contextmanager
def _moments_kept(trainer: Any, strategy: Any, module: Any, then: Callable[[], None]) -> Iterator[None]:
    """Let the optimizers that ``fit`` configures go on with the states of those before, and do what comes ``then``; the
    values of their groups, which a new schedule begins from, are new."""
    before = [optimizer.state_dict() for optimizer in trainer.optimizers] if trainer.lightning_module is module else []
    configure = strategy.setup_optimizers

    def setup_optimizers(*args: Any, **options: Any) -> None:
        configure(*args, **options)
        for optimizer, state in zip(strategy.optimizers, before, strict=False):
            optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
        then()

    with swapped(strategy, setup_optimizers=setup_optimizers):
        yield


def _waits_for_metrics(module: Any, trainer: Any, strategy: Any) -> bool:
    """Whether training depends on the results of validation: a schedule or a callback monitors one, or code of the
    project's reads them."""
    schedules = strategy.lr_scheduler_configs
    if any(one.monitor or one.reduce_on_plateau for one in schedules) or any(
        getattr(callback, "monitor", None) for callback in trainer.callbacks
    ):
        return True
    own = (kind for thing in (module, *trainer.callbacks) for kind in type(thing).__mro__)
    functions = (member for kind in own for member in vars(kind).values() if isinstance(member, FunctionType))
    return any("callback_metrics" in function.__code__.co_names for function in functions)


def _validate_within_fit(trainer: Any) -> Any:
    """As Lightning validates in the middle of an epoch."""
    epoch, results = trainer.fit_loop.epoch_loop, trainer._logger_connector
    first = results._first_loop_iter
    trainer.validating = True
    try:
        with swapped(trainer, limit_val_batches=trainer.limit_val_batches or 1):
            return epoch.val_loop.run()
    finally:
        trainer.training = True
        results._first_loop_iter = first


@contextmanager
def _silenced(package: ModuleType, trainer: Any, validation_batches: int = 1) -> Iterator[None]:
    """One pass over all the batches given; no files, no output; limits for the user's whole data do not apply."""
    callbacks = package.callbacks
    loud = (callbacks.Checkpoint, callbacks.ProgressBar, callbacks.ModelSummary)
    # A logger that swallows everything rather than none: modules call self.logger.experiment, some callbacks need one.
    logger = import_module(f"{package.__name__}.loggers.logger").DummyLogger()
    with (
        swapped(trainer.fit_loop, max_epochs=trainer.current_epoch + 1),
        swapped(
            trainer,
            loggers=[logger],
            callbacks=[callback for callback in trainer.callbacks if not isinstance(callback, loud)],
            save_checkpoint=lambda *_args, **_options: None,
            log_every_n_steps=1,
            limit_train_batches=1.0,
            overfit_batches=0.0,
            num_sanity_val_steps=0,
            limit_val_batches=validation_batches if trainer.limit_val_batches else 0,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
        ),
    ):
        yield


@contextmanager
def _quiet_warnings(package: ModuleType) -> Iterator[None]:
    """Hold back what Lightning suggests for a whole training, such as more workers or a validation loader."""
    suggestion = import_module(f"{package.__name__}.utilities.warnings").PossibleUserWarning
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=suggestion)
        warnings.filterwarnings("ignore", "(?s).*LeafSpec", FutureWarning)  # of its own use of torch, in every batch
        yield
