"""The memory that a check will need, against what is free: a process that takes more is killed without a word."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.released import weight_bytes

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

LEAST_BYTES = 2**30
"""Bytes below which nothing is asked for."""

_CGROUP = Path("/sys/fs/cgroup")


def require_room(evidence: Evidence, sets: float, what: str, *, stored: float = 0.0) -> None:
    """Raise ``CannotDecide`` where ``sets`` times the weights of the loop in float64 are more than is free.

    ``stored`` more go to the folder for temporary files, and take memory where that has no room for them. ``what`` says
    what they are, as in "it compares copies of the whole training state".
    """
    record = evidence.run()
    entries = sum(math.prod(p.shape) for p in record.parameters)
    one = max(8 * entries, weight_bytes(record))
    need = int(sets * one)
    if need >= LEAST_BYTES and _free_on_disk() < stored * one:
        need += int(stored * one)
    free = free_bytes(record)
    if need < LEAST_BYTES or free is None or need <= free:
        return
    raise CannotDecide(
        f"{what}: about {_gigabytes(need)} of memory for {entries / 1e6:.3g} million parameters, and "
        f"{_gigabytes(free)} are free; mark a loop with a smaller configuration for it (docs/big-models.md)"
    )


def _free_on_disk() -> int:
    try:
        return shutil.disk_usage(tempfile.gettempdir()).free
    except OSError:  # no folder for temporary files
        return 0


def free_bytes(record: Record) -> int | None:
    """Bytes that are free where the loop's weights are; None where the platform does not tell."""
    devices = {p.device for p in record.parameters if p.device.startswith("cuda")}
    if devices:
        return min(torch.cuda.mem_get_info(device)[0] for device in devices)
    found = [free for free in (_of_the_machine(), _of_the_container()) if free is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _of_the_container() -> int | None:
    """By the limit of the control group; what it only caches of files counts as free."""
    try:
        most, used = ((_CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        words = (_CGROUP / "memory.stat").read_text(encoding="ascii").split()
        cached = int(words[words.index("inactive_file") + 1])
        return max(0, int(most) - int(used) + cached)
    except (OSError, ValueError):  # no version 2, or no limit ("max")
        return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
