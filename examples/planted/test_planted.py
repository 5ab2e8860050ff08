"""One mistake a test; each fails under ``--trainloop-strict`` by the cause in README.md."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from char_gpt.data import Batch, crop_loader, load_corpus
from char_gpt.lora import prepare_finetuning
from char_gpt.model import GPT, GPTConfig
from char_gpt.train import TrainConfig, configure_optimizer, configure_scheduler, train
from digits_cnn.data import loaders
from digits_cnn.model import SmallCNN
from digits_cnn.trainer import Trainer, TrainerConfig
from planted import (
    activation_after_the_head,
    adapters_frozen,
    adapters_match_nothing,
    average_written_back,
    backward_in_the_if,
    base_left_trainable,
    blocks_in_a_list,
    checkpoint_over_frozen_embeddings,
    classes_reshaped,
    clip_after_step,
    clip_before_unscale,
    constant_pixels_standardised,
    decay_for_an_epoch,
    distance_without_eps,
    divided_in_two_places,
    dropout_drawn_again,
    eval_left_on,
    evaluated_in_training_mode,
    features_detached,
    features_normalised_over_the_batch,
    features_rounded,
    features_under_no_grad,
    frozen_by_a_wrong_prefix,
    frozen_by_zeroed_gradients,
    frozen_norms_in_training,
    frozen_with_momentum,
    generalised_mean_in_float16,
    gradients_left_when_freezing,
    head_drawn_wide,
    head_left_out,
    head_swapped_after_optimizer,
    labels_shifted_twice,
    last_window_left_over,
    loss_not_divided,
    mask_one_position_late,
    mean_of_token_means,
    momentum_for_one_group,
    nan_loss_as_zero,
    noise_from_the_system,
    noise_that_goes_on,
    optimizer_on_a_copy,
    rate_in_another_unit,
    rate_of_gradient_descent,
    result_dropped,
    schedule_by_micro_batch,
    scheduler_before_optimizer,
    softmax_in_the_head,
    softmax_over_one_channel,
    step_before_backward,
    step_forgotten,
    step_outside_the_if,
    stepped_twice,
    tied_weight_in_two_optimizers,
    tied_weight_listed_twice,
    train_forgotten,
    update_forgotten,
    weights_in_bfloat16,
    zero_grad_after_backward,
    zero_grad_forgotten,
    zero_grad_in_every_micro_batch,
    zero_grad_on_the_other_optimizer,
    zeroed_by_the_wrong_count,
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
    change: Callable[[Batch], Batch] = lambda batch: batch,
) -> TrainLoop:
    model = prepare(tiny_gpt(model_class))
    config = TrainConfig(warmup=5)
    optimizer = configure(model, config)
    scheduler = configure_scheduler(optimizer, config)
    batches = [change(batch) for batch in crops()]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=batches[0],
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


@pytest.mark.trainloop
def test_loss_not_divided(accumulate=1):
    """The losses of a window are added up."""
    return gpt_loop(fit=loss_not_divided.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_divided_in_two_places(accumulate=1):
    """Losses are divided by the window, and so are the summed gradients."""
    return gpt_loop(fit=divided_in_two_places.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_backward_in_the_if(accumulate=1):
    """Backward runs for the last micro-batch of a window only."""
    return gpt_loop(fit=backward_in_the_if.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_step_outside_the_if(accumulate=1):
    """The optimizer steps after every micro-batch."""
    return gpt_loop(fit=step_outside_the_if.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_zeroed_by_the_wrong_count(accumulate=1):
    """A window's gradients are still there in the next one."""
    return gpt_loop(fit=zeroed_by_the_wrong_count.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_mean_of_token_means(accumulate=1):
    """Micro-batches with few tokens weigh as much as those with many."""
    return gpt_loop(fit=mean_of_token_means.train, accumulate=accumulate, change=mean_of_token_means.padded)


@pytest.mark.trainloop
def test_schedule_by_micro_batch(accumulate=1):
    """The schedule advances with every micro-batch."""
    return gpt_loop(fit=schedule_by_micro_batch.train, accumulate=accumulate)


@pytest.mark.trainloop
def test_weights_in_bfloat16():
    """The weights are cast to bfloat16."""
    return gpt_loop(prepare=weights_in_bfloat16.prepare)


@pytest.mark.trainloop
def test_momentum_for_one_group():
    """An optimizer written by hand steps its first group only."""
    return digits_loop(momentum_for_one_group.Trainer)


@pytest.mark.trainloop
def test_frozen_by_zeroed_gradients():
    """Zeroed gradients do not keep weight decay away."""
    return digits_loop(frozen_by_zeroed_gradients.Trainer)


@pytest.mark.trainloop
def test_frozen_with_momentum():
    """A trunk that is frozen during training moves on by momentum."""
    return digits_loop(frozen_with_momentum.Trainer)


@pytest.mark.trainloop
def test_gradients_left_when_freezing():
    """A trunk that is frozen during training is stepped with its last gradient for ever."""
    return digits_loop(gradients_left_when_freezing.Trainer)


@pytest.mark.trainloop
def test_frozen_by_a_wrong_prefix():
    """What is declared frozen is trained."""
    return replace(gpt_loop(prepare=frozen_by_a_wrong_prefix.prepare), frozen=("blocks.0.",))


@pytest.mark.trainloop
def test_frozen_norms_in_training():
    """The running statistics of a frozen trunk drift."""
    return digits_loop(model_class=frozen_norms_in_training.SmallCNN)


@pytest.mark.trainloop
def test_train_forgotten():
    """The model is trained in evaluation mode."""
    return digits_loop(train_forgotten.Trainer, model_class=train_forgotten.SmallCNN)


@pytest.mark.trainloop
def test_eval_left_on():
    """From the first log on the model is trained in evaluation mode."""
    return digits_loop(eval_left_on.Trainer)


@pytest.mark.trainloop
def test_evaluated_in_training_mode():
    """The evaluation runs in training mode."""
    train, test = loaders(batch_size=16)
    trainer = evaluated_in_training_mode.Trainer(SmallCNN(channels=8))
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        scheduler=trainer.scheduler,
        batch=next(iter(train)),
        batches=train,
        fit=trainer.fit,
        evaluate=lambda: trainer.evaluate(test),
    )


@pytest.mark.trainloop
def test_noise_from_the_system():
    """No seed reaches the noise."""
    return digits_loop(noise_from_the_system.Trainer)


@pytest.mark.trainloop
def test_noise_that_goes_on():
    """The noise is another one in every run of a process."""
    return digits_loop(noise_that_goes_on.Trainer)


@pytest.mark.trainloop
def test_constant_pixels_standardised():
    """Pixels that are the same in the whole batch are divided by a spread of zero."""
    return digits_loop(constant_pixels_standardised.Trainer)


@pytest.mark.trainloop
def test_nan_loss_as_zero():
    """A loss that is NaN is replaced by zero."""
    return digits_loop(nan_loss_as_zero.Trainer)


@pytest.mark.trainloop
def test_distance_without_eps():
    """The slope of a root at zero is infinite."""
    return digits_loop(distance_without_eps.Trainer)


@pytest.mark.trainloop
def test_rate_in_another_unit():
    """The rate is a million times too low."""
    return gpt_loop(configure=rate_in_another_unit.configure_optimizer)


@pytest.mark.trainloop
def test_rate_of_gradient_descent():
    """The rate is thousands of times too high."""
    return gpt_loop(configure=rate_of_gradient_descent.configure_optimizer)


@pytest.mark.trainloop
def test_decay_for_an_epoch():
    """The schedule counts epochs and is stepped per batch."""
    return digits_loop(decay_for_an_epoch.Trainer)


@pytest.mark.trainloop
def test_average_written_back():
    """Every update is undone."""
    return digits_loop(average_written_back.Trainer)


@pytest.mark.trainloop
def test_head_drawn_wide():
    """The first loss is far above chance."""
    return digits_loop(model_class=head_drawn_wide.SmallCNN)


@pytest.mark.trainloop
def test_softmax_in_the_head():
    """The model gives probabilities where the loss takes scores."""
    return digits_loop(model_class=softmax_in_the_head.SmallCNN)


@pytest.mark.trainloop
def test_activation_after_the_head():
    """The scores pass a ReLU."""
    return digits_loop(model_class=activation_after_the_head.SmallCNN)


@pytest.mark.trainloop
def test_classes_reshaped():
    """The class axis runs over several positions."""
    return gpt_loop(fit=classes_reshaped.train)


@pytest.mark.trainloop
def test_labels_shifted_twice():
    """The model learns the token after the next."""
    return gpt_loop(fit=labels_shifted_twice.train)


@pytest.mark.trainloop
def test_mask_one_position_late():
    """Each position sees the token that it is to tell."""
    return gpt_loop(mask_one_position_late.GPT)


@pytest.mark.trainloop
def test_features_normalised_over_the_batch():
    """What one image gives depends on the others."""
    return digits_loop(model_class=features_normalised_over_the_batch.SmallCNN)


@pytest.mark.trainloop
def test_generalised_mean_in_float16():
    """The features are pooled by sixth powers, in half precision."""
    return digits_loop(model_class=generalised_mean_in_float16.SmallCNN, precision="fp16")


@pytest.mark.trainloop
def test_dropout_drawn_again():
    """What backward recomputes has other dropouts than the loss."""
    return gpt_loop(dropout_drawn_again.GPT)
