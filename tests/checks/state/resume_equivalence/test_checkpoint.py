"""What save gives, kept as it was: by state and by path, with its random states and its live tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint
from pytest_trainloop.fields import is_folder, path_parameter


def loop(save, load):
    model = nn.Linear(2, 1)
    return TrainLoop(model=model, batch=torch.ones(2, 2), fit=print, save=save, load=load)


@pytest.fixture
def checkpoint():
    made = Checkpoint()
    yield made
    made.remove()


def written_to(name):
    """Two functions that are given a file, a folder that is there, or one that they make."""
    held = {"w": torch.arange(3.0)}
    if name == "file":
        return lambda path: torch.save(held, path), torch.load
    if name == "folder":
        return lambda folder: torch.save(held, folder / "w.pt"), lambda folder: torch.load(folder / "w.pt")
    if name == "string":
        return lambda ckpt: torch.save(held, f"{ckpt}/w.pt"), lambda ckpt: torch.load(f"{ckpt}/w.pt")
    if name == "numpy":
        return lambda path: np.save(path / "w.npy", held["w"].numpy()), lambda path: np.load(path / "w.npy")
    return lambda save_dir: save_dir.write_bytes(b"w"), lambda save_dir: save_dir.read_bytes()


@pytest.mark.parametrize("kind", ["file", "folder", "string", "numpy", "file for a folder"])
def test_a_path_is_a_file_or_a_folder_as_the_project_wants_it(checkpoint, kind):
    save, load = written_to(kind)
    subject = loop(save, load)
    checkpoint.take(subject)
    checkpoint.give(subject)
    checkpoint.give(subject)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (lambda path: torch.save({}, path + ".pt"), lambda path: torch.load(path + ".pt")),
        (lambda path: torch.save({}, path.strip()), torch.load),
        (lambda path: torch.save({}, path), lambda path: torch.load(path[:])),
        (lambda path: torch.save({}, path + "/last.pt"), lambda path: torch.load(path + "/last.pt")),
    ],
)
def test_a_path_is_a_string_where_the_project_takes_no_other(checkpoint, save, load):
    subject = loop(save, load)
    checkpoint.take(subject)
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


class Decorated:
    @torch.no_grad()
    def save(self):
        return {}

    @torch.no_grad()
    def save_to(self, file):
        pass

    @torch.no_grad()
    def load(self, state):
        pass


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
        (torch.no_grad()(lambda: {}), torch.no_grad()(lambda state: None), ""),
        (Decorated().save, Decorated().load, ""),
        (Decorated().save_to, Decorated().load, "file"),
    ],
)
def test_the_signature_says_whether_a_path_is_given(save, load, name):
    assert path_parameter(save, load) == name


@pytest.mark.parametrize(
    ("name", "folder"),
    [("path", False), ("output_dir", True), ("folder", True), ("directory", True), ("file", False), ("dirty", False)],
)
def test_the_name_says_whether_it_is_a_folder(name, folder):
    assert is_folder(name) is folder
