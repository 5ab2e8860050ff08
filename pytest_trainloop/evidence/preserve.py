"""The user's process is left as it was: random states, modes, flags and threads are put back bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.adapters.accelerate import gradient_state_kept

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Put back, also after an exception: python, numpy, torch and CUDA random states, default dtype and device, grad
    mode, thread count,
    determinism, matmul and cuDNN flags, anomaly mode, autocast, the working directory and the warning filters."""
    before = _states()
    try:
        with warnings.catch_warnings(), gradient_state_kept():
            yield
    finally:
        _restore(before)


def seed_all(seed: int) -> None:
    """Seed every generator that a loop may draw from."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else None,
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")},
        "cwd": Path.cwd(),
    }


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore(before: dict[str, Any]) -> None:
    random.setstate(before["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and before["numpy"] is not None:
        numpy.random.set_state(before["numpy"])
    if torch.get_default_device() != before["device"]:
        torch.set_default_device(None if before["device"].type == "cpu" else before["device"])
    torch.set_rng_state(before["torch"])
    if before["cuda"] is not None:
        torch.cuda.set_rng_state_all(before["cuda"])
    torch.set_default_dtype(before["dtype"])
    torch.set_grad_enabled(before["grad"])
    if torch.get_num_threads() != before["threads"]:
        torch.set_num_threads(before["threads"])
    torch.use_deterministic_algorithms(before["deterministic"][0], warn_only=before["deterministic"][1])
    if torch.get_float32_matmul_precision() != before["matmul"]:
        torch.set_float32_matmul_precision(before["matmul"])
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before["cudnn"]
    if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) != before["anomaly"]:
        torch.autograd.set_detect_anomaly(*before["anomaly"])
    for device, (enabled, dtype) in before["autocast"].items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    if Path.cwd() != before["cwd"]:
        os.chdir(before["cwd"])
