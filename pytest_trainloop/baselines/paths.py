"""Names of modules in a run that has several models of one class: a copy that averages the weights, a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop import members

if TYPE_CHECKING:
    from torch import nn

    from pytest_trainloop.recording.parameters import ParameterTable


class Paths:
    """Paths that are unique: those of a second model end on `` (2)``, as the names of its parameters do.

    Models without a tensor (a loss module that is made anew each step) share their paths.
    """

    def __init__(self) -> None:
        self._ending: dict[int, str] = {}
        self._taken: set[str] = set()

    def of_call(self, module: nn.Module, table: ParameterTable) -> str:
        """The path of a module; its class where it is the root of a model."""
        return table.path_of(module) + self._ending_of(module, table)

    def of_own(self, module: nn.Module, path: str, name: str, table: ParameterTable) -> str:
        """The name of a buffer of a module."""
        return (f"{path}.{name}" if path else name) + self._ending_of(module, table)

    def _ending_of(self, module: nn.Module, table: ParameterTable) -> str:
        if id(module) not in self._ending:
            for _, entered in list(table.named_modules()):  # a model is entered before its parts
                if id(entered) not in self._ending:
                    self._enter(entered, table)
        return self._ending.get(id(module), "")

    def _enter(self, model: nn.Module, table: ParameterTable) -> None:
        parts = [part for part in members.modules(model) if id(part) not in self._ending and table.knows(part)]
        paths = [table.path_of(part) for part in parts]
        ending = ""
        if any(True for _ in (*members.parameters(model), *members.buffers(model))):
            number = 1
            while any(path + ending in self._taken for path in paths):
                number += 1
                ending = f" ({number})"
            self._taken.update(path + ending for path in paths)
        self._ending.update((id(part), ending) for part in parts)
