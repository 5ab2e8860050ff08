"""A copy of one value, and how it is written back in place."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.recording.samples import as_bytes
from pytest_trainloop.recording.shards import is_distributed, local
from pytest_trainloop.recording.torch_internals import has_values
from pytest_trainloop.runs.reachable_state.slots import Entries, Hooks, Place, shown_value
from pytest_trainloop.runs.reachable_state.stored import Stored, stored, value_of
from pytest_trainloop.runs.reachable_state.value_kinds import position, set_back, sort_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(slots=True, eq=False)
class Copy:
    """What a place held: ``raw`` is the value as it is compared and shown, or where that is stored, ``kept`` what is
    needed to write it back, ``storage`` the memory that a tensor used."""

    place: Place
    sort: str
    raw: Any
    kept: Any = None
    storage: torch.Tensor | None = None
    emptied: bool = False
    """Whether the tensor has given its memory back since (``empty_loop`` of snapshots)."""

    @property
    def value(self) -> Any:
        """The value as it is compared and shown; a large tensor is read when it is asked for."""
        return value_of(self.raw)

    def is_same(self, other: Copy, equal: Callable[[Any, Any], bool]) -> bool:
        if "ours" in (self.sort, other.sort):  # what we gave the project is not judged, nor what it took the place of
            return True
        if self.place.kind == "reference" and other.place.kind == "reference":
            return self.place.value is other.place.value or self.raw == other.raw
        if self.place.kind is None or other.place.kind is None:  # an object took the place of a value
            return self.place.value is other.place.value or self.sort == other.sort
        if isinstance(self.raw, Stored) and isinstance(other.raw, Stored) and self.raw.is_same(other.raw):
            return True
        return equal(self.value, other.value)

    def into_slot(self) -> bool:
        """The object that was there back into its slot."""
        slot = self.place.slot
        if slot is None or isinstance(slot, (Entries, Hooks)) or slot.get() is self.place.value:
            return True
        return slot.put(self.place.value)

    def restore(self) -> bool:
        """The object into its slot, and its value in place. Says whether both could be done."""
        slot = self.place.slot
        if isinstance(slot, (Entries, Hooks)):
            return slot.put(self.kept)
        done = self.into_slot()
        if self.sort == "tensor":
            return restore_tensor(self.place.value, self.value, self.storage) and done
        if self.sort == "array":
            if self.place.value.tobytes() != self.kept.tobytes() or self.place.value.dtype.kind == "O":
                if not self.place.value.flags.writeable:
                    return False
                self.place.value[...] = self.kept
            return done
        if self.sort == "stream":
            return set_back(self.place.value, self.kept) and done
        if self.sort == "generator":
            set_state(self.place.value, self.kept)
        return done


def copied(place: Place, names: Mapping[int, str]) -> Copy:
    """A copy of what a place holds."""
    if isinstance(place.slot, (Entries, Hooks)):
        kept = place.slot.get()
        return Copy(place, "entries", len(kept) if place.kind in ("length", "hooks") else kept, kept)
    if place.kind == "switch":
        return Copy(place, "switch", place.value)
    if place.kind is None:
        return Copy(place, sort_of(place.value), None)
    if place.kind == "reference":
        return Copy(place, "reference", shown_value(place, names))
    sort = sort_of(place.value)
    if sort == "tensor":
        return Copy(place, sort, tensor_copy(place.value), storage=storage_of(place.value))
    if sort == "array":
        value = place.value.copy()
        return Copy(place, sort, value, value)
    if sort in ("generator", "stream"):
        kept = state_of(place.value) if sort == "generator" else position(place.value)
        return Copy(place, sort, kept, kept)
    return Copy(place, sort, place.value, place.value)


def tensor_copy(tensor: torch.Tensor) -> torch.Tensor | Stored | None:
    """The values of a tensor; None where they cannot be read."""
    if not has_values(tensor) or torch.nn.parameter.is_lazy(tensor):
        return None
    try:
        return stored(tensor)
    except Exception as error:  # a tensor of a class of the project's, or without values
        reraise_ours(error)
        return None


def storage_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.data
    except Exception as error:  # without memory of its own
        reraise_ours(error)
        return None


def restore_tensor(tensor: torch.Tensor, value: torch.Tensor | None, storage: torch.Tensor | None) -> bool:
    """The tensor's memory and entries as they were. What holds the right bits is left alone: its version stays."""
    if value is None:  # it could not be read
        return tensor_copy(tensor) is None
    if is_distributed(tensor):
        tensor, value, storage = local(tensor), local(value), None
    try:
        if storage is not None and _elsewhere(tensor, storage):
            tensor.data = storage
        if not same_bits(tensor, value):
            with torch.inference_mode(tensor.is_inference()):
                write(tensor.detach(), value)
    except Exception as error:  # of a class of the project's, or read-only memory
        reraise_ours(error)
        return False
    return True


def _elsewhere(tensor: torch.Tensor, storage: torch.Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    if tensor.shape != storage.shape or tensor.stride() != storage.stride():
        return True
    return tensor.dtype != storage.dtype or tensor.data_ptr() != storage.data_ptr()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree bit for bit: NaN is NaN, and the sign of zero counts."""
    if a is b:
        return True
    a, b = local(a), local(b)
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    a, b = a.detach(), b.detach()
    if a.layout == torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return a.indices().shape == b.indices().shape and bool(
            torch.equal(a.indices(), b.indices()) and same_bits(a.values(), b.values())
        )
    if a.layout != torch.strided or a.is_quantized:
        return False
    if a.is_floating_point() or a.is_complex():
        a, b = as_bytes(a), as_bytes(b)
    return torch.equal(a, b)


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, numpy or Python."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator) if not isinstance(generator, random.SystemRandom) else None
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return copy.deepcopy(generator.state)


def set_state(generator: Any, state: Any) -> None:
    if state is None:
        return
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = copy.deepcopy(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.state = copy.deepcopy(state)
