"""Forward passes: which module is called from outside, in which grad, training and autocast mode."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.recording.autocast import autocast
from pytest_trainloop.recording.events import Forward, Place
from pytest_trainloop.recording.hooks import after_modules, before_modules, on_gradient
from pytest_trainloop.recording.networks import name_of_network
from pytest_trainloop.recording.source import frame_in, here, layer, place_of
from pytest_trainloop.recording.train_mode import acts_by_mode, trains

if TYPE_CHECKING:
    from pytest_trainloop.recording.protocol import Observed


_CHECKPOINT = str(Path("torch") / "utils" / "checkpoint.py")


class Modules:
    """Global module hooks."""

    def __init__(self, watch: Observed) -> None:
        self._watch = watch
        self._handles = [
            before_modules(self._enter),
            after_modules(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        watch = self._watch
        if watch.is_suspended:
            return
        with watch.suspended():
            if not watch.thread.modules:
                self._root_called(module)
            watch.thread.modules.append(module)
            self._note_use(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        thread = self._watch.thread
        if self._watch.is_suspended:
            return
        if thread.modules and thread.modules[-1] is module:
            thread.modules.pop()
        if not thread.modules and thread.forward is not None and torch.is_grad_enabled():
            with self._watch.suspended():
                self._follow(thread.forward, output)

    def _follow(self, forward: Forward, output: Any) -> None:
        """Note the backward passes that go through the call's output."""
        watch = self._watch

        def answer(_gradient: torch.Tensor) -> None:
            if watch.backward is not None:
                forward.answered.append(watch.backward.at)

        for tensor in nested.tensors(output):
            if tensor.requires_grad:
                on_gradient(tensor, answer)

    def _root_called(self, module: nn.Module) -> None:
        watch = self._watch
        watch.optimizers.drop_aborted()
        if not watch.table.knows(module) or watch.table_may_be_stale(module):
            watch.enter_module(module, watch.table.modules.get(id(module)) or self._name(module))
        place, site = here()
        modes = self._modes(module)
        watch.thread.forward = Forward(
            at=watch.tick(),
            place=place,
            site=site,
            module=watch.table.path_of(module),
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            training=trains(module),
            autocast=autocast(),
            in_backward=watch.backward is not None,
            in_eval=modes["eval"],
            in_training=modes["training"],
            unlike_parent=modes["unlike parent"],
            below=frozenset(i for p in members.parameters(module) if (i := watch.table.index(p)) is not None),
        )
        watch.add(watch.thread.forward)

    def _name(self, module: nn.Module) -> str:
        """What the project calls a network that it did not declare; the name of its class, where no variable holds it
        and another network has layers of the same paths."""
        table = self._watch.table
        if not table.declaring or table.knows(module):
            return ""
        if name := name_of_network(module):
            return name
        taken, paths = set(table.modules.values()), [path for path, _ in members.named_modules(module)]
        if taken.isdisjoint(paths):
            return ""
        kind = type(module).__name__
        return next(name for n in itertools.count(1) if (name := f"{kind}{n}" if n > 1 else kind) not in taken)

    def _modes(self, root: nn.Module) -> dict[str, tuple[str, ...]]:
        """Modules that act by mode, by the mode that they are in, and those in another mode than what holds them."""
        found: dict[str, list[str]] = {"eval": [], "training": [], "unlike parent": []}
        inside = dict(members.named_modules(root))
        for name, module in inside.items():
            if acts_by_mode(module):
                path = self._watch.table.path_of(module)
                found["training" if trains(module) else "eval"].append(path)
                if name and trains(inside[name.rpartition(".")[0]]) is not trains(module):
                    found["unlike parent"].append(path)
        return {kind: tuple(paths) for kind, paths in found.items()}

    def _checkpoint_place(self) -> Place:
        """The line that called the checkpoint."""
        frame = frame_in(_CHECKPOINT)
        while frame is not None and layer(frame.f_code.co_filename) == 0:
            frame = frame.f_back
        return here()[0] if frame is None else place_of(frame.f_code.co_filename, frame.f_lineno)

    def _note_use(self, module: nn.Module, args: Any) -> None:
        watch = self._watch
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        empty = any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in args)
        checkpointed = not grad and frame_in(_CHECKPOINT) is not None
        for parameter in members.parameters(module, recurse=False):
            index = watch.table.index(parameter)
            if index is None and watch.backward is None and watch.table.knows(module):
                index = watch.enter_replaced(module, parameter)
            if index is None:
                continue
            entry = watch.table.entries[index]
            entry.asked = entry.asked or parameter.requires_grad
            if empty:
                entry.calls_empty += 1
            elif grad:
                entry.calls_with_grad += 1
                entry.calls_in_eval += not trains(module)
            elif checkpointed:
                entry.calls_in_checkpoint += 1
                entry.checkpoint = entry.checkpoint or self._checkpoint_place()
            else:
                entry.calls_without_grad += 1
            if watch.backward is None:
                watch.steps_at_forward[index] = watch.steps_on[index]
