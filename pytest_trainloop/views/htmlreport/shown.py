"""A picture of a loop as the page shows it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from pytest_trainloop.views.htmlreport.drawing import Key


class Shown:
    """One picture from the JSON report; it is drawn when the page asks for it."""

    def __init__(self, anchor: str, data: Mapping[str, Any]) -> None:
        self.anchor = anchor
        self.data = data

    def rank(self, check: str, cause: str) -> int | None:
        """How well it shows a failure, 0 is best; None where it does not belong to it."""
        names: Sequence[str] = self.data.get("checks", ())
        ranks = [i for i, name in enumerate(names) if name in (check, f"{check}:{cause}")]
        return min(ranks, default=None)

    @cached_property
    def drawing(self) -> Markup:
        """The picture as ``<svg>``; a sentence in its place where that fails, since the page has more to say."""
        from markupsafe import escape

        from pytest_trainloop.views.htmlreport.drawing import draw

        try:
            return draw(self.data, self.anchor)
        except Exception as error:
            return escape(f"This could not be drawn; {type(error).__name__}: {error}; please report it.")

    @cached_property
    def keys(self) -> Sequence[Key]:
        from pytest_trainloop.views.htmlreport.drawing import keys

        return keys(self.data)

    @property
    def alt(self) -> str:
        """The picture in words, for who cannot see it."""
        from pytest_trainloop.views.htmlreport.drawing import in_words

        return in_words(self.data)

    @property
    def zero(self) -> str:
        """What the mark of a 0 in a map means; empty where none is drawn."""
        means: str = self.data["colour"].get("zero", "")
        return means if any(0 in row for row in self.data["cells"]) else ""

    @property
    def span(self) -> tuple[str, str]:
        """The values at the two ends of the ramp of a map."""
        from pytest_trainloop.views.htmlreport.ramps import span

        return span(self.data)
