"""Registers the stand-in for a device with torch, for the whole process: run it in a process of its own."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torch.utils.cpp_extension import load


class _Device:
    """As ``torch.cuda.device``."""

    def __init__(self, device):
        self._index = device if isinstance(device, int) else torch.device(device).index or 0

    def __enter__(self):
        self._before = extension.current()
        extension.use(self._index)

    def __exit__(self, *_raised):
        extension.use(self._before)


def register(folder):
    """Compile the extension into a folder, and name its device "stand_in"."""
    global extension
    source = Path(__file__).with_name("stand_in.cpp")
    extension = load("stand_in", [str(source)], extra_cflags=["-O0"], build_directory=str(folder))
    torch.utils.rename_privateuse1_backend("stand_in")
    module = types.ModuleType("torch.stand_in")
    module.device = _Device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 2
    module.current_device = extension.current
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("stand_in", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.start()


if __name__ == "__main__":
    import json

    register(sys.argv[1])
    from tests.devices.loops import verdicts

    Path(sys.argv[2]).write_text(json.dumps(verdicts()), encoding="utf-8")
