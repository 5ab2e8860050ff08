"""Fill the generated parts of README.md: real failure texts and the table of checks.

python scripts/readme.py           # rewrite them
python scripts/readme.py --check   # exit 1 if they are stale
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trainloop.registry import Judged

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PLANTED = "examples/planted/test_planted.py"
PART = re.compile(r"<!-- begin: (?P<name>[^>]+) -->\n.*?<!-- end: (?P=name) -->", re.DOTALL)


def failures(names: list[str]) -> dict[str, str]:
    """The failure text of each planted fault, as pytest reports it."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        chosen = " or ".join(f"test_{name}[" for name in names).replace("[", "")
        command = [sys.executable, "-m", "pytest", "--trainloop", PLANTED, "-k", chosen, f"--junit-xml={xml}", "-q"]
        subprocess.run([*command, "-p", "no:randomly"], cwd=ROOT, check=False, capture_output=True, timeout=600)
        cases = ET.parse(xml).iter("testcase")
        found = {}
        for case in cases:
            failure = case.find("failure")
            if failure is not None:
                name = case.attrib["name"].partition("[")[0].removeprefix("test_")
                check = case.attrib["name"].partition("[")[2].rstrip("]")
                found[name] = f"{PLANTED.rpartition('/')[2]}::test_{name}[{check}] FAILED\n{failure.text}"
    return found


def checks_table(subject: Judged) -> str:
    """The table of the checks of loops or of losses, from the check files."""
    from pytest_trainloop.registry import of

    rows = [
        f"| `{c.name}` | {c.family} | {c.headline}. | {', '.join(f'`{cause}`' for cause in c.causes)} |"
        for c in of(subject).values()
    ]
    return "\n".join(["| check | family | holds that | causes it tells apart |", "|---|---|---|---|", *rows])


def costs() -> str:
    """The measured figures, as the benchmarks wrote them down."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    start = text.index("| figure")
    return text[start:].partition("\n\n")[0] + "\n\nMeasured by the commands in [benchmarks](benchmarks/README.md)."


def rendered(text: str) -> str:
    """The README with its generated parts made anew."""
    names = re.findall(r"<!-- begin: failure (\w+) -->", text)
    texts = failures(names)

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        if name == "checks":
            body = checks_table("loop")
        elif name == "losses":
            body = checks_table("loss")
        elif name == "costs":
            body = costs()
        else:
            body = f"```\n{texts[name.removeprefix('failure ')]}\n```"
        return f"<!-- begin: {name} -->\n{body}\n<!-- end: {name} -->"

    return PART.sub(part, text)


def main() -> int:
    now = README.read_text(encoding="utf-8")
    made = rendered(now)
    if "--check" in sys.argv[1:]:
        if made != now:
            print("README.md is stale: run python scripts/readme.py")
        return int(made != now)
    README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
