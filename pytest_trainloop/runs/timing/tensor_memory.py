"""The most memory that tensors hold at once, where the device keeps no count: the CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from pytest_trainloop.recording.function_mode import OperationMode
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import tree_leaves


class TensorMemory(OperationMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of each storage from the first operation that gives a tensor on it until it is freed.

    The count is the same on every machine. It is blind to what a kernel needs for itself while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def hold(self, tensors: Any) -> None:
        """Count these tensors of a nest: weights and batches, which no operation makes."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor):
                self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known:
            return

        def freed(_reference: Any) -> None:
            self._known.pop(address, None)
            self._live -= size

        self._known[address] = weakref.ref(storage, freed)
        self._live += size
        self.peak = max(self.peak, self._live)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        self.hold(out)
        return out
