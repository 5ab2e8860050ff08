"""What a call gave, as plain data that is equal only where it is equal bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor


def told(value: Any) -> Any:
    """Plain data: values, dtype, layout, strides, history and all that a script could tell apart."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, dict):
        return {key: told(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(told(held) for held in value))
    if isinstance(value, nn.Module):
        return (type(value).__name__, told(dict(value.state_dict())), told(dict(value.named_parameters())))
    if isinstance(value, BaseException):
        return (type(value).__name__, str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return told({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(value, "tobytes"):
        return (type(value).__name__, str(value.dtype), value.shape, value.strides, value.tobytes())
    return value if isinstance(value, (int, str, bytes, type(None))) else repr(value)  # NaN is not equal to itself


def _tensor(tensor: torch.Tensor) -> Any:
    node = tensor.grad_fn
    known = {
        "type": type(tensor).__name__,
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "device": tensor.device,
        "size": None if tensor.is_nested and tensor.layout is torch.strided else tuple(map(str, tensor.shape)),
        "requires_grad": tensor.requires_grad,
        "leaf": tensor.is_leaf,
        "history": None if node is None else type(node).__name__,
        "bits": (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    }
    return known | _values(tensor)


def _values(tensor: torch.Tensor) -> dict[str, Any]:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return {"stride": tensor.stride()}
    for names in (("_mesh_of", "_local_tensor"), ("_masked_data", "_masked_mask"), ("held",)):
        inner = [getattr(tensor, name) for name in names if hasattr(tensor, name)]
        if inner:
            return {"inner": [told(t.detach()) for t in inner]}
    with torch.no_grad():
        plain = tensor.detach()
        if tensor.is_nested:
            return {"parts": [told(part.clone()) for part in plain.unbind()]}
        if tensor.layout is torch.sparse_coo:
            # not is_coalesced(): of a gradient, torch sets it anew wherever a dispatch mode is on, one of ours or not
            return {"parts": [told(part.clone()) for part in (plain._indices(), plain._values())]}
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = plain.crow_indices(), plain.col_indices(), plain.values()
            return {"parts": [told(part.clone()) for part in parts]}
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = plain.ccol_indices(), plain.row_indices(), plain.values()
            return {"parts": [told(part.clone()) for part in parts]}
        if tensor.is_quantized:
            return {"scheme": str(tensor.qscheme()), "stride": tensor.stride(), "values": plain.int_repr().tolist()}
        bare = plain.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().clone()
        raw = bytes(bare.view(-1).view(torch.uint8).tolist()) if bare.numel() else b""
        return {"stride": tensor.stride(), "offset": tensor.storage_offset(), "raw": raw}
