"""Whether ``save`` and ``load`` take a state or a path, and what kind of path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.declare.fields import path_parameter


def loop(save, load):
    model = nn.Linear(2, 1)
    return TrainLoop(model=model, batch=torch.ones(2, 2), fit=print, save=save, load=load)


@pytest.fixture
def checkpoint():
    made = Checkpoint()
    yield made
    made.remove()


HELD = {"w": torch.arange(3.0)}


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (lambda path: torch.save(HELD, path), torch.load),
        (lambda folder: torch.save(HELD, folder / "w.pt"), lambda folder: torch.load(folder / "w.pt")),
        (lambda ckpt: torch.save(HELD, f"{ckpt}/w.pt"), lambda ckpt: torch.load(f"{ckpt}/w.pt")),
        (lambda path: np.save(path / "w.npy", np.ones(3)), lambda path: np.load(path / "w.npy")),
        (lambda save_dir: save_dir.write_bytes(b"w"), lambda save_dir: save_dir.read_bytes()),
        (lambda path: torch.save({}, path + ".pt"), lambda path: torch.load(path + ".pt")),
        (lambda path: torch.save({}, path.strip()), torch.load),
        (lambda path: torch.save({}, path), lambda path: torch.load(path[:])),
        (lambda path: torch.save({}, path + "/last.pt"), lambda path: torch.load(path + "/last.pt")),
    ],
)
def test_a_path_is_a_file_a_folder_or_a_string_as_the_project_wants_it(checkpoint, save, load):
    subject = loop(save, load)
    checkpoint.take(subject)
    checkpoint.give(subject)
    checkpoint.give(subject)


def test_what_a_string_does_not_explain_is_raised_as_it_was(checkpoint):
    def save(path):
        raise TypeError("cannot pickle a lock")

    with pytest.raises(TypeError, match="cannot pickle a lock"):
        checkpoint.take(loop(save, print))

    def load(path):
        raise TypeError("unsupported operand")

    checkpoint.take(loop(lambda path: path.write_text("x"), load))
    with pytest.raises(TypeError, match="unsupported operand"):
        checkpoint.give(loop(print, load))


@pytest.mark.parametrize(
    ("save", "load", "name"),
    [
        (lambda: {}, lambda state: None, ""),
        (lambda where: None, lambda where: None, "where"),
        (lambda path=None: {}, lambda state: None, ""),
        (lambda path="last.pt": None, lambda path="last.pt": None, "path"),
        (lambda strict=True: {}, lambda state: None, ""),
        (lambda save_dir="out": None, lambda ckpt_dir="out": None, "save_dir"),
        (torch.no_grad()(lambda folder: None), torch.no_grad()(lambda folder: None), "folder"),
    ],
)
def test_the_signature_says_whether_a_path_is_given(save, load, name):
    assert path_parameter(save, load) == name
