"""Every verdict of the whole battery over both corpora, as JSON lines; and what differs between two such files.

    python scripts/verdicts.py run OUT.jsonl [--shard I/N]
    python scripts/verdicts.py compare BEFORE.jsonl... -- AFTER.jsonl... [--renames RENAMES.json]

A refactor is shown to keep its verdicts by running this on the commit before it and on the commit after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


def subjects():
    from pytest_trainloop.runner import check_loop, check_loss
    from tests.loops.faults import PAIRS
    from tests.loops.odd import ODD
    from tests.losses import ODD as ODD_LOSSES
    from tests.losses import PAIRS as LOSS_PAIRS
    from tests.losses.modules import MODULES

    for name, pair in sorted(PAIRS.items()):
        yield f"faulty:{name}", check_loop, pair.faulty
        yield f"fixed:{name}", check_loop, pair.fixed
    for name, loop in sorted(ODD.items()):
        yield f"odd:{name}", check_loop, loop.make
    for name, pair in sorted(LOSS_PAIRS.items()):
        yield f"faulty loss:{name}", check_loss, pair.faulty
        yield f"fixed loss:{name}", check_loss, pair.fixed
    for name, loss in sorted({**ODD_LOSSES, **MODULES}.items()):
        yield f"odd loss:{name}", check_loss, loss


def verdicts(report):
    return {
        r.check: {"outcome": r.outcome, "findings": sorted([f.level, f.cause] for f in r.findings), "reason": r.reason}
        for r in report.results
    }


def run(out: Path, index: int, count: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = {json.loads(line)["subject"] for line in out.read_text().splitlines()} if out.exists() else set()
    with out.open("a", encoding="utf-8") as file:
        for number, (name, check, subject) in enumerate(subjects()):
            if number % count != index or name in done:
                continue
            began = time.perf_counter()
            more = {"seconds": 600.0} if check.__name__ == "check_loop" else {}
            try:
                found = verdicts(check(subject, raises=False, **more))
            except Exception as error:
                found = {"battery": {"outcome": f"raised {type(error).__name__}: {error}", "findings": [], "reason": ""}}
            seconds = round(time.perf_counter() - began, 2)
            file.write(json.dumps({"subject": name, "seconds": seconds, "verdicts": found}) + "\n")
            file.flush()


if __name__ == "__main__":
    out, shard = Path(sys.argv[2]), sys.argv[4]
    i, n = shard.split("/")
    run(out, int(i), int(n))
