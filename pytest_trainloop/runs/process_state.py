"""Restore the user's process: random states, modes, flags and threads, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.recording.autocast import leave_open, open_blocks
from pytest_trainloop.recording.source import layer
from pytest_trainloop.recording.torch_internals import default_device
from pytest_trainloop.runs.accelerate_state import gradient_state_kept
from pytest_trainloop.runs.framework_logs import frameworks_quiet
from pytest_trainloop.runs.reachable_state.copies import set_state, state_of
from pytest_trainloop.runs.reachable_state.value_kinds import sort_of, sort_of_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FP32 = (
    *("backends", "backends.cuda.matmul", "backends.cudnn", "backends.cudnn.conv", "backends.cudnn.rnn"),
    *("backends.mkldnn", "backends.mkldnn.matmul", "backends.mkldnn.conv", "backends.mkldnn.rnn"),
)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore, also after an exception: python, numpy, torch and CUDA random states, default dtype and device, grad
    mode, thread count, determinism, matmul and cuDNN flags, anomaly mode, autocast, working directory, warning filters.
    Meanwhile frameworks log no more than warnings.
    """
    before = _states()
    try:
        with warnings.catch_warnings(), gradient_state_kept(), frameworks_quiet():
            yield
    finally:
        _restore(before)


@contextlib.contextmanager
def generators_of_modules_kept() -> Iterator[None]:
    """Restore generators that a module of the project's keeps: whoever builds a loop again in another process, to go on
    from a checkpoint, finds those as they were."""
    kept = [(generator, state_of(generator)) for generator in _of_modules(len(sys.modules))]
    try:
        yield
    finally:
        for generator, state in kept:
            set_state(generator, state)


@functools.lru_cache(maxsize=1)
def _of_modules(_known: int) -> list[Any]:
    """The generators among the variables of the project's modules; looked for where there are more modules."""
    files = ((module, getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    own = [module for module, file in files if isinstance(file, str) and layer(file) == 2]
    held = (value for module in own for value in list(vars(module).values()))
    return [value for value in held if sort_of_class(type(value)) == "generator" == sort_of(value)]


def seed_all(seed: int) -> None:
    """Seed every generator that a loop may draw from."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    """Whether devices other than the CPU have generators to seed. Where there is none, ``torch.manual_seed`` keeps
    three stack traces a call for the time that one is initialised, and they are never released."""
    return torch.accelerator.is_available()


class SeededApart:
    """Random states for the data, separate from those of the loop.

    What is drawn ``in_use`` of them goes on where it was left, and is the same in every run under one seed, whatever
    the loop draws in between. Only in the thread that made them: generators are the whole process's.
    """

    def __init__(self, seed: int) -> None:
        self._seed = (seed + DATA_STREAM) % 2**63
        self._states: dict[str, Any] | None = None
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        before = random_states()
        if self._states is None:
            seed_all(self._seed)
        else:
            restore_random(self._states)
        try:
            yield
        finally:
            self._states = random_states()
            restore_random(before)


DATA_STREAM = 104_729
"""Added to a seed: what a loop draws (noise, a latent) must not be the numbers that its data were drawn from."""


def random_states() -> dict[str, Any]:
    """The states of python's, numpy's and torch's generators."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else None,
    }


def restore_random(before: dict[str, Any]) -> None:
    """Put back what ``random_states`` gave."""
    random.setstate(before["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and before["numpy"] is not None:
        numpy.random.set_state(before["numpy"])
    torch.set_rng_state(before["torch"])
    if before["cuda"] is not None:
        torch.cuda.set_rng_state_all(before["cuda"])


def _states() -> dict[str, Any]:
    return {
        **random_states(),
        "dtype": torch.get_default_dtype(),
        "device": default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": _deterministic(),
        "matmul": _or_none(torch.get_float32_matmul_precision),
        "tf32": _or_none(lambda: torch.backends.cudnn.allow_tf32),
        "fp32": {path: owner.fp32_precision for path, owner in _fp32_owners()},
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")},
        "autocast blocks": open_blocks(),
        "cwd": _or_none(Path.cwd),
    }


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _or_none(read: Callable[[], Any]) -> Any:
    """None where flags that were set one by one have no common value, and where the directory is gone."""
    try:
        return read()
    except (RuntimeError, OSError) as error:
        reraise_raised(error)
        return None


def _fp32_owners() -> Iterator[tuple[str, Any]]:
    """Where the precision of float32 products is set one by one (torch 2.9 and later)."""
    for path in _FP32:
        owner: Any = torch
        for name in path.split("."):
            owner = getattr(owner, name, None)
        if hasattr(owner, "fp32_precision"):
            yield path, owner


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore(before: dict[str, Any]) -> None:
    if default_device() != before["device"]:
        torch.set_default_device(None if before["device"].type == "cpu" else before["device"])
    restore_random(before)
    torch.set_default_dtype(before["dtype"])
    torch.set_grad_enabled(before["grad"])
    if torch.get_num_threads() != before["threads"]:
        torch.set_num_threads(before["threads"])
    if _deterministic() != before["deterministic"]:  # to set it imports a compiler
        torch.use_deterministic_algorithms(before["deterministic"][0], warn_only=before["deterministic"][1])
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before["cudnn"]
    _restore_precisions(before)
    if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) != before["anomaly"]:
        torch.autograd.set_detect_anomaly(*before["anomaly"])
    for device, (enabled, dtype) in before["autocast"].items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    leave_open(before["autocast blocks"])
    if before["cwd"] is not None and _or_none(Path.cwd) != before["cwd"]:
        os.chdir(before["cwd"])


def _restore_precisions(before: dict[str, Any]) -> None:
    """The two older switches first: each of them sets several of the newer ones."""
    if before["matmul"] is not None and _or_none(torch.get_float32_matmul_precision) != before["matmul"]:
        torch.set_float32_matmul_precision(before["matmul"])
    if before["tf32"] is not None and _or_none(lambda: torch.backends.cudnn.allow_tf32) != before["tf32"]:
        torch.backends.cudnn.allow_tf32 = before["tf32"]
    for path, owner in _fp32_owners():
        if owner.fp32_precision != before["fp32"][path]:
            owner.fp32_precision = before["fp32"][path]
