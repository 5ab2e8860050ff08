import pytest

from pytest_trainloop.checks.learning.schedule.calls import argument_of, direction


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("scheduler.step(val_acc)", "val_acc"),
        ("self.scheduler.step(metrics['val/accuracy'])", "val/accuracy"),
        ("lr_scheduler.step(metrics=val_mIoU)", "val_mIoU"),
        ("scheduler.step(loss.item())", "loss"),
        ("scheduler.step(losses.avg)", "losses"),
        ("scheduler.step(np.mean(aucs))", "aucs"),
        ("scheduler.step(-val_acc)", ""),
        ("scheduler.step(1 - acc)", ""),
        ("scheduler.step()", ""),
        ("for s in schedulers: s.step(", ""),
    ],
)
def test_the_name_of_what_a_scheduler_is_given(code, name):
    assert argument_of(code) == name


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("val_acc", "max"),
        ("valAccuracy", "max"),
        ("val_mIoU", "max"),
        ("mAP", "max"),
        ("F1", "max"),
        ("val/loss", "min"),
        ("validLoss", "min"),
        ("RMSE", "min"),
        ("acc_loss", ""),
        ("neg_loss", ""),
        ("best_acc", ""),
        ("score", ""),
        ("accumulated", ""),
    ],
)
def test_what_a_name_says_of_a_metric(name, better):
    assert direction(name) == better
