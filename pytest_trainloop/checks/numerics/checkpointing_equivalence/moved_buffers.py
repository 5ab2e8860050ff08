"""Which buffers that a checkpoint moves once more end where they should not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_trainloop import members
from pytest_trainloop.recording.torch_internals import NORM_MODULES

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence


def moved_otherwise(evidence: Evidence, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the buffers that matter: without the statistics of norms whose momentum is made for two updates a step,
    and without counts of batches that no other statistic of the norm follows."""
    if not names:
        return ()
    norms = _norms(evidence)
    kept = [n for n in names if not _made_for_two(norms.get(n.rpartition(".")[0]))]
    followed = {n.rpartition(".")[0] for n in kept if not n.endswith("num_batches_tracked")}
    return tuple(n for n in kept if n.rpartition(".")[0] in followed or n.rpartition(".")[0] not in norms)


def _norms(evidence: Evidence) -> dict[str, Any]:
    loop = evidence.fresh_loop()
    return {
        ".".join(filter(None, (prefix, path))): module
        for prefix, model in loop.modules.items()
        for path, module in members.named_modules(model)
        if isinstance(module, NORM_MODULES)
    }


def _made_for_two(norm: Any) -> bool:
    """Whether two updates with its momentum are one with a momentum m of at most two digits: it is 1 - sqrt(1 - m), to
    as many digits as it is given with, and to three at least."""
    if norm is None or norm.momentum is None or not 0 < norm.momentum < 1:
        return False
    once = float(f"{1 - (1 - norm.momentum) ** 2:.2g}")
    digits = len(repr(norm.momentum).lstrip("0.").replace(".", ""))
    return digits >= 3 and float(f"{1 - (1 - once) ** 0.5:.{min(digits, 12)}g}") == float(f"{norm.momentum:.12g}")
