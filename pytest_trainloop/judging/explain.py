"""The pages of the checks, read from the check files, for the terminal and the documentation. No torch, no pytest.

A rule page is the docstring of a check's module: a headline, and sections whose text is indented. ``table`` and
``page`` print it for ``--trainloop-list`` and ``--trainloop-explain``; ``markdown_table`` and ``markdown_page`` write
``docs/checks/`` (scripts/docs.py).
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from pytest_trainloop.core import registry
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.report.sarif import Rule
from pytest_trainloop.declare.knobs import near, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_WIDTH = 100

_WRAPPED_AT = 116
"""Characters of a line without its indent: where the next word would have fit as well, a paragraph ends."""

_GUIDE = re.compile(r"\bdocs/(how-it-decides\.md#[\w-]+)")
"""A section of the guide, as a rule page names it: a link in the documentation, a path everywhere else."""

_TABLE = re.compile(r"(?:^ +\|.*\n)+", re.MULTILINE)

_NEEDS = {"fit": "`fit` or `step`", "run": "`fit`, `step` or `loss`"}
_SUBJECTS = {"loop": ("`TrainLoop`", "../loops.md"), "loss": ("`LossContract`", "../loss-functions.md")}

_BEFORE_CAUSES = ("What it does", "Why is this bad?", "Faulty", "Fixed")
"""Sections of a page in the documentation that come before the causes: whoever has a failure looks for its repair."""

_HAPPENED = re.compile(r"github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|commit|discussions)/|discuss\.pytorch\.org")
"""An address at which somebody had the fault; others describe the function that it is about."""


def table() -> str:
    """Every check with its family and what it holds, in causal order: those of loops, then those of losses."""
    return f"{_rows('check', registry.of('loop'))}\n{_rows('check of a loss', registry.of('loss'))}".rstrip("\n") + "\n"


def _rows(title: str, known: Mapping[str, registry.Check]) -> str:
    if not known:
        return ""
    rows = [(title, "family", "checks that"), *((c.name, c.family, c.headline) for c in known.values())]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "".join(f"{name.ljust(widths[0])}  {family.ljust(widths[1])}  {text}\n" for name, family, text in rows)


def page(name: str) -> str:
    """The rule page of a check with its causes, or of ``check:cause`` that cause alone; of a cause by itself, what
    each check that names it says of it.

    Raises ``UsageError`` for a name that no check or cause has.
    """
    known = registry.registered()
    check, colon, cause = name.partition(":")
    if not colon and check not in known and (named := [f"{c}:{name}" for c in known if name in known[c].causes]):
        return "\n".join(page(each) for each in named)
    if check not in known:
        raise UsageError(_no_such_name(check if colon else name, known))
    found = known[check]
    if not colon:
        causes = "".join(f"  {slug}\n{_described(about)}" for slug, about in found.causes.items())
        return f"{check} ({found.family})\n\n{_TABLE.sub(_in_columns, found.page.strip())}\n\nCauses\n{causes}"
    if cause not in found.causes:
        raise UsageError(f"{check} names no cause {cause!r}; {nearest(cause, found.causes)}")
    return f"{name}\n{_described(found.causes[cause])}\nThe whole page: pytest --trainloop-explain {check}\n"


def _in_columns(table: re.Match[str]) -> str:
    """The rows of a table in columns as wide as a page, with the cells of the widest ones on several lines."""
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table[0].splitlines()]
    del rows[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * len(widths) > _WRAPPED_AT:
        widths[widths.index(max(widths))] -= 1
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        cells = (textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True))
        lines += ["  ".join(["  ", *map(str.ljust, c, widths)]) for c in itertools.zip_longest(*cells, fillvalue="")]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _no_such_name(name: str, known: Mapping[str, registry.Check]) -> str:
    """The refusal of a name, with the check or cause that is near, if any is."""
    by_cause = {cause: f"{check.name}:{cause}" for check in known.values() for cause in check.causes}
    names, stems = [*known, *by_cause], tuple(word[:4] for word in name.split("_") if len(word) > 3)
    close = near(name, names)
    shared = [sum(word.startswith(stems) for word in n.split("_")) if stems else 0 for n in names]
    alike = [n for n, words in zip(names, shared, strict=True) if words == max(shared) > 0]
    if close and (close in alike or not alike):
        return f"there is no check {name!r}; the nearest name is {by_cause.get(close, close)!r}"
    found = ", ".join(repr(by_cause.get(n, n)) for n in alike[:4])
    return f"there is no check {name!r}; {f'near are {found}' if found else '--trainloop-list shows all checks'}"


def _described(cause: registry.Cause) -> str:
    lines = [cause.proof]
    if cause.repair:
        lines.append(f"Repair: {cause.repair}")
    if cause.settle:
        lines.append(f"If it is intended: {cause.settle}")
    if cause.judged:
        lines.append(f"To have it judged: {cause.judged}")
    if cause.explains:
        lines.append(f"May fail with it: {', '.join(cause.explains)}")
    if cause.source:
        lines.append(f"{_where(cause.source)}: {cause.source}")
    if cause.status == "preview":
        lines.append("A preview: reported with --trainloop-preview only")
    return "".join(textwrap.indent(textwrap.fill(line, _WIDTH - 4), "    ") + "\n" for line in lines)


def rule(check: str, cause: str) -> Rule | None:
    """What SARIF tells of a cause; None where this process does not know the check, or it the cause."""
    found = registry.registered().get(check)
    if found is None or cause not in found.causes:
        return None
    about = found.causes[cause]
    lines = [f"{_sentence(_inline(about.proof, ()))}\n"]
    lines += [f"*Repair*: {_sentence(_inline(about.repair, ()))}\n"] if about.repair else []
    lines += [f"*If it is intended*: {_sentence(_inline(about.settle, ()))}\n"] if about.settle else []
    lines += [f"*To have it judged*: {_sentence(_inline(about.judged, ()))}\n"] if about.judged else []
    lines.append(f"`{check}` checks that: {_inline(found.headline, ())}.\n")
    lines += [f"## {heading}\n\n{_section(heading, body, ())}" for heading, body in _sections(found.page)]
    name = f"{check}:{cause}"
    return Rule(proof=_sentence(about.proof), page=page(name), markdown="\n".join(lines), family=found.family)


def markdown_table(subject: registry.Judged, folder: str = "") -> str:
    """A Markdown table of the checks of loops or of losses: name with a link into ``folder``, family, headline."""
    checks = registry.of(subject).values()
    rows = [f"| [`{c.name}`]({folder}{c.name}.md) | {c.family} | {c.headline}. |" for c in checks]
    return "\n".join(["| check | family | checks that |", "|---|---|---|", *rows])


def markdown_causes(subject: registry.Judged) -> str:
    """A Markdown table of the causes that each check of loops or of losses can name, with links to their headings."""
    rows = [
        f"| [`{c.name}`]({c.name}.md) | {', '.join(f'[`{slug}`]({c.name}.md#{slug})' for slug in c.causes)} |"
        for c in registry.of(subject).values()
    ]
    return "\n".join(["| check | causes |", "|---|---|", *rows])


def markdown_page(check: registry.Check, failure: str = "") -> str:
    """The rule page of a check as Markdown, with its data, its causes and the ``failure`` of its faulty example."""
    others = registry.registered().keys() - {check.name}
    source = f"{check.module.replace('.', '/')}.py"
    needs = ", ".join(_NEEDS.get(need, f"`{need}`") for need in sorted(check.needs))
    subject, about = _SUBJECTS[check.subject]
    levels = _levels(check)
    links, advice = (
        ", ".join(f"[`{slug}`](#{slug})" for slug in check.causes if (levels.get(slug) == _ADVICE) is always)
        for always in (False, True)
    )
    lines = [
        f"<!-- Written by scripts/docs.py from {source}: edit that file. -->",
        f"# {check.name}\n",
        f"{_inline(check.headline, ())}.\n",
        f"Your test failed? Go to the cause that the failure names: {links or advice}.\n",
        *([f"Always advice, which fails under `--trainloop-strict` only: {advice}.\n"] if links and advice else []),
        "| | |\n|---|---|",
        f"| judges | a [{subject}]({about}) |",
        f"| family | {check.family} |",
        f"| needs | {f'[{needs}]({about})' if needs else 'nothing further'} |",
        *([f"| options | {', '.join(f'`{option}`' for option in check.options)} |"] if check.options else []),
        f"| in the terminal | `pytest --trainloop-explain {check.name}` |",
        "| a finding | is a [fault or advice](../how-it-decides.md#fault-advice-or-silence); "
        '`skip={"' + check.name + ':CAUSE": "why"}` [turns it into advice](../options.md#per-loop-the-marker), '
        "which then never fails |",
        f"| source | [{source}](../../{source}) |\n",
    ]
    before, after = [], []
    own = re.compile(rf"`({'|'.join(check.causes)})`")
    for heading, body in _sections(check.page):
        text = _GUIDE.sub(r"[how it decides](../\1)", _section(heading, body, others))
        if heading in _BEFORE_CAUSES:
            before.append(f"## {heading}\n\n{text}")
            if heading == "Faulty" and failure:
                before.append(f"The failure says:\n\n```text\n{failure}```\n")
        else:
            text = own.sub(lambda name: f"[{name[0]}](#{name[1]})", text)
            if heading == "How it decides" and levels:
                text += "\nAn empty cell in the last column: the finding is always a fault.\n"
            after.append(f"## {heading}\n\n{text}")
    return "\n".join([*lines, *before, *_causes(check), *after]).rstrip() + "\n"


_ADVICE = "Always advice"


def _levels(check: registry.Check) -> dict[str, str]:
    """When a finding of each cause is advice, by the table of "How it decides"; empty if that has no such column."""
    lines = dict(_sections(check.page))["How it decides"].splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    if not rows or not rows[0][-1].endswith("advice if"):
        return {}
    found: dict[str, dict[str, None]] = {}
    for *cells, advice in rows[2:]:
        for slug in re.findall(r"`([a-z_]+)`", " ".join(cells)):
            if slug in check.causes:
                found.setdefault(slug, {})[advice] = None
    limit = rows[0][-1].removesuffix("advice if")  # "without padding=, "
    return {slug: _level(list(conditions), limit) for slug, conditions in found.items()}


def _level(conditions: Sequence[str], limit: str) -> str:
    """In words: of rows without a condition a finding is a fault, and of "always" advice."""
    if "always" in conditions:
        if len(conditions) > 1:
            return "a fault or advice, by the table below"
        return f"a fault; {limit}advice" if limit else _ADVICE
    some = ", or ".join(condition for condition in conditions if condition)
    return f"a fault; {limit}advice if: {some}" if some else "a fault"


def _causes(check: registry.Check) -> Iterator[str]:
    """The section of the causes. Checks that most of them account for are listed once."""
    yield "## Causes\n"
    levels = _levels(check)
    common, times = Counter(cause.explains for cause in check.causes.values()).most_common(1)[0]
    common = common if times > 2 and 3 * times > len(check.causes) else ()
    if common:
        yield f"If a cause does not say otherwise, these may fail with it: {', '.join(map(_to_page, common))}.\n"
    for slug, cause in check.causes.items():
        yield f"### `{slug}`\n\n{_sentence(_inline(cause.proof, ()))}\n"
        if slug in levels:
            yield f"*Level*: {_sentence(_inline(levels[slug], ()))}\n"
        if cause.repair:
            repair = cause.repair.replace("this line", "the line that `change` names")
            yield f"*Repair*: {_sentence(_inline(repair, ()))}\n"
        if cause.settle or cause.judged:
            skip = f'`skip={{"{check.name}:{slug}": "why"}}`'
            settle = f"{_sentence(_inline(cause.settle, ()))} Or {skip}." if cause.settle else f"{skip}."
            yield f"*If it is intended*: {settle}\n"
        if cause.judged:
            yield f"*To have it judged*: {_sentence(_inline(cause.judged, ()))}\n"
        if cause.explains != common:
            yield f"*May fail with it*: {', '.join(map(_to_page, cause.explains)) or 'no other check'}\n"
        if cause.source:
            yield f"*{_where(cause.source)}*: <{cause.source}>\n"
        if cause.status == "preview":
            yield "*A preview*: reported with `--trainloop-preview` only.\n"


def _where(source: str) -> str:
    return "Seen in" if _HAPPENED.search(source) else "Described in"


def _to_page(name: str) -> str:
    check, _, cause = name.partition(":")
    return f"[`{name}`]({check}.md{'#' + cause if cause else ''})"


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """The sections of a rule page: a line at the margin, and the indented lines below it."""
    for match in re.finditer(r"^(\S[^\n]*)\n((?:[ ]{4}[^\n]*\n|\n(?=\n*[ ]{4}))+)", text.strip() + "\n", re.MULTILINE):
        yield match[1], textwrap.dedent(match[2]).rstrip("\n")


def _section(heading: str, body: str, checks: Collection[str]) -> str:
    if body.startswith(">>> "):
        return "```python\n" + re.sub(r"^(?:>>>|\.\.\.) ?", "", body, flags=re.MULTILINE) + "\n```\n"
    if heading == "References":
        return re.sub(r"^(https://[^ \n]+)", r"<\1>", body, flags=re.MULTILINE).replace("\n", "\n- ").join(["- ", "\n"])
    return "\n\n".join(_blocks(body, checks)) + "\n"


def _blocks(body: str, checks: Collection[str]) -> Iterator[str]:
    """Wrapped paragraphs; what is indented further is kept unchanged."""
    paragraph: list[str] = []
    lines = body.splitlines()
    for n, line in enumerate(lines):
        following = lines[n + 1] if n + 1 < len(lines) else ""
        if line.startswith("    "):
            paragraph.append(line)
            if not following.startswith("    "):
                yield "```text\n" + textwrap.dedent("\n".join(paragraph)) + "\n```"
                paragraph = []
            continue
        if line:
            paragraph.append(line)
        if paragraph and (not following.strip() or following.startswith("    ") or _ends(line, following)):
            yield _inline("\n".join(paragraph), checks)
            paragraph = []


def _ends(line: str, following: str) -> bool:
    return line.endswith(".") and len(line) + 1 + len(following.split(maxsplit=1)[0]) <= _WRAPPED_AT


def _inline(text: str, checks: Collection[str]) -> str:
    """Text of a rule page as Markdown; names of other checks become links."""
    parts = re.split(r"``(.+?)``", text, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        plain = re.sub(r"([*<]|(?<=\w)_(?!\w))", r"\\\1", parts[i])
        parts[i] = re.sub(r"\b\w+\b", lambda m: _link(m[0], checks), plain)
    return "".join(f"`{part}`" if i % 2 else part for i, part in enumerate(parts))


def _link(name: str, checks: Collection[str]) -> str:
    """A link to a check's page; a name without underscore may be a word of the sentence (finite)."""
    return f"[`{name}`]({name}.md)" if name in checks and "_" in name else name


def _sentence(text: str) -> str:
    """Text as a sentence; a name of code that it begins with (``model.eval()``, ``loss = ...``) keeps its case."""
    capital = re.sub(r"^[a-z](?=[a-z'-]*([ ,;:](?!=)|$))", lambda m: m[0].upper(), text)
    return capital + ("" if text.endswith(".") else ".")
