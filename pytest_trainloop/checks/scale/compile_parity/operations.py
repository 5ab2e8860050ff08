"""What the operations of an eager run are: how precise, whether they draw, and whether operators keep to what they
declare to the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pytest_trainloop.recording.compiler_internals import fake_results, schema_of
from pytest_trainloop.recording.function_mode import OperationMode, tensors_in
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import aliased_arguments
from pytest_trainloop.whose import reraise_ours

OF_TORCH = frozenset(
    "aten prims prim c10d _c10d_functional _c10d_functional_autograd quantized torchvision torchaudio inductor mkldnn "
    "mkl onednn dtensor debugprims profiler streams rngprims".split()
)
"""Namespaces of operators that are no project's own."""


class Operations(OperationMode):  # type: ignore[no-untyped-call]
    """Notes the lowest precision and whether anything draws. Changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest: torch.dtype = torch.float64
        self.draws: dict[str, None] = {}

    @classmethod
    def unknown(cls) -> Operations:
        """Of a run that could not be looked at: single precision and random numbers are to be expected."""
        operations = cls()
        operations.lowest, operations.draws = torch.float32, {"unknown": None}
        return operations

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        for tensor in tensors_in(out):
            dtype = tensor.dtype
            if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(self.lowest).eps:
                self.lowest = dtype
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _really_draws(func, args, kwargs):
            self.draws[func.__name__.partition(".")[0]] = None
        return out


def _really_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention is tagged whatever its dropout."""
    if "attention" in func.__name__:
        return any(isinstance(a, float) and 0.0 < a < 1.0 for a in args[3:6]) or bool(kwargs.get("dropout_p"))
    return True


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """An operator that does something else than it declares."""

    name: str
    what: str
    """"writes", "aliases" or "fake"."""
    said: str
    """What it declares, and does."""
    place: str


class OwnOperators(OperationMode):  # type: ignore[no-untyped-call]
    """Compares what each operator of the project's own does with what it declares to the compiler: the inputs that it
    writes to, and the shapes, dtypes and strides that its fake implementation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: BrokenPromise | None = None

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        namespace = getattr(func, "namespace", "aten")
        if namespace in OF_TORCH or self.broken is not None:
            return passed_on(func, args, kwargs)
        believed = _believed(func, args, kwargs)
        before = [(i, t, t.clone()) for i, t in enumerate(tensors_in(args)) if readable(t)]
        out = passed_on(func, args, kwargs)
        self.broken = _written(func, args, before) or _other_results(func, out, believed)
        return out


def _written(func: Any, args: tuple[Any, ...], before: list[tuple[int, Any, Any]]) -> BrokenPromise | None:
    _, written = aliased_arguments(func)
    declared = {id(args[i]) for i in written if i < len(args)}
    for i, tensor, copy in before:
        if id(tensor) not in declared and not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
            said = f"its schema is {schema_of(func)}, and tensor {i + 1} of its arguments has other values after it"
            return BrokenPromise(func.name().partition(".")[0], "writes", said, str(here()[0]))
    return None


def _believed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    try:
        return list(tensors_in(fake_results(func, args, kwargs)))
    except Exception as error:  # it has no fake implementation, or one that raises: the compiler says so itself
        reraise_ours(error)
        return None


def _other_results(func: Any, out: Any, believed: list[torch.Tensor] | None) -> BrokenPromise | None:
    if believed is None:
        return None
    for real, fake in zip(tensors_in(out), believed, strict=False):
        for what, mine, its in (
            ("shape", tuple(real.shape), tuple(fake.shape)),
            ("dtype", real.dtype, fake.dtype),
            ("strides", real.stride(), fake.stride()),
        ):
            if mine != its and real.numel():
                said = f"it gives {what} {mine}, and its fake implementation says {its}"
                return BrokenPromise(func.name().partition(".")[0], "fake", said, str(here()[0]))
    return None
