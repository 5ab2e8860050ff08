"""``python -m pytest_trainloop.views.htmlreport trainloop.json -o report.html``: the page of a stored JSON report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.report import files, schema
from pytest_trainloop.core.report.json import VERSION
from pytest_trainloop.views.htmlreport import missing, page


def main(arguments: list[str] | None = None) -> int:
    """Write the page; 0, or 2 with one sentence for what cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trainloop.views.htmlreport",
        description="Make the HTML report from what --trainloop-json wrote.",
    )
    parser.add_argument("report", type=Path, help="the file that --trainloop-json wrote")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="default: the same name with .html")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        default=Path(),
        help="the folder in which pytest ran, for the source lines (default: this one)",
    )
    given = parser.parse_args(arguments)
    output = given.output or given.report.with_suffix(".html")
    try:
        text = page(_read(given.report), folders=(given.source,))
        refusal = "the report itself" if output == given.report else files.refusal(output)
        if refusal:
            raise UsageError(f"{output} is {refusal}")
        files.write(output, text)
    except OSError as error:
        sys.stderr.write(f"{error.filename or output}: {error.strerror or error}\n")
        return 2
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{output.absolute().as_uri()}\n")
    return 0


def _read(file: Path) -> dict[str, Any]:
    if packages := missing():
        raise UsageError(f"the report needs {packages}")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} holds no JSON: {error}; give the file that --trainloop-json wrote") from None
    if not isinstance(document, dict) or not isinstance(document.get("loops"), list):
        raise UsageError(f"{file} is no report: give the file that --trainloop-json wrote")
    if document.get("version") != VERSION:
        raise UsageError(
            f"{file} is a report of version {document.get('version')!r}; this pytest-trainloop reads version {VERSION}"
        )
    if lack := schema.lacking(document):
        raise UsageError(f"{file} is no whole report, {lack}: give the file that --trainloop-json wrote")
    return document


if __name__ == "__main__":
    sys.exit(main())
