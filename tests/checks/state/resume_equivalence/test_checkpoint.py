"""What save gives, kept as it was: by state and by path, with its random states and its live tensors."""

from __future__ import annotations

import io
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.state.resume_equivalence.checkpoint import Checkpoint, Uncopied, copied, random_states
from pytest_trainloop.fields import is_folder, path_parameter


def loop(save, load):
    model = nn.Linear(2, 1)
    return TrainLoop(model=model, batch=torch.ones(2, 2), fit=print, save=save, load=load)


@pytest.fixture
def checkpoint():
    made = Checkpoint()
    yield made
    made.remove()


def test_a_state_is_kept_as_it_was_and_each_load_has_its_own(checkpoint):
    held, given = {"w": torch.zeros(3)}, []
    subject = loop(lambda: held, given.append)
    checkpoint.take(subject)
    held["w"].add_(1)
    checkpoint.give(subject)
    given[0]["w"].add_(5)
    checkpoint.give(subject)
    assert given[1]["w"].tolist() == [0, 0, 0]
    assert [entry.path for entry in checkpoint.changed()] == ["state['w']"]
    assert checkpoint.holds(torch.zeros(3)) == "state['w']"
    assert checkpoint.holds(torch.ones(3)) == ""


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


def test_what_load_does_to_the_files_is_not_seen_by_the_next_load(checkpoint):
    subject = loop(lambda path: path.write_text("once"), lambda path: (path.read_text(), path.unlink()))
    checkpoint.take(subject)
    checkpoint.give(subject)
    checkpoint.give(subject)


def test_the_folder_is_removed():
    paths = []
    made = Checkpoint()
    made.take(loop(lambda path: (paths.append(path), path.write_text("x")), print))
    assert isinstance(paths[0], Path)
    assert paths[0].exists()
    made.remove()
    assert not paths[0].parents[1].exists()


def test_what_a_wrong_path_does_not_explain_is_raised_as_it_was(checkpoint):
    def save(path):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.take(loop(save, print))


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (lambda: {"rng": torch.get_rng_state()}, {"torch"}),
        (lambda: [random.getstate(), np.random.get_state()], {"python", "numpy"}),
        (lambda: {"rng": {"np": np.random.get_state(legacy=False)}}, {"numpy"}),
        (lambda: {"step": 3, "rng": torch.zeros(5056, dtype=torch.uint8)}, set()),
        (lambda: {"replay": [(torch.ones(2), torch.ones(3), torch.ones(1))], "sizes": (3, 4, 5)}, set()),
    ],
)
def test_random_states_are_found_in_a_state_and_in_what_is_written(checkpoint, state, names):
    checkpoint.take(loop(state, print))
    assert set(checkpoint.random_states) == names
    other = Checkpoint()
    other.take(loop(lambda path: torch.save(state(), path), print))
    assert set(other.random_states) == names
    other.remove()
    assert set(random_states()) == {"torch", "python", "numpy"}


def test_tensors_with_a_history_are_copied_through_memory():
    graph = torch.ones(2, requires_grad=True) * 3
    assert copied({"loss": graph})["loss"].tolist() == [3, 3]


def test_bytes_in_memory_are_copied():
    buffer = io.BytesIO(b"held")
    buffer.read()
    assert copied(buffer).getvalue() == b"held"


def test_what_cannot_be_copied_says_so():
    with pytest.raises(Uncopied, match="neither copied nor pickled"):
        copied({"lock": threading.Lock()})


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
