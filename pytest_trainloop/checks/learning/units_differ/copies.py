"""Units of one layer that have the same weights, before the loop runs and after it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.runs.run import fit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

ENTRIES = 64
"""Entries of a unit that are compared."""

SAME = 1e-3
"""Units that moved by 1 and differ by less are copies: twelve steps in float32 round to 1e-5 of it, and gradients that
differ at all do so by a large part of themselves."""


def units_at_start(evidence: Evidence) -> dict[str, torch.Tensor]:
    """A row of entries for each unit, by the name of the weight of its layer."""
    return _units(evidence.fresh_loop())


def still_equal(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """The weights in which equal units got equal gradients and stayed equal, each with the facts of its finding."""
    before = evidence.shared(units_at_start)
    first = {name: _first_of(rows) for name, rows in before.items()}
    with_copies = {name for name, at in first.items() if (at != torch.arange(len(at))).any()}
    after: dict[str, torch.Tensor] = {}
    unlike: set[str] = set()

    def fit(loop: TrainLoop) -> Callable[[Any], Any]:
        def note(name: str, grad: torch.Tensor) -> None:
            # steps of Adam are as large for gradients that differ by a factor (quantiles_of_far_targets)
            if (grad - grad[first[name].to(grad.device)]).abs().max() > SAME * grad.abs().max():
                unlike.add(name)

        for name, layer in _layers(loop):
            if name in with_copies:
                on_gradient(layer.weight, functools.partial(note, name))

        def run(batches: Any) -> None:
            try:
                fit_of(loop)(batches)
            finally:
                after.update(_units(loop))

        return run

    record = evidence.rerun(fit=fit) if with_copies else evidence.run()
    reached = {p.name for p in record.parameters if record.reached(p.index)}
    for name in sorted((reached & with_copies & after.keys()) - unlike):
        moved = (after[name] - before[name]).abs().amax(1)
        gaps = (after[name] - after[name][first[name]]).abs().amax(1)
        copy = (first[name] != torch.arange(len(moved))) & (moved > 0) & (gaps <= SAME * moved)
        if copy.any():
            most = {"moved": moved[copy].max().item(), "gap": gaps[copy].max().item()}
            yield name, {"units": len(moved), "copies": int(copy.sum()), "steps": record.rounds, **most}


def _layers(loop: TrainLoop) -> Iterator[tuple[str, Any]]:
    for prefix, model in loop.modules.items():
        for path, module in model.named_modules(prefix=prefix):
            weight = dict(module.named_parameters(recurse=False)).get("weight") if isinstance(module, LAYERS) else None
            # shards and quantised weights are no plain parameters
            if type(weight) is nn.Parameter and weight.ndim > 1 and len(weight) > 1 and weight.is_floating_point():
                yield f"{path}.weight".lstrip("."), module


def _units(loop: TrainLoop) -> dict[str, torch.Tensor]:
    units = {}
    for name, layer in _layers(loop):
        entries = layer.weight.detach().flatten(1)
        bias = [] if layer.bias is None else [layer.bias.detach()[:, None]]
        units[name] = torch.cat([entries[:, :: -(-entries.shape[1] // ENTRIES)], *bias], 1).double().cpu()
    return units


def _first_of(rows: torch.Tensor) -> torch.Tensor:
    """For each row the first one that is equal to it: often itself."""
    distinct, group = torch.unique(rows, dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(rows)).scatter_reduce(0, group, torch.arange(len(rows)), "amin")
    return first[group]
