"""One mistake a test; each fails by the cause in README.md."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from char_gpt.data import crop_loader, load_corpus
from char_gpt.model import GPT, GPTConfig
from char_gpt.train import TrainConfig, configure_optimizer, configure_scheduler, train
from digits_cnn.data import loaders
from digits_cnn.model import SmallCNN
from digits_cnn.trainer import Trainer, TrainerConfig
from planted import (
    adapters_frozen,
    average_left_in,
    classes_reshaped,
    decay_for_an_epoch,
    features_detached,
    generalised_mean_in_float16,
    head_swapped_after_optimizer,
    loss_not_divided,
    lr_in_another_unit,
    mask_one_position_late,
    noise_from_the_system,
    schedule_not_saved,
    softmax_in_the_head,
    zero_grad_forgotten,
)

from pytest_trainloop import TrainLoop


def tiny_gpt(model_class: type[GPT] = GPT) -> GPT:
    return model_class(GPTConfig(len(load_corpus().vocabulary), context=32, layers=2, heads=2, width=32))


def crops():
    return crop_loader(load_corpus().train, context=32, batch_size=8, batches=50)


def gpt_loop(
    model_class: type[GPT] = GPT,
    *,
    prepare: Callable[[GPT], Any] = lambda model: model,
    configure: Callable[..., Any] = configure_optimizer,
    fit: Callable[..., Any] = train,
    accumulate: int = 1,
    checkpoints: ModuleType | None = None,
) -> TrainLoop:
    model = prepare(tiny_gpt(model_class))
    config = TrainConfig(warmup=5)
    optimizer = configure(model, config)
    scheduler = configure_scheduler(optimizer, config)
    batches = list(crops())
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=batches[0],
        batches=batches,
        fit=lambda given: fit(model, optimizer, given, accumulate=accumulate, scheduler=scheduler),
        save=checkpoints and (lambda path: checkpoints.save_checkpoint(path, model, optimizer, scheduler)),
        load=checkpoints and (lambda path: checkpoints.load_checkpoint(path, model, optimizer, scheduler)),
    )


def digits_loop(
    trainer_class: type[Trainer] = Trainer, *, model_class: type[SmallCNN] = SmallCNN, precision: str = "fp32"
) -> TrainLoop:
    train, test = loaders(batch_size=16)
    trainer = trainer_class(model_class(channels=8), TrainerConfig(precision=precision))
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        scheduler=trainer.scheduler,
        scaler=trainer.scaler,
        batch=next(iter(train)),
        batches=train,
        fit=trainer.fit,
        evaluate=lambda: trainer.evaluate(test),
    )


@pytest.mark.trainloop
def test_zero_grad_forgotten():
    """The loop never clears the gradients of earlier steps."""
    return digits_loop(zero_grad_forgotten.Trainer)


@pytest.mark.trainloop
def test_head_swapped_after_optimizer():
    """The head is replaced after the optimizer was built."""
    return digits_loop(head_swapped_after_optimizer.Trainer)


@pytest.mark.trainloop
def test_features_detached():
    """Before every block the residual stream is detached for logging."""
    return gpt_loop(features_detached.GPT)


@pytest.mark.trainloop
def test_adapters_frozen():
    """Freezing comes after the adapters were attached and freezes them too."""
    return gpt_loop(prepare=adapters_frozen.prepare_finetuning)


@pytest.mark.trainloop
def test_loss_not_divided(accumulate=1):
    """The losses of a window are added up."""
    return gpt_loop(fit=loss_not_divided.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_noise_from_the_system():
    """No seed reaches the noise."""
    return digits_loop(noise_from_the_system.Trainer)


@pytest.mark.trainloop
def test_lr_in_another_unit():
    """The learning rate is a million times too low."""
    return gpt_loop(configure=lr_in_another_unit.configure_optimizer)


@pytest.mark.trainloop
def test_decay_for_an_epoch():
    """The schedule counts epochs and is stepped per batch."""
    return digits_loop(decay_for_an_epoch.Trainer)


@pytest.mark.trainloop
def test_softmax_in_the_head():
    """The model gives probabilities where the loss takes scores."""
    return digits_loop(model_class=softmax_in_the_head.SmallCNN)


@pytest.mark.trainloop
def test_classes_reshaped():
    """The class axis runs over several positions."""
    return gpt_loop(fit=classes_reshaped.train)


@pytest.mark.trainloop
def test_mask_one_position_late():
    """Each position sees the token that it is to tell."""
    return gpt_loop(mask_one_position_late.GPT)


@pytest.mark.trainloop
def test_generalised_mean_in_float16():
    """The features are pooled by sixth powers, in half precision."""
    return digits_loop(model_class=generalised_mean_in_float16.SmallCNN, precision="fp16")


@pytest.mark.trainloop
def test_average_left_in():
    """Validation leaves the average of the weights in the model."""
    return digits_loop(average_left_in.Trainer)


@pytest.mark.trainloop
def test_schedule_not_saved():
    """A restart warms up again."""
    return gpt_loop(checkpoints=schedule_not_saved)
