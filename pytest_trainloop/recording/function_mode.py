"""The base of the modes that stand between a loop and torch's functions.

It lies below ``tracing`` because ``recording`` and ``runs`` have such modes too; those that look at a watched run are
``tracing.mode.WatchingMode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class FunctionMode(TorchFunctionMode):
    """Gets every call of a torch function that its thread makes while it is on.

    The mode is off while ``call`` runs: what it calls of torch goes to the modes below it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(getattr(func, "__name__", ""), func, args, kwargs or {})

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives. Its caller is two frames up. ``name`` is "__get__" where an attribute is read."""
        return func(*args, **kwargs)
