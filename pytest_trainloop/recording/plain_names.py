"""Names of parameters as they are without the wrappers around a model."""

from __future__ import annotations

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Under which name a wrapper holds the model: of DistributedDataParallel, torch.compile, FSDP and checkpointing."""


def plain(name: str) -> str:
    """The name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
