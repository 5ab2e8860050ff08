"""Layers that never run, and whose weight takes just such inputs as nothing depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.checks.batch.input_dependence.passes import BatchTensor
    from pytest_trainloop.recording.record import Parameter, Record


def idle_layer(record: Record, tensor: BatchTensor) -> str:
    """The one layer of torch's own that trains, never ran and takes this tensor; empty where there is none, or more."""
    idle = [p for p in record.parameters if p.layer and p.index in record.held and _never_ran(record, p)]
    with_bias = {p.owner for p in idle if len(p.shape) == 1}
    owners = {p.owner for p in idle if len(p.shape) > 1 and _takes(p, tensor)}
    owners -= with_bias if tensor.integer else set()  # a table has no bias
    return owners.pop() if len(owners) == 1 else ""


def _never_ran(record: Record, p: Parameter) -> bool:
    called = p.calls_with_grad + p.calls_without_grad + p.calls_in_checkpoint + p.calls_empty
    return p.trainable and not called and not record.last_arrivals(p.index) and not record.declared_frozen(p.name)


def _takes(p: Parameter, tensor: BatchTensor) -> bool:
    """Ids for a table that has more rows than the largest, features for a linear layer, channels for a convolution."""
    if tensor.integer:
        return len(p.shape) == 2 and p.shape[0] > tensor.largest >= 2
    if len(p.shape) == 2:
        return p.shape[1] == tensor.shape[-1] > 1
    return len(p.shape) == len(tensor.shape) and p.shape[1] == tensor.shape[1]
