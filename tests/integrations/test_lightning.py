"""LightningModules of both packages: automatic and manual optimization, as a project writes them."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import UsageError, check_loop
from pytest_trainloop.adapters import from_lightning

L = pytest.importorskip("lightning")

pytestmark = pytest.mark.integration


def labelled(rows=8):
    x = torch.randn(rows, 4)
    return x, (x.sum(dim=1) > 0).long()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.trunk(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Validated(Classifier):
    """Its schedule waits for a metric of the validation pass, its callback writes checkpoints."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(*labelled(32)), batch_size=8)

    val_dataloader = train_dataloader

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_callbacks(self):
        return [L.pytorch.callbacks.ModelCheckpoint(monitor="val_loss"), L.pytorch.callbacks.LearningRateMonitor()]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class FrozenTrunk(Classifier):
    def configure_optimizers(self):
        self.trunk.requires_grad_(False)
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class HeadOnly(Classifier):
    """Faulty: the trunk is meant to train and no optimizer holds it."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class GAN(L.LightningModule):
    """Two players, two optimizers, one of them with a schedule."""

    def __init__(self, *, zeroed=True, toggled=True):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.zeroed, self.toggled = zeroed, toggled

    def play(self, optimizer, loss_of):
        if self.toggled:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        if self.zeroed:
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggled:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch, batch_idx):
        real = batch
        generate, discriminate = self.optimizers()

        def fool():
            score = self.discriminator(self.generator(torch.randn(len(real), 3, device=self.device)))
            return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))

        def tell_apart():
            fake = self.generator(torch.randn(len(real), 3, device=self.device)).detach()
            right, wrong = self.discriminator(real), self.discriminator(fake)
            return F.binary_cross_entropy_with_logits(right, torch.ones_like(right)) + (
                F.binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
            )

        self.play(generate, fool)
        self.play(discriminate, tell_apart)
        self.lr_schedulers().step()

    def configure_optimizers(self):
        generate = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        discriminate = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return [generate, discriminate], [torch.optim.lr_scheduler.StepLR(discriminate, 5)]


class CutGenerator(GAN):
    """Faulty: the generator is scored by the fakes that were detached for the discriminator."""

    def training_step(self, batch, batch_idx):
        generate, discriminate = self.optimizers()
        fake = self.generator(torch.randn(len(batch), 3, device=self.device)).detach()

        def tell_apart():
            right, wrong = self.discriminator(batch), self.discriminator(fake)
            return F.binary_cross_entropy_with_logits(right, torch.ones_like(right)) + (
                F.binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
            )

        def fool():
            score = self.discriminator(fake)
            return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))

        self.play(discriminate, tell_apart)
        self.play(generate, fool)


class ManualRegression(L.LightningModule):
    """One optimizer by hand, several gradients a step."""

    def __init__(self, *, zeroed=True):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.zeroed = zeroed

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        if self.zeroed:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def automatic(accumulate=1):
    return from_lightning(Classifier(), trainer(accumulate), batch=labelled())


def clipped(accumulate=1):
    return from_lightning(Classifier(), trainer(accumulate, gradient_clip_val=0.5), batch=labelled())


def scheduled(accumulate=1):
    return from_lightning(Scheduled(), trainer(accumulate), batch=labelled())


def validated(accumulate=1):
    return from_lightning(Validated(), trainer(accumulate, max_steps=10_000, val_check_interval=500))


def frozen_trunk():
    return from_lightning(FrozenTrunk(), batch=labelled(), frozen=("trunk.",))


def manual():
    return from_lightning(ManualRegression(), batch=labelled())


def gan():
    return from_lightning(GAN(), batch=torch.randn(8, 4))


def gan_untoggled():
    return from_lightning(GAN(toggled=False), batch=torch.randn(8, 4))


def trainer(accumulate, **settings):
    return L.Trainer(accelerator="cpu", accumulate_grad_batches=accumulate, **settings)


class DividesAgain(Classifier):
    """Faulty under accumulation: Lightning divides what ``training_step`` returns."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


class ManualAccumulation(ManualRegression):
    """Its own windows under manual optimization."""

    def __init__(self, accumulate, *, divided):
        super().__init__()
        self.accumulate, self.divided = accumulate, divided

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss / self.accumulate if self.divided else loss)
        if (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def manual_windows(accumulate=1):
    return from_lightning(ManualAccumulation(accumulate, divided=True), batch=labelled())


CORRECT = [manual_windows, automatic, clipped, scheduled, validated, frozen_trunk, manual, gan, gan_untoggled]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_a_correct_module_is_silent(make, assert_silent):
    assert_silent(make)


@pytest.mark.parametrize(
    ("module", "windows", "cause"),
    [
        (lambda accumulate: DividesAgain(), True, "divided_twice"),
        (lambda accumulate: ManualAccumulation(accumulate, divided=False), False, "loss_not_divided"),
    ],
    ids=["divides-again", "manual-undivided"],
)
def test_a_loss_divided_too_often_or_too_seldom(module, windows, cause, root_fault):
    def make(accumulate=1):
        return from_lightning(module(accumulate), trainer(accumulate if windows else 1), batch=labelled())

    root_fault(make, f"accumulation_equivalence:{cause}")


def test_half_of_the_parameters_in_no_optimizer(root_fault):
    fault = root_fault(
        lambda: from_lightning(HeadOnly(), batch=labelled()), "optimizer_holds_every_param:not_in_optimizer"
    )
    assert set(fault.culprits) == {"trunk.0.weight", "trunk.0.bias"}
    assert "torch.optim.SGD(self.head.parameters(), lr=0.1)" in fault.change


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_lightning(ManualRegression(zeroed=False), batch=labelled()),
        lambda: from_lightning(GAN(zeroed=False), batch=torch.randn(8, 4)),
    ],
    ids=["one-optimizer", "gan"],
)
def test_manual_optimization_without_zero_grad(make, root_fault):
    root_fault(make, "step_order:not_zeroed")


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (automatic, 12),
        (partial(automatic, accumulate=4), 3),
        (partial(clipped, accumulate=5), 3),
        (scheduled, 12),
        (validated, 12),
        (frozen_trunk, 12),
        (manual, 12),
        (gan, 24),
        (gan_untoggled, 24),
    ],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", str(value)),
)
def test_fit_goes_once_over_the_batches(make, steps, run):
    loop = make()
    assert run(loop) == steps
    assert run(loop) == steps


def test_a_list_is_batches_and_not_dataloaders():
    loop = manual()
    seen = []
    loop.model.training_step = lambda batch, batch_idx: seen.append(batch)
    loop.fit([(torch.zeros(1), torch.zeros(1))] * 3)
    assert [type(batch) for batch in seen] == [tuple] * 3


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("interrupted", [False, True], ids=["ended", "interrupted"])
def test_the_trainer_stays_as_it_was_and_nothing_is_written(interrupted, tmp_path, capfd):
    given = trainer(1, max_epochs=7, limit_train_batches=0.5, val_check_interval=500)
    before = {name: value for name, value in vars(given).items() if name != "val_check_batch"}
    module = Validated()
    loop = from_lightning(module, given)
    capfd.readouterr()
    if interrupted:
        module.on_train_batch_end = interrupt
        with pytest.raises(Interrupt):
            loop.fit([loop.batch] * 4)
    else:
        loop.fit([loop.batch] * 4)
    assert {name for name in before if vars(given)[name] is not before[name]} == set()
    assert "save_checkpoint" not in vars(given)
    assert given.max_epochs == 7
    assert list(tmp_path.iterdir()) == []
    assert "".join(capfd.readouterr()) == ""


def interrupt(*args):
    raise Interrupt


class WithoutValidationData(Classifier):
    def validation_step(self, batch, batch_idx):
        pass


def test_lightning_tells_nothing_in_our_runs(capfd, recwarn):
    def make():
        built = L.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False
        )  # tells of accelerators, and tips
        return from_lightning(WithoutValidationData(), built, batch=labelled())

    check_loop(make, only=["step_order"])
    assert "".join(capfd.readouterr()) == ""
    assert not [w for w in recwarn if "lightning" in str(w.category)], [str(w.message) for w in recwarn]


def test_the_first_batch_is_the_modules_own():
    assert [tuple(part.shape) for part in from_lightning(Validated()).batch] == [(8, 4), (8,)]


def test_pytorch_lightning_is_taken_as_well(run):
    other = pytest.importorskip("pytorch_lightning")

    class Regression(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert run(from_lightning(Regression(), batch=labelled())) == 12
    own = other.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=3)
    assert run(from_lightning(Regression(), own, batch=labelled())) == 4
    with pytest.raises(UsageError, match=r"got a Trainer as trainer; a pytorch_lightning.Trainer is needed"):
        from_lightning(Regression(), trainer(1), batch=labelled())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: None, "got None; a LightningModule is needed"),
        (lambda: Classifier, "got the class Classifier; a LightningModule is needed"),
        (lambda: nn.Linear(2, 2), "got a Linear; a LightningModule is needed"),
        (Classifier, r"got no batch, and Classifier.train_dataloader\(\) gives none"),
    ],
    ids=["none", "class", "module", "no-batch"],
)
def test_what_is_no_module_is_refused_in_one_sentence(given, words):
    with pytest.raises(UsageError, match=words):
        from_lightning(given())


def test_without_the_package(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="from_lightning needs the package lightning or pytorch_lightning"):
        from_lightning(object(), batch=labelled())


@pytest.mark.parametrize("toggled", [True, False])
def test_a_cut_generator_is_named_by_its_own_parameters_and_lines(root_fault, toggled):
    def gan():
        return from_lightning(CutGenerator(toggled=toggled), batch=torch.randn(8, 4))

    fault = root_fault(gan, "gradient_reaches_every_param:graph_cut")
    assert set(fault.culprits) == {f"generator.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert "score = self.discriminator(fake)" in fault.change
    assert "zeros_like" not in fault.summary
    assert "detach() at" in fault.do_not
    if toggled:  # else the discriminator's weights give the loss a history
        assert "self.manual_backward(loss)" in fault.where
