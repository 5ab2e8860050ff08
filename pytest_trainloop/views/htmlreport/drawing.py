"""Draws curves, bars and maps as SVG, with matplotlib: text stays text, and colours are those of the page.

A drawing names its colours by CSS variables, so that the page can change them; names of the user's are never read as
mathematics, and settings of the user's for matplotlib do not count.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    Formatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from pytest_trainloop.views.htmlreport import ramps
from pytest_trainloop.views.htmlreport.ramps import plain
from pytest_trainloop.views.pictures.picture import widened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WIDTH = 330
"""Units of a drawing's width, about the pixels that a phone has for it; a letter has 10. The page scales it."""

HEIGHT = 185

_ROW = 14
"""Height of a bar or of a row of a map."""

_LETTER = 5.7
"""Width of a letter at the size of tick labels."""

_LONGEST_LABEL = 24

SERIES = 8
"""Colours for curves of equal rank; a further one uses the colours again with another dash."""

COLOURS = {
    "text": "#0a0001",
    "muted": "#0a0002",
    "grid": "#0a0003",
    "bad": "#0a0004",
    "own": "#0a0005",
    "reference": "#0a0006",
    **{f"series-{i}": f"#0a01{i:02x}" for i in range(SERIES)},
}
"""A placeholder for each colour of the page, by the name of its CSS variable."""

_HUE = (0.22, 0.53, 0.93)
"""Of a map, whose cells differ in opacity: visible on white and on black."""

_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.usetex": False,
    "axes.unicode_minus": False,
    "font.size": 10,
    "axes.linewidth": 0.8,
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a drawing's legend: its name, the colour's variable, and how the line is dashed."""

    name: str
    colour: str
    dash: str = "solid"


def draw(picture: Mapping[str, Any], name: str) -> Markup:
    """The picture as one ``<svg>``; ``name`` is its own on the page."""
    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")  # a sign that the font lacks is the browser's to find
        mpl.rcdefaults()
        mpl.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        figure = {"curves": _curves, "bars": _bars, "map": _map}[picture["kind"]](picture)
        stream = StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = _for_the_page(stream.getvalue())
    for label in picture.get("labels", ()):
        if _short(label) != label:
            text = f">{escape(_short(label))}</text>"
            svg = svg.replace(text, f">{escape(_short(label))}<title>{escape(label)}</title></text>", 1)
    return Markup(svg)  # matplotlib has escaped what it was given


def keys(picture: Mapping[str, Any]) -> list[Key]:
    """The legend; none for a single curve whose name the axis has."""
    drawn = [*picture.get("curves", ()), *picture.get("bars", ())]
    return [Key(each["name"], *_style(drawn, i)) for i, each in enumerate(drawn)] if len(drawn) > 1 else []


def in_words(picture: Mapping[str, Any]) -> str:
    """Title and values of a picture in a sentence."""
    parts = [picture["title"]]
    for curve in picture.get("curves", ()):
        values = [value for value in curve["y"] if value is not None]
        if values:
            parts.append(f"{curve['name']}: {values[0]:g} to {values[-1]:g}")
    for bar in picture.get("bars", ()):
        parts.extend(
            f"{label}: {value:g}" for label, value in zip(picture["labels"], bar["values"], strict=False) if value
        )
    return "; ".join(parts[:12])


def _style(drawn: Sequence[Mapping[str, Any]], index: int) -> tuple[str, str]:
    role = drawn[index].get("role", "own")
    if role == "each":
        rank = sum(other.get("role") == "each" for other in drawn[:index])
        return f"series-{rank % SERIES}", ("solid", "dashed", "dotted")[rank // SERIES % 3]
    return _ROLES[role]


_ROLES = {
    "own": ("own", "solid"),
    "reference": ("reference", "dashed"),
    "event": ("bad", "points"),
    "faint": ("muted", "faint"),
}

_LINE_STYLES = {"solid": _DASHES[0], "faint": _DASHES[0], "dashed": _DASHES[1], "dotted": _DASHES[2], "points": "none"}


def _canvas(height: float, left: float, right: float = 8, top: float = 8, bottom: float = 32) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, 1 - (top + bottom) / height))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(COLOURS["grid"])
    axes.tick_params(length=0, pad=4, labelcolor=COLOURS["muted"], labelsize=10)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _titled(axis: Mapping[str, Any]) -> str:
    return f"{axis['title']} ({axis['unit']})" if axis.get("unit") and axis["title"] else axis["title"]


def _curves(picture: Mapping[str, Any]) -> Figure:
    figure, axes = _canvas(HEIGHT, left=52)
    drawn = picture["curves"]
    for i, curve in enumerate(drawn):
        colour, dash = _style(drawn, i)
        faint = dash == "faint"
        axes.plot(
            curve["x"],
            [float("nan") if value is None else value for value in curve["y"]],
            color=COLOURS[colour],
            linestyle=_LINE_STYLES[dash],
            linewidth=0.9 if faint else 1.6,
            alpha=0.8 if faint else None,
            marker="o" if dash == "points" or sum(v is not None for v in curve["y"]) == 1 else None,
            markersize=4,
            drawstyle="steps-post" if curve.get("stepped") else "default",
            zorder={"faint": 2, "event": 5}.get(curve.get("role", ""), 3),
        )
    axes.grid(True, color=COLOURS["grid"], linewidth=0.6, clip_on=False)
    _scaled(axes.xaxis, picture["x"], whole=all(float(x).is_integer() for curve in drawn for x in curve["x"]))
    values = [value for curve in drawn for value in curve["y"] if value is not None]
    _scaled(axes.yaxis, picture["y"], whole=all(float(value).is_integer() for value in values))
    _marks(axes, picture)
    if values and picture["y"].get("scale") != "log":
        axes.update_datalim([(0.0, value) for value in widened(values)], updatex=False)
        axes.autoscale_view(scalex=False)
    axes.set_xlabel(_titled(picture["x"]), color=COLOURS["muted"])
    axes.set_ylabel(_titled(picture["y"]), color=COLOURS["muted"])
    return figure


def _bars(picture: Mapping[str, Any]) -> Figure:
    labels = [_short(label) for label in picture["labels"]]
    groups = picture["bars"]
    height = max(90, len(labels) * max(_ROW, 9 * len(groups)) + 44)
    figure, axes = _canvas(height, left=_room(labels), right=14)
    for i, bar in enumerate(groups):
        size = 0.8 / len(groups)
        axes.barh(
            [row - 0.4 + size * (i + 0.5) for row in range(len(labels))],
            [value or 0 for value in bar["values"]],
            height=size * 0.92,
            color=COLOURS[_style(groups, i)[0]],
        )
    axes.grid(True, axis="x", color=COLOURS["grid"], linewidth=0.6, clip_on=False)
    _named(axes.yaxis, labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    _scaled(axes.xaxis, picture["x"])
    _marks(axes, picture)
    axes.set_xlabel(_titled(picture["x"]), color=COLOURS["muted"])
    return figure


def _map(picture: Mapping[str, Any]) -> Figure:
    labels = [_short(label) for label in picture["labels"]]
    columns = picture["columns"]
    height = max(90, len(labels) * _ROW + 44)
    figure, axes = _canvas(height, left=_room(labels))
    opacity = ramps.opacity(picture["cells"], picture["colour"])
    axes.imshow([[(*_HUE, value) for value in row] for row in opacity], aspect="auto", interpolation="none")
    for row, cells in enumerate(picture["cells"]):
        if stretches := ramps.zeros(cells, picture["colour"]):
            place = (row - 0.3, 0.6)
            axes.broken_barh(stretches, place, facecolor="none", edgecolor=COLOURS["bad"], linewidth=0, hatch="/////")
    _named(axes.yaxis, labels)
    every = max(1, -(-len(columns) // 8))
    ticks = range(0, len(columns), every)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FixedFormatter([plain(columns[i]) for i in ticks]))
    axes.set_xlabel(_titled(picture["x"]), color=COLOURS["muted"])
    return figure


def _marks(axes: Axes, picture: Mapping[str, Any]) -> None:
    for mark in picture.get("marks", ()):
        vertical = mark["axis"] == "x"
        line = axes.axvline if vertical else axes.axhline
        low, high = axes.get_xlim()
        before = vertical and mark["at"] > (low + high) / 2  # the text stays inside of the drawing
        line(mark["at"], color=COLOURS["bad"], linewidth=1, linestyle=_DASHES[1], zorder=4)
        place = (mark["at"], 0.98) if vertical else (0.99, mark["at"])
        axes.annotate(
            mark["text"],
            place,
            xycoords=axes.get_xaxis_transform() if vertical else axes.get_yaxis_transform(),
            xytext=(-4 if before else 4, 0) if vertical else (0, 3),
            textcoords="offset points",
            va="top" if vertical else "bottom",
            ha="left" if vertical and not before else "right",
            fontsize=10,
            color=COLOURS["text"],
            zorder=6,
        )


def _scaled(axis: Any, given: Mapping[str, Any], *, whole: bool = False) -> None:
    if given.get("scale") == "log":
        (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,), numticks=6))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(7 if whole else 5, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(_Numbers())


class _Numbers(Formatter):
    """The fewest digits with which no two ticks read the same."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return plain(x)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        for digits in range(3, 9):
            texts = [plain(value, digits) for value in values]
            if len(set(texts)) == len(texts):
                break
        return texts if len(values) else []


def _named(axis: Axis, labels: Sequence[str]) -> None:
    axis.set_major_locator(FixedLocator(list(range(len(labels)))))
    axis.set_major_formatter(FixedFormatter(list(labels)))


def _short(label: str) -> str:
    """The end of a long name tells more than its beginning."""
    return label if len(label) <= _LONGEST_LABEL else f"…{label[1 - _LONGEST_LABEL :]}"


def _room(labels: Sequence[str]) -> float:
    return 10 + _LETTER * max(map(len, labels), default=4)


_LEFT_OUT = re.compile(
    r"^.*?(?=<svg\b)"
    r"|<metadata>.*?</metadata>"
    r"|<defs>\s*<style\b.*?</style>\s*</defs>"  # it would hold for the whole page
    r"|<!--.*?-->",
    re.DOTALL,
)
"""What the file of a drawing has and a part of a page does not need. Text of the user's is escaped in it."""

_TAG = re.compile(r"<[^>]*>")

_ATTRIBUTES_LEFT_OUT = re.compile(
    r"(?<=<g) id=\"[^\"]*\""
    r"|(?<=<image) id=\"[^\"]*\""
    r"| (?:width|height)=\"[\d.]+pt\""  # the page scales it
    r"| version=\"[^\"]*\""
    r"| xmlns(?::xlink)?=\"[^\"]*\""
    r"| transform=\"rotate\(-0 [^\"]*\""
    r"| font-family: [^;\"]*;?"
    r"|(?<=[:;]) "
)


def _for_the_page(svg: str) -> str:
    """The drawing without what a page has already, its colours by the names of their variables."""
    svg = _TAG.sub(lambda tag: _shortened(tag[0]), _LEFT_OUT.sub("", svg))
    svg = re.sub(r">\s+<", "><", svg).strip()
    while "<g/>" in svg or "<g></g>" in svg:
        svg = svg.replace("<g/>", "").replace("<g></g>", "")
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def _shortened(tag: str) -> str:
    """A tag with one digit behind the point: a tenth of the page's pixel is enough."""
    if "base64" in tag:
        return _ATTRIBUTES_LEFT_OUT.sub("", tag.replace("\n", ""))
    tag = _ATTRIBUTES_LEFT_OUT.sub("", re.sub(r"(\d\.\d)\d+", r"\1", re.sub(r"\s+", " ", tag)))
    return _COLOUR.sub(lambda found: f"var(--{_NAMES[found[0]]})", tag)


_NAMES = {colour: name for name, colour in COLOURS.items()}

_COLOUR = re.compile("|".join(_NAMES))
