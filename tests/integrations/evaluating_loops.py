"""Trainers and modules whose evaluation leaves something that training depends on, each beside one that does not."""

from __future__ import annotations

import copy

import lightning as L
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.adapters import from_lightning
from tests.integrations.resuming_loops import Annealed, Average, Module, hf, labelled, net

# --- HF Trainer ---------------------------------------------------------------------------------------------------


class AnnealedInEvaluation(Annealed):
    """Faulty: the Trainer evaluates with ``compute_loss`` too, and counts on."""

    def weight(self):
        self.seen += 1
        return min(1.0, self.seen / 20)


class Swapped(transformers.TrainerCallback):
    """Faulty: evaluates an average of the weights and leaves it there."""

    back = False

    def __init__(self):
        self.average, self.kept = {}, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, value in model.state_dict().items():
            self.average.setdefault(name, value.clone()).lerp_(value, 0.1)

    def before(self, model):
        self.kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.average or self.kept)

    def after(self, model):
        if self.back:
            model.load_state_dict(self.kept)


class SwappedBack(Swapped):
    back = True


class Averaged(transformers.Trainer):
    def evaluate(self, *args, **kwargs):
        average = next(c for c in self.callback_handler.callbacks if isinstance(c, Swapped))
        average.before(self.model)
        metrics = super().evaluate(*args, **kwargs)
        average.after(self.model)
        return metrics


class Seeded(transformers.Trainer):
    """Faulty where training draws: the same rows are evaluated under the same seed, and so training goes on with it."""

    def evaluate(self, *args, **kwargs):
        transformers.set_seed(0)
        return super().evaluate(*args, **kwargs)


class SeededApart(transformers.Trainer):
    def evaluate(self, *args, **kwargs):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().evaluate(*args, **kwargs)


# --- Lightning ----------------------------------------------------------------------------------------------------


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))


class Norms(Validated):
    """A right one with everything that is usual: norms, dropout, metrics over an epoch, a plateau schedule."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.outputs.append((logits.argmax(dim=1) == y).float())
        self.log("val_loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self):
        self.log("accuracy", torch.cat(self.outputs).mean())
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class AverageLeft(Average):
    def on_validation_end(self, trainer, module):
        self.kept = None


class SeededValidation(Validated):
    """Faulty: draws the same noise in each validation, for which all generators are seeded."""

    def __init__(self):
        super().__init__()
        self.net = net(0.3)

    def on_validation_start(self):
        L.seed_everything(0, verbose=False)


class SeededValidationApart(SeededValidation):
    def on_validation_start(self):
        self.noise = torch.Generator().manual_seed(0)


class HandStepped(Validated):
    """By hand, zeroing after the step; faulty where validation leaves gradients of a penalty it measures."""

    cleared = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def on_validation_model_zero_grad(self):
        pass

    def validation_step(self, batch, batch_idx):
        x, y = batch
        with torch.inference_mode(False), torch.enable_grad():
            F.cross_entropy(self.net(x.clone()), y.clone()).backward()
        self.log("gradient", sum(p.grad.norm() for p in self.parameters()))
        if self.cleared:
            self.zero_grad()


class HandSteppedCleared(HandStepped):
    cleared = True


def lightning(kind, *, callbacks=(), **settings):
    """A module with its Trainer and its own validation data."""

    def make():
        settings_ = {"accelerator": "cpu", "logger": False, **settings}
        module = kind()
        data = [TensorDataset(*labelled(16)) for _ in range(2)]
        module.train_dataloader = lambda: DataLoader(data[0], batch_size=8, shuffle=True)
        module.val_dataloader = lambda: DataLoader(data[1], batch_size=8)
        return from_lightning(module, L.Trainer(callbacks=[made() for made in callbacks], **settings_))

    return make


def huggingface(**given):
    def make():
        built = {name: value() if name == "model" else value for name, value in given.items()}
        built["callbacks"] = [made() for made in given.get("callbacks", ())]
        return hf("out", **built)

    return make


FAULTY = {
    "hf-counts-on": (huggingface(kind=AnnealedInEvaluation), "state_left", "seen"),
    "hf-average-left": (huggingface(kind=Averaged, callbacks=[Swapped]), "weights_left", "average"),
    "hf-seeds": (huggingface(kind=Seeded, dropout=0.3), "reseeds", "torch"),
    "lightning-average-left": (lightning(Validated, callbacks=[AverageLeft]), "weights_left", "average"),
    "lightning-seeds": (lightning(SeededValidation), "reseeds", "torch"),
    "lightning-gradients": (lightning(HandStepped), "gradients_left", ""),
}

RIGHT = {
    "hf-counts-in-training": huggingface(kind=Annealed),
    "hf-average-swapped-back": huggingface(kind=Averaged, callbacks=[SwappedBack]),
    "hf-seeds-apart": huggingface(kind=SeededApart, dropout=0.3),
    "hf-accumulating": huggingface(dropout=0.3, gradient_accumulation_steps=2, lr_scheduler_type="cosine"),
    "lightning": lightning(Validated),
    "lightning-everything": lightning(Norms, callbacks=[Average], gradient_clip_val=1.0, accumulate_grad_batches=2),
    "lightning-seeds-apart": lightning(SeededValidationApart),
    "lightning-gradients-cleared": lightning(HandSteppedCleared),
}

ADVISED = {"hf-seeds-and-nothing-draws": (huggingface(kind=Seeded), "reseeds")}
