"""Operations that run over the rows, wherever a step makes them, and the same step with another axis in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pytest_trainloop.recording.torch_names import RESHAPES
from pytest_trainloop.tracing.copy_layouts import Layout, of_other_layout
from pytest_trainloop.tracing.forward_pass import axis_of
from pytest_trainloop.tracing.operation_fixes import moved_first, scrambles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.tracing.forward_pass import Op, Replacement

Kind = Literal["softmax", "normalised", "similarity", "cumulated", "views"] | Layout

_AXIS_AT: dict[str, tuple[Kind, int, int | None]] = {
    "softmax": ("softmax", 1, None),
    "log_softmax": ("softmax", 1, None),
    "softmin": ("softmax", 1, None),
    "normalize": ("normalised", 2, 1),
    "norm": ("normalised", 2, None),
    "linalg_norm": ("normalised", 2, None),
    "linalg_vector_norm": ("normalised", 2, None),
    "cosine_similarity": ("similarity", 2, 1),
    "cumsum": ("cumulated", 1, None),
    "cumprod": ("cumulated", 1, None),
    "logcumsumexp": ("cumulated", 1, None),
    "cummax": ("cumulated", 1, None),
    "cummin": ("cumulated", 1, None),
    "flip": ("cumulated", 1, None),
}
"""By the name of a function: the kind, where it takes its axis among the arguments, and the axis by default."""


@dataclass(frozen=True, slots=True)
class RowFix:
    """Operations of one kind that run over the rows. It holds no tensor."""

    kind: Kind
    named: str
    place: Place
    places: tuple[Place, ...]
    replacements: Mapping[int, Replacement]
    """Along another axis, by the operations' numbers."""
    dims: tuple[int, int] | None = None
    """The axis that the first one runs along, and the other; None where it lays rows out."""
    sources: frozenset[Path] = frozenset()
    """The tensors of the batch that what is laid out was made of; of layouts only."""

    @property
    def of_layout(self) -> bool:
        """Whether it lays out copies of rows in another order."""
        return self.kind in get_args(Layout)


def row_fixes(
    ops: Sequence[Op],
    rows: int,
    whole: int = 0,
    sources: Callable[[torch.Tensor], Iterable[Path]] = lambda tensor: (),
) -> Iterator[RowFix]:
    """One for each kind of operation that runs over an axis of ``rows``, where there is another one to take, or that
    lays out copies of rows. The loop's own batch has ``whole`` rows; ``sources`` tells what of it a tensor is made
    of."""
    product = frozenset({rows, whole or rows})
    found: dict[Kind, dict[Op, Replacement]] = {}
    makers = {id(t): op for op in ops for t in op.outputs}
    for op in ops:
        kind, change = _of(op, rows, makers)
        laid_out = of_other_layout(op, rows, product)
        if laid_out is not None:
            kind, change = laid_out
        if kind is not None and change is not None:
            found.setdefault(kind, {})[op] = change
    for kind, changes in found.items():
        if kind == "cumulated" and all(op.name == "flip" for op in changes):
            continue  # rows in the other order, as partners of each other
        if kind in ("strided", "halved") and not all(op.inputs[0].requires_grad for op in changes):
            continue  # what tells pairs apart is cut in the same way, on purpose
        first = next(op for op in changes if op.name != "flip")
        places = tuple(dict.fromkeys(op.place for op in changes))
        along = kind in ("softmax", "normalised", "similarity", "cumulated")
        axis = axis_of(first.inputs[0], rows) if along else None
        dims = (axis, _other_axis(first.inputs[0], axis)) if axis is not None else None
        replacements = {op.number: change for op, change in changes.items()}
        fix = RowFix(kind, first.named, first.place, places, replacements, dims=dims)
        if fix.of_layout:
            fix = replace(fix, sources=frozenset(path for op in changes for path in sources(op.inputs[0])))
        yield fix


def _of(op: Op, rows: int, makers: Mapping[int, Op]) -> tuple[Kind | None, Replacement | None]:
    if op.name in _AXIS_AT:
        kind, at, default = _AXIS_AT[op.name]
        if op.name.endswith("norm") and not (op.outputs and op.outputs[0].dim() == op.inputs[0].dim()):
            return None, None  # its axis is gone, and another one would leave another shape
        return kind, _along_another(op, rows, at, default)
    if op.name in RESHAPES and op.inputs and op.outputs:
        if scrambles(op, rows):
            return "views", moved_first(rows)
        return "views", _of_joined(op, rows, makers)
    return None, None


def _along_another(op: Op, rows: int, at: int, default: int | None) -> Replacement | None:
    """The same function along the last axis, or the first where the rows are last."""
    if not op.inputs:
        return None
    given = op.inputs[0]
    axis = axis_of(given, rows)
    asked = op.args[at] if len(op.args) > at else op.kwargs.get("dim", op.kwargs.get("dims", default))
    listed = list(asked) if isinstance(asked, (list, tuple)) else [asked]
    if axis is None or len(listed) != 1 or not isinstance(listed[0], int) or isinstance(listed[0], bool):
        return None
    sizes = [size for d, size in enumerate(given.shape) if d != axis]
    if not sizes or max(sizes) < 2 or listed[0] % given.dim() != axis:
        return None
    other = _other_axis(given, axis)

    def change(op: Op) -> Any:
        dim = [other] if isinstance(asked, (list, tuple)) else other
        if len(op.args) > at:
            out = op.func(*op.args[:at], dim, *op.args[at + 1 :], **op.kwargs)
        else:
            out = op.func(*op.args, **{**op.kwargs, "dims" if op.name == "flip" else "dim": dim})
        return out

    return change


def _other_axis(given: torch.Tensor, axis: int) -> int:
    """The axis after the rows in a table of rows and steps, which is the last; of one that is longer than 1."""
    wide = [d for d, size in enumerate(given.shape) if d != axis and size > 1]
    return wide[-1]


def _of_joined(op: Op, rows: int, makers: Mapping[int, Op]) -> Replacement | None:
    """For steps that were joined one behind the other and are cut as if each row's stood together."""
    given, out = op.inputs[0], op.outputs[0]
    maker = makers.get(id(given))
    if maker is None or maker.name not in ("cat", "concat", "concatenate") or not out.dim() or len(out) != rows:
        return None
    parts = maker.inputs
    whole = len(parts) > 1 and all(t.dim() and len(t) == rows and t.shape == parts[0].shape for t in parts)
    if not whole or len(given) != rows * len(parts):
        return None

    def change(op: Op) -> Any:
        joined = op.inputs[0]
        steps = len(joined) // rows
        return joined.reshape(steps, rows, *joined.shape[1:]).transpose(0, 1).reshape(op.outputs[0].shape)

    return change
