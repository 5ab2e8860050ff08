"""A LightningModule, with or without its Trainer, as a ``TrainLoop``; of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pytest_trainloop.adapters.swap import swapped
from pytest_trainloop.errors import UsageError
from pytest_trainloop.fields import a
from pytest_trainloop.loop import TrainLoop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def from_lightning(
    module: Any, trainer: Any = None, *, batch: Any = None, batches: Any = None, **fields: Any
) -> TrainLoop:
    """A freshly built LightningModule as a loop: ``trainer.fit`` runs once over the batches that ``fit`` gets.

    >>> @pytest.mark.trainloop
    ... def test_classifier(accumulate=1):
    ...     trainer = Trainer(accelerator="cpu", accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    ...     return from_lightning(MyModule(), trainer, batch=example_batch())

    During the runs nothing is saved, logged or drawn. The module's own validation data count as one batch; a datamodule
    is not read.

    Parameters
    ----------
    module
        a ``LightningModule`` of ``lightning`` or ``pytorch_lightning``
    trainer
        its ``Trainer``; default: a quiet one on the device of the module
    batch, batches
        as in ``TrainLoop``; default: the first batch of the module's ``train_dataloader()``
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
    if batch is None and batches is None:
        batch = _first_batch(package, module)
    offered = {
        "model": module,
        "batch": batch,
        "batches": batches,
        "fit": lambda given: _fit(package, module, trainer, given),
    }
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


def _first_batch(package: ModuleType, module: Any) -> Any:
    if type(module).train_dataloader is not package.LightningModule.train_dataloader:
        for batch, _, _ in package.utilities.CombinedLoader(module.train_dataloader(), "max_size_cycle"):
            return batch
    raise UsageError(
        f"from_lightning got no batch, and {type(module).__name__}.train_dataloader() gives none;"
        " give from_lightning(..., batch=...)"
    )


def _fit(package: ModuleType, module: Any, trainer: Any, batches: Sequence[Any]) -> None:
    with _quiet_warnings(package):
        if trainer is None:
            trainer = _quiet_trainer(package, module)
        with _silenced(package, trainer):
            trainer.fit(module, train_dataloaders=_Loader(batches))


def _quiet_trainer(package: ModuleType, module: Any) -> Any:
    return package.Trainer(
        accelerator="cpu" if module.device.type == "cpu" else "auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextmanager
def _silenced(package: ModuleType, trainer: Any) -> Iterator[None]:
    """One pass over all the batches given; no files, no output; limits meant for the user's whole data do not apply."""
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
            limit_val_batches=1 if trainer.limit_val_batches else 0,
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
