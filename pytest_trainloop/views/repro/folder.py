"""The files of a bundle, from the data of the JSON report. Standard library only."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.report.text import failure_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.core.report.entry import Entry

VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_", "MKL_", "CUDA", "CUBLAS", "PYTORCH", "TORCH", "NVIDIA_TF32")
"""Beginnings of the environment variables that are kept."""

_SCRIPT = '''"""{headline}

    python reproduce.py          shows it and exits 1, or 0 once it is mended
    python reproduce.py ROOT     the same, where the project lies in ROOT and not around this folder
"""

import sys

try:
    from pytest_trainloop.frontends.plugin.reproduce import main
except ImportError:
    sys.stderr.write("reproduce.py needs pytest-trainloop {version}: pip install pytest-trainloop\\n")
    sys.exit(2)

sys.exit(
    main(
        __file__,
        test={test!r},
        check={check!r},
        cause={cause!r},
        options={options!r},
        root={root!r},
        folder={folder!r},
        ini={ini!r},
        batch={batch!r},
    )
)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A root cause: the faults of one cause in the result of one check, or the exception that the project raised."""

    entry: Entry
    cause: str
    """Empty for an exception, and for a failure that has no finding."""
    faults: tuple[Finding, ...]

    @property
    def folder(self) -> str:
        """The name of its folder: ``test_train.test_gpt/step_order.not_zeroed``."""
        file, _, inside = self.entry.loop.partition("::")
        stem = file.rpartition("/")[2].removesuffix(".py")
        result = self.entry.result
        return f"{_name(f'{stem}.{inside}'.strip('.'))}/{_name(f'{result.check}.{self.cause or result.outcome}')}"

    @property
    def headline(self) -> str:
        result = self.entry.result
        summary = self.faults[0].summary if self.faults else result.reason or "failed"
        return f"{result.check}{f':{self.cause}' if self.cause else ''}  {summary}"


def failures(entries: Sequence[Entry]) -> Iterator[Failure]:
    """Each root cause, and each exception of the project's own, of the results of one loop."""
    by_check = {entry.result.check: entry for entry in entries}
    for root in root_causes([entry.result for entry in entries if entry.result.outcome == "failed"]):
        entry = by_check[root.result.check]
        for cause in dict.fromkeys(fault.cause for fault in root.result.faults) or [""]:
            yield Failure(entry=entry, cause=cause, faults=tuple(f for f in root.result.faults if f.cause == cause))
    for entry in entries:
        if entry.result.outcome == "error":
            yield Failure(entry=entry, cause="", faults=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a script needs to run the failed test as it was run."""

    root: str
    """The root directory of pytest."""
    folder: str
    """The folder that pytest was called in, relative to it."""
    ini: str
    """The ini file, relative to it; empty for none."""
    options: tuple[str, ...]
    """The command line, without the tests and what writes files."""


def files(
    failure: Failure,
    session: Session,
    environment: Mapping[str, Any],
    proofs: Mapping[str, str],
    *,
    batch: str = "",
) -> dict[str, str]:
    """The texts of a bundle by the name of the file; ``batch`` is the file of the smallest batch, if it is one that
    shows the failure."""
    result = failure.entry.result
    own = replace(result, findings=failure.faults) if failure.faults else result
    script = _SCRIPT.format(
        headline=failure.headline.replace("\\", "\\\\").replace('"""', "'''"),
        version=environment.get("pytest_trainloop") or "",
        test=failure.entry.nodeid,
        check=result.check,
        cause=failure.cause,
        options=list(session.options),
        root=session.root,
        folder=session.folder,
        ini=session.ini,
        batch=batch,
    )
    finding = {"loop": failure.entry.loop, "nodeid": failure.entry.nodeid, **own.to_json()}
    finding.pop("learning_rates", None)
    return {
        "reproduce.py": script,
        "finding.txt": failure_text(own, proofs).rstrip() + "\n",
        "finding.json": _json(finding),
        "environment.json": _json({**environment, "variables": _variables(), "packages": _packages()}),
    }


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, default=str) + "\n"


def _variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def _packages() -> dict[str, str]:
    """Every installed distribution with its version."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=sys.path)}
    return dict(sorted((str(name), version) for name, version in found.items() if name))


def _name(text: str) -> str:
    """A name that every file system takes; one that is cut or changed ends in a part of its hash."""
    name = re.sub(r"[^\w.=,+-]", "_", text.replace("::", ".").replace("[", "-").replace("]", ""))
    return name if len(name) <= 80 else f"{name[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
