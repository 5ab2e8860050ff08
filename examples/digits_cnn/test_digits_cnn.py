import pytest
import torch
from digits_cnn.data import loaders
from digits_cnn.model import SmallCNN
from digits_cnn.trainer import Trainer, TrainerConfig

from pytest_trainloop import TrainLoop


@pytest.mark.trainloop
def test_digits_cnn(precision="fp32", device="cpu"):
    train, test = loaders(batch_size=16)
    trainer = Trainer(SmallCNN(channels=8), TrainerConfig(precision=precision, device=device))
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


def test_evaluation_uses_and_keeps_the_running_statistics():
    torch.manual_seed(0)
    train, test = loaders()
    trainer = Trainer(SmallCNN(channels=8))
    trainer.train_epoch(train)
    before = {name: value.clone() for name, value in trainer.model.named_buffers()}
    assert trainer.evaluate(test) == trainer.evaluate(test)
    assert trainer.model.training
    for name, value in trainer.model.named_buffers():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
