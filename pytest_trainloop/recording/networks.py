"""What the project calls a network that nobody declared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.recording.source import user_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_FRAMES = 6
"""Calling functions of the project whose variables are read."""

MOST_ITEMS = 64
"""Items of a list or dict that are looked at."""


def name_of_network(called: nn.Module) -> str:
    """The path of a module in the variables of the project, as its own code writes it: ``netD``, or ``netD.features``.

    The name of the variable is left out where the project holds no second network.
    """
    networks = _networks()
    for name, network in networks:
        for path, part in members.named_modules(network):
            if part is called:
                return ".".join(filter(None, (name if len(networks) > 1 else "", path)))
    return ""


def _networks() -> list[tuple[str, nn.Module]]:
    """The modules with parameters in the variables of the calling frames, the outermost first; none inside another."""
    named: dict[int, tuple[str, nn.Module]] = {}
    for variable, held in _variables():
        for name, value in ((variable, held), *_items(variable, held)):
            if isinstance(value, nn.Module) and id(value) not in named and any(True for _ in members.parameters(value)):
                named[id(value)] = (name, value)
    inside = {id(part) for _, network in named.values() for part in members.modules(network) if part is not network}
    return [network for key, network in named.items() if key not in inside]


def _items(name: str, held: object) -> Iterator[tuple[str, object]]:
    if isinstance(held, dict):
        yield from ((f"{name}.{key}", value) for key, value in list(held.items())[:MOST_ITEMS])
    elif isinstance(held, (list, tuple)):
        yield from ((f"{name}.{i}", value) for i, value in enumerate(held[:MOST_ITEMS]))


def _variables() -> Iterator[tuple[str, object]]:
    for frame in reversed(user_frames(MOST_FRAMES)):
        yield from list(frame.f_globals.items())
        for name, value in list(frame.f_locals.items()):
            if name != "self":
                yield name, value
            elif isinstance(value, nn.Module):
                yield from value.named_children()
            else:
                yield from list(getattr(value, "__dict__", {}).items())
