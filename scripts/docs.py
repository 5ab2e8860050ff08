"""Write what the documentation has from the code: pages and tables of checks, failure texts, measured costs.

python scripts/docs.py            # write everything
python scripts/docs.py --check    # exit 1 where something is stale, and say what
python scripts/docs.py --fast     # without the failure texts, for which planted loops and examples are trained

Whole files: ``docs/checks/*.md``. What a check says of its faulty example is written only: another torch may give other
numbers, and ``--check`` leaves it as it is. Elsewhere the lines between ``begin: NAME`` and ``end: NAME``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_trainloop.core import registry
from pytest_trainloop.judging import explain
from scripts import change_lines, costs

ROOT = Path(__file__).parents[1]
CHECKS = ROOT / "docs" / "checks"
WITH_PARTS = (
    "README.md",
    "mkdocs.yml",
    "docs/index.md",
    "docs/failures.md",
    "docs/cost.md",
    "docs/contributing/change-lines.md",
)
PLANTED = "examples/planted/test_planted.py"

PART = re.compile(
    r"(?P<begin>^[^\n]*\bbegin: (?P<name>[\w ]+?)(?: -->)?\n)(?P<body>.*?)(?P<end>^[^\n]*\bend: (?P=name)\b)",
    re.M | re.S,
)

EXAMPLE = re.compile(r"^The failure says:\n\n```text\n(.*?)```$", re.M | re.S)

INDEX = """\
<!-- Written by scripts/docs.py: edit scripts/docs.py or the check files. -->
# The checks

The order is causal: a fault that an earlier family finds may explain failures in a later one.

## Of a training loop

{loops}

## Of a loss function

{losses}

## Causes

A failure names one of these. `skip={{"step_order:not_zeroed": "why"}}` leaves one out; the part after the colon is the
cause.

{causes}

{loss_causes}
"""


def failures(names: list[str]) -> dict[str, str]:
    """The failure text of each planted fault, as pytest reports it."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        chosen = " or ".join(f"test_{name}" for name in names)
        command = [sys.executable, "-m", "pytest", "--trainloop", PLANTED, "-k", chosen, f"--junit-xml={xml}", "-q"]
        subprocess.run([*command, "-p", "no:randomly"], cwd=ROOT, check=False, capture_output=True, timeout=600)
        found = {}
        for case in ET.parse(xml).iter("testcase"):
            failure = case.find("failure")
            if failure is not None:
                name, _, check = case.attrib["name"].removeprefix("test_").partition("[")
                item = f"{PLANTED.rpartition('/')[2]}::test_{name}[{check}"
                found[name] = f"```text\n{item} FAILED\n{failure.text}\n```\n"
    return found


def of_examples() -> dict[str, str]:
    """What each check says of the faulty example on its page."""
    from tests.checks import test_every_check as examples

    found = {}
    for name, check in examples.CHECKS.items():
        (result,) = examples.judge(check, "Faulty", only=[name], strict=True).results
        finding = result.findings[0]
        repair = finding.repair.replace("; ", "\n           ")
        found[name] = f"{finding.summary}\ncause      {finding.cause}\nrepair     {repair}\n"
    return found


def of_pages() -> dict[str, str]:
    """The same, as the pages have it."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in CHECKS.glob("*.md")}
    return {name: found[1] for name, text in pages.items() if (found := EXAMPLE.search(text))}


def measured(title: str) -> str:
    """The table below a line of benchmarks/README.md that begins so."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    start = text.index(f"| {title}")
    return text[start:].partition("\n\n")[0].rstrip() + "\n"


def costs_by_check() -> dict[str, str]:
    """The tables of what ``scripts/costs.py`` measured."""
    kept = json.loads(costs.KEPT.read_text(encoding="utf-8"))
    return {"costs by size": costs.by_size(kept), "costs by check": costs.by_check(kept)}


def navigation() -> str:
    """The pages of the checks in mkdocs.yml, by family."""
    lines = ["      - checks/index.md"]
    families: dict[str, list[str]] = {}
    for check in registry.registered().values():
        families.setdefault(check.family.replace("_", " "), []).append(check.name)
    for family, names in families.items():
        lines += [f"      - {family}:", *(f"          - checks/{name}.md" for name in names)]
    return "\n".join(lines) + "\n"


def parts(fast: bool) -> dict[str, str]:
    """The text of each generated part by its name; failure texts only if they are to be made."""
    made = {
        "checks": explain.markdown_table("loop", "docs/checks/") + "\n",
        "losses": explain.markdown_table("loss", "docs/checks/") + "\n",
        "navigation": navigation(),
        "costs": measured("figure"),
        "steps": measured("own steps"),
        **costs_by_check(),
        "change lines": change_lines.table(json.loads(change_lines.KEPT.read_text(encoding="utf-8"))),
    }
    if fast:
        return made
    texts = "".join((ROOT / file).read_text(encoding="utf-8") for file in WITH_PARTS)
    shown = failures(sorted(set(re.findall(r"begin: failure (\w+)", texts))))
    return made | {f"failure {name}": text for name, text in shown.items()}


def filled(text: str, made: dict[str, str], *, fast: bool) -> str:
    """A file with its generated parts written again; a failure text that is not made stays."""

    def part(match: re.Match[str]) -> str:
        keep = fast and match["name"].startswith("failure ")
        return match["begin"] + (match["body"] if keep else made[match["name"]]) + match["end"]

    return PART.sub(part, text)


def generated(*, fast: bool = False, judge: bool = False) -> dict[Path, str]:
    """Every file with something generated in it, as it should be; ``judge``: with the faulty examples judged again."""
    said = of_examples() if judge else of_pages()
    checks = registry.registered().values()
    pages = {CHECKS / f"{check.name}.md": explain.markdown_page(check, said.get(check.name, "")) for check in checks}
    pages[CHECKS / "index.md"] = INDEX.format(
        loops=explain.markdown_table("loop"),
        losses=explain.markdown_table("loss"),
        causes=explain.markdown_causes("loop"),
        loss_causes=explain.markdown_causes("loss"),
    )
    made = parts(fast)
    paths = [ROOT / name for name in WITH_PARTS]
    return pages | {path: filled(path.read_text(encoding="utf-8"), made, fast=fast) for path in paths}


def stale(wanted: dict[Path, str]) -> list[Path]:
    """Files that differ from what they should be, or that no check has."""
    differ = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return sorted([*differ, *(path for path in CHECKS.glob("*.md") if path not in wanted)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is stale")
    parser.add_argument("--fast", action="store_true", help="leave the failure texts as they are")
    given = parser.parse_args()
    wanted = generated(fast=given.fast, judge=not (given.fast or given.check))
    old = stale(wanted)
    for path in old:
        print(f"{'stale' if given.check else 'written'}: {path.relative_to(ROOT)}")
        if not given.check and path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        elif not given.check:
            path.unlink()
    if old and given.check:
        print("run python scripts/docs.py")
    return int(given.check and bool(old))


if __name__ == "__main__":
    raise SystemExit(main())
