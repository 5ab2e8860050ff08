"""Copies of the rows of a batch, laid out row by row or batch by batch, and the same step with the other layout.

``repeat`` puts whole batches one after the other, ``repeat_interleave`` the copies of each row; ``cat`` puts whole
batches one after the other, and ``[0::2]`` cuts as if their rows took turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.tracing.forward_pass import Op, Replacement

Layout = Literal["repeated", "interleaved", "strided", "halved"]
"""Copies batch by batch or row by row; cut into every second (third, ...) row or into halves (thirds, ...)."""

_HALVES = frozenset({"chunk", "split", "tensor_split"})


def of_other_layout(op: Op, rows: int, product: frozenset[int]) -> tuple[Layout, Replacement] | None:
    """How an operation lays out copies of ``rows`` rows, or cuts them, and the same done the other way.

    ``product``: numbers of rows of which as many copies, or a multiple, make all pairs of two rows, on purpose.
    """
    given = op.inputs[0] if op.inputs else None
    if given is None or not given.dim() or not op.outputs:
        return None
    if op.name in ("repeat", "tile", "repeat_interleave"):
        return _of_copies(op, given, rows, product)
    many = len(given) // max(rows, 1)
    if many < 2 or len(given) != many * rows or any(not t.dim() or len(t) != rows for t in op.outputs):
        return None
    if op.name in _HALVES and len(op.outputs) == many:
        return "halved", lambda op: tuple(op.inputs[0][part::many] for part in range(many))
    return _of_slice(op, rows, many) if op.name == "__getitem__" else None


def _of_copies(op: Op, given: torch.Tensor, rows: int, product: frozenset[int]) -> tuple[Layout, Replacement] | None:
    out = op.outputs[0]
    copies = len(out) // rows if out.dim() == given.dim() and len(given) == rows else 0
    all_pairs = any(copies % count == 0 for count in product)
    if copies < 2 or all_pairs or out.shape[1:] != given.shape[1:] or len(out) != copies * rows:
        return None
    if op.name == "repeat_interleave":
        return "interleaved", lambda op: op.inputs[0].repeat(copies, *[1] * (op.inputs[0].dim() - 1))
    return "repeated", lambda op: op.inputs[0].repeat_interleave(copies, dim=0)


def _of_slice(op: Op, rows: int, many: int) -> tuple[Layout, Replacement] | None:
    index = op.args[1] if len(op.args) > 1 else None
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, slice):
        return None
    start, stop, step = first.indices(many * rows)

    def instead(other: slice) -> Replacement:
        def change(op: Op) -> Any:
            return op.args[0][(other, *index[1:]) if isinstance(index, tuple) else other]

        return change

    if step == many and start < many:
        return "strided", instead(slice(start * rows, (start + 1) * rows))
    if step == 1 and start % rows == 0 and stop - start == rows:
        return "halved", instead(slice(start // rows, None, many))
    return None
