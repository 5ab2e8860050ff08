"""What a trajectory is recorded on."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.baselines.trajectory import Environment

if TYPE_CHECKING:
    from collections.abc import Iterable


def environment(devices: Iterable[torch.device]) -> Environment:
    """The environment of a run whose weights lie on these devices."""
    cuda = next((device for device in devices if device.type == "cuda"), None)
    other = next((device.type for device in devices if device.type != "cpu"), "cpu")
    return Environment(
        torch=str(torch.__version__),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        platform=f"{platform.system()}-{platform.machine()}",
        device=other if cuda is None else torch.cuda.get_device_name(cuda),
        threads=torch.get_num_threads(),
        cpu=torch.backends.cpu.get_cpu_capability(),
    )
