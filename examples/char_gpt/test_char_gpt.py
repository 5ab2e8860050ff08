import pytest
import torch
from char_gpt.data import crop_loader, load_corpus
from char_gpt.lora import prepare_finetuning
from char_gpt.model import GPT, GPTConfig
from char_gpt.train import (
    TrainConfig,
    configure_optimizer,
    configure_scheduler,
    evaluate,
    lm_loss,
    load_checkpoint,
    save_checkpoint,
    train,
)

from pytest_trainloop import TrainLoop

PRETRAINING = TrainConfig(steps=200, warmup=5)
FINETUNING = TrainConfig(rate=1e-2)


def tiny_gpt() -> GPT:
    vocabulary = load_corpus().vocabulary
    return GPT(GPTConfig(vocab_size=len(vocabulary), context=32, layers=2, heads=2, width=32))


def example_batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = next(iter(crop_loader(load_corpus().train, context=32, batch_size=8, batches=1, seed=0)))
    return tokens.to(device), targets.to(device)


@pytest.mark.trainloop
def test_gpt(accumulate=1, device="cpu"):
    model = tiny_gpt().to(device)
    optimizer = configure_optimizer(model, PRETRAINING)
    scheduler = configure_scheduler(optimizer, PRETRAINING)
    validation = crop_loader(load_corpus().validation, context=32, batch_size=8, batches=2, seed=1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batch=example_batch(device),
        loss=lm_loss,
        fit=lambda batches: train(model, optimizer, batches, accumulate=accumulate, scheduler=scheduler),
        evaluate=lambda: evaluate(model, validation),
        save=lambda path: save_checkpoint(path, model, optimizer, scheduler),
        load=lambda path: load_checkpoint(path, model, optimizer, scheduler),
    )


@pytest.mark.trainloop
def test_gpt_with_adapters(accumulate=1, device="cpu"):
    model = prepare_finetuning(tiny_gpt()).to(device)
    optimizer = configure_optimizer(model, FINETUNING)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=example_batch(device),
        fit=lambda batches: train(model, optimizer, batches, accumulate=accumulate),
    )


def test_a_prefix_decides_its_logits_alone():
    torch.manual_seed(0)
    model = tiny_gpt().eval()
    tokens, _ = example_batch("cpu")
    changed = tokens.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(changed)[:, :20], model(tokens)[:, :20])


def test_a_partial_window_is_a_step_of_its_own():
    torch.manual_seed(0)
    model = tiny_gpt()
    batches = [example_batch("cpu")] * 5
    assert len(train(model, configure_optimizer(model), batches, accumulate=2)) == 3
