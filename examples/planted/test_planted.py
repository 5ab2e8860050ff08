"""One mistake a test; each fails under ``--trainloop-strict`` by the cause in README.md."""

from collections.abc import Callable
from typing import Any

import pytest
from char_gpt.data import crop_loader, load_corpus
from char_gpt.lora import prepare_finetuning
from char_gpt.model import GPT, GPTConfig
from char_gpt.train import TrainConfig, configure_optimizer, configure_scheduler, train
from digits_cnn.data import loaders
from digits_cnn.model import SmallCNN
from digits_cnn.trainer import Trainer, TrainerConfig
from planted import (
    adapters_frozen,
    adapters_match_nothing,
    base_left_trainable,
    blocks_in_a_list,
    checkpoint_over_frozen_embeddings,
    clip_after_step,
    clip_before_unscale,
    features_detached,
    features_rounded,
    features_under_no_grad,
    head_left_out,
    head_swapped_after_optimizer,
    last_window_left_over,
    optimizer_on_a_copy,
    result_dropped,
    scheduler_before_optimizer,
    softmax_over_one_channel,
    step_before_backward,
    step_forgotten,
    stepped_twice,
    tied_weight_in_two_optimizers,
    tied_weight_listed_twice,
    update_forgotten,
    zero_grad_after_backward,
    zero_grad_forgotten,
    zero_grad_in_every_micro_batch,
    zero_grad_on_the_other_optimizer,
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
) -> TrainLoop:
    model = prepare(tiny_gpt(model_class))
    config = TrainConfig(warmup=5)
    optimizer = configure(model, config)
    scheduler = configure_scheduler(optimizer, config)
    batches = crops()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=next(iter(batches)),
        batches=batches,
        fit=lambda given: fit(model, optimizer, given, accumulate=accumulate, scheduler=scheduler),
    )


def digits_loop(
    trainer_class: type[Trainer] = Trainer, *, model_class: type[SmallCNN] = SmallCNN, precision: str = "fp32"
) -> TrainLoop:
    train, _ = loaders(batch_size=16)
    trainer = trainer_class(model_class(channels=8), TrainerConfig(precision=precision))
    head_optimizer = getattr(trainer, "head_optimizer", None)
    return TrainLoop(
        model=trainer.model,
        optimizer=[trainer.optimizer, head_optimizer] if head_optimizer else trainer.optimizer,
        scheduler=trainer.scheduler,
        scaler=trainer.scaler,
        batch=next(iter(train)),
        batches=train,
        fit=trainer.fit,
    )


@pytest.mark.trainloop
def test_zero_grad_forgotten():
    """The loop never clears the gradients of earlier steps."""
    return digits_loop(zero_grad_forgotten.Trainer)


@pytest.mark.trainloop
def test_zero_grad_on_the_other_optimizer():
    """Of two optimizers the first is zeroed twice and the head's never."""
    return digits_loop(zero_grad_on_the_other_optimizer.Trainer)


@pytest.mark.trainloop
def test_zero_grad_after_backward():
    """The gradients are cleared between backward and step."""
    return digits_loop(zero_grad_after_backward.Trainer)


@pytest.mark.trainloop
def test_zero_grad_in_every_micro_batch(accumulate=1):
    """Under accumulation the gradients are cleared in every micro-batch, so only the last one counts."""
    return gpt_loop(fit=zero_grad_in_every_micro_batch.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_step_forgotten():
    """The loop never calls the optimizer's step."""
    return digits_loop(step_forgotten.Trainer)


@pytest.mark.trainloop
def test_step_before_backward():
    """The optimizer steps before the backward of its batch."""
    return gpt_loop(fit=step_before_backward.train)


@pytest.mark.trainloop
def test_stepped_twice():
    """The optimizer steps through the scaler and once more by itself."""
    return digits_loop(stepped_twice.Trainer)


@pytest.mark.trainloop
def test_clip_after_step():
    """The gradients are clipped after the step."""
    return gpt_loop(fit=clip_after_step.train)


@pytest.mark.trainloop
def test_clip_before_unscale():
    """The gradients are clipped while they still carry the loss scale."""
    return digits_loop(clip_before_unscale.Trainer, precision="fp16")


@pytest.mark.trainloop
def test_scheduler_before_optimizer():
    """The scheduler steps before the optimizer."""
    return gpt_loop(fit=scheduler_before_optimizer.train)


@pytest.mark.trainloop
def test_update_forgotten():
    """The scaler's update is never called."""
    return digits_loop(update_forgotten.Trainer, precision="fp16")


@pytest.mark.trainloop
def test_last_window_left_over(accumulate=1):
    """The micro-batches after the last full window never reach a step."""
    return gpt_loop(fit=last_window_left_over.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_head_left_out():
    """The optimizer is built over the trunk alone."""
    return digits_loop(head_left_out.Trainer)


@pytest.mark.trainloop
def test_head_swapped_after_optimizer():
    """The head is replaced after the optimizer was built."""
    return digits_loop(head_swapped_after_optimizer.Trainer)


@pytest.mark.trainloop
def test_optimizer_on_a_copy():
    """The trained model is a deep copy made after the optimizer was built."""
    return digits_loop(optimizer_on_a_copy.Trainer)


@pytest.mark.trainloop
def test_blocks_in_a_list():
    """Two blocks are kept in a plain list, so the model does not have their parameters."""
    return gpt_loop(blocks_in_a_list.GPT)


@pytest.mark.trainloop
def test_tied_weight_listed_twice():
    """The parameters are collected part by part, so the tied embedding stands in the list twice."""
    return gpt_loop(configure=tied_weight_listed_twice.configure_optimizer)


@pytest.mark.trainloop
def test_tied_weight_in_two_optimizers():
    """The tied embedding stands in two optimizers, as the embedding and as the head."""
    model = tiny_gpt()
    optimizers = tied_weight_in_two_optimizers.configure_optimizers(model)
    batches = crops()
    return TrainLoop(
        model=model,
        optimizer=optimizers,
        batch=next(iter(batches)),
        batches=batches,
        fit=lambda given: tied_weight_in_two_optimizers.train(model, optimizers, given),
    )


@pytest.mark.trainloop
def test_features_detached():
    """Before every block the residual stream is detached for logging."""
    return gpt_loop(features_detached.GPT)


@pytest.mark.trainloop
def test_features_under_no_grad():
    """The trunk runs under no_grad in training too."""
    return digits_loop(model_class=features_under_no_grad.SmallCNN)


@pytest.mark.trainloop
def test_checkpoint_over_frozen_embeddings():
    """Re-entrant checkpoints around adapted blocks see no input that requires grad."""
    return gpt_loop(checkpoint_over_frozen_embeddings.GPT, prepare=prepare_finetuning)


@pytest.mark.trainloop
def test_features_rounded():
    """The features are rounded, and rounding passes a gradient of exactly zero."""
    return digits_loop(model_class=features_rounded.SmallCNN)


@pytest.mark.trainloop
def test_softmax_over_one_channel():
    """The softmax of the attention pooling runs over a dimension of size one."""
    return digits_loop(model_class=softmax_over_one_channel.SmallCNN)


@pytest.mark.trainloop
def test_result_dropped():
    """The last norm is called and its result never assigned."""
    return gpt_loop(result_dropped.GPT)


@pytest.mark.trainloop
def test_adapters_match_nothing():
    """The base is frozen and no layer has a name that the adapters look for."""
    return gpt_loop(prepare=adapters_match_nothing.prepare_finetuning)


@pytest.mark.trainloop
def test_adapters_frozen():
    """Freezing comes after the adapters were attached and freezes them too."""
    return gpt_loop(prepare=adapters_frozen.prepare_finetuning)


@pytest.mark.trainloop
def test_base_left_trainable():
    """Adapters are attached to a base that was never frozen."""
    return gpt_loop(prepare=base_left_trainable.prepare_finetuning)
