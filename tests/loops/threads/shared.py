"""What loops of several collections share: clustered data, a plain ``fit``, arguments of a Trainer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop


def clusters(rows, width, classes, *, noise, spread=1.0, seed=0):
    """Points around one centre per class, and the class of each."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=g) * spread
    y = torch.randint(classes, (rows,), generator=g)
    return centres[y] + noise * torch.randn(rows, width, generator=g), y


def fit_with(optimizer, loss_of, scheduler=None, *, model=None):
    """A ``fit`` that takes one step for each batch, after ``model.train()`` where a model is given. The loss is
    ``loss_of(*batch)`` for a batch that is a list or tuple."""

    def fit(batches):
        if model is not None:
            model.train()
        for batch in batches:
            loss = loss_of(*batch) if isinstance(batch, (list, tuple)) else loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

    return fit


def stepped(model, optimizer, loss_of, *, train=False, **fields):
    """A loop with such a ``fit``, whose scheduler, if it has one, is stepped for each batch."""
    fit = fit_with(optimizer, loss_of, fields.get("scheduler"), model=model if train else None)
    return TrainLoop(model=model, optimizer=optimizer, fit=fit, **fields)


def cross_entropy_of(model):
    """The loss of a batch of inputs and labels."""
    return lambda x, y: F.cross_entropy(model(x), y)


def training_arguments(**options):
    """Arguments of a Trainer that writes nothing and runs on the CPU."""
    import tempfile

    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
