"""What every check says of every loop and loss of the corpora, stored, and what a change of the code changes in it.

python scripts/verdicts.py run [--only CHECK,...] [--own] [--changed [COMMIT]] [-k TEXT] [--missing] [--share I/N]
                               [--minutes M] [--store]
python scripts/verdicts.py compare [COMMIT]

``run`` judges loops and prints every verdict that differs from the stored ones (tests/verdicts.tsv), then four
counts: faults lost, correct loops accused or advised, other verdicts changed. It ends with 1 where one of the first
three is not 0, or more than one in 20 loops differs otherwise: a verdict that got better need not stop a draw. It also
names the faulty loops whose finding has another text than the stored one (tests/texts).
``--only`` runs some checks on all loops. ``--own`` runs on each faulty loop of the pairs the check that names its
fault, and no other. ``--changed`` runs the checks whose own files differ from a commit (default: the last one that
changed the stored verdicts), and on every tenth loop, drawn by the commit, the checks that import changed code.
``--share`` and ``--minutes`` leave loops out, drawn by the commit too, and say how many. ``--store`` writes what
differs into the stored files. ``compare`` compares the stored verdicts with those of a commit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import multiprocessing
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trainloop.core import registry  # noqa: E402
from scripts.imports import checks_touched  # noqa: E402
from tests.helpers import texts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STORED = ROOT / "tests" / "verdicts.tsv"

TIMEOUT = 600.0
"""Seconds that one run of ``fit`` may take: no verdict shall depend on how busy the machine is."""

Verdicts = dict[str, str]
"""By check: the outcome, and after it each finding with level, cause and line."""


@dataclass
class Stored:
    """The stored verdicts. Of each check the commonest outcome is written once; a loop has a line with all others."""

    usual: Verdicts = field(default_factory=dict)
    loops: dict[str, Verdicts] = field(default_factory=dict)

    @classmethod
    def parsed(cls, text: str) -> Stored:
        found = cls()
        for line in text.splitlines():
            name, *fields = line.split("\t")
            pairs = (each.partition(" ") for each in fields)
            verdicts = {check: verdict for check, _, verdict in pairs}
            if name == "usual":
                found.usual = verdicts
            else:
                found.loops[name] = verdicts
        return found

    def of(self, name: str, check: str) -> str:
        """The stored verdict; empty for a loop that is not stored."""
        return self.loops[name].get(check, self.usual.get(check, "")) if name in self.loops else ""

    def put(self, name: str, judged: Mapping[str, str]) -> None:
        whole = {check: self.of(name, check) for check in self.loops.get(name, ())} | dict(judged)
        self.loops[name] = {check: verdict for check, verdict in whole.items() if verdict != self.usual.get(check)}

    def text(self) -> str:
        def line(name: str, verdicts: Verdicts) -> str:
            return "\t".join([name, *(f"{check} {verdicts[check]}" for check in sorted(verdicts))])

        return "\n".join([line("usual", self.usual), *(line(n, self.loops[n]) for n in sorted(self.loops)), ""])


def subjects() -> dict[str, Callable[..., Any]]:
    """Every loop and loss of the corpora by a name of its own, with the function that judges it by some checks."""
    from pytest_trainloop import check_loop, check_loss
    from tests.loops.corpus import FAULTS, ODD, PAIRS, judged
    from tests.losses.corpus import MODULES
    from tests.losses.corpus import ODD as ODD_LOSSES
    from tests.losses.corpus import PAIRS as LOSS_PAIRS

    def loop(make: Any, **chosen: Any) -> Callable[..., Any]:
        return lambda only: check_loop(make, only=only, raises=False, timeout=TIMEOUT, **chosen)

    def faulty(pair: Any) -> Callable[..., Any]:
        return lambda only: judged(pair, pair.faulty, only=only, timeout=TIMEOUT)

    def loss(given: Any) -> Callable[..., Any]:
        return lambda only: check_loss(given, only=only, raises=False)

    found = {}
    for name, odd in ODD.items():
        found[f"correct {name}"] = loop(odd.make, skip={} if odd.fixed_seed_ok else {"determinism": odd.why})
    for name, pair in PAIRS.items():
        found[f"faulty {name}"] = faulty(pair)
        found[f"repaired {name}"] = loop(pair.fixed)
    found |= {f"faulty thread {name}": loop(fault.make) for name, fault in FAULTS.items()}
    found |= {f"correct loss {name}": loss(given) for name, given in {**ODD_LOSSES, **MODULES}.items()}
    for name, pair in LOSS_PAIRS.items():
        found |= {f"faulty loss {name}": loss(pair.faulty), f"repaired loss {name}": loss(pair.fixed)}
    return found


@cache
def pairs() -> dict[str, Any]:
    """The pairs by the names of their faulty loops and losses."""
    from tests.loops.corpus import PAIRS
    from tests.losses.corpus import PAIRS as LOSS_PAIRS

    return {f"faulty {name}": p for name, p in PAIRS.items()} | {f"faulty loss {n}": p for n, p in LOSS_PAIRS.items()}


def shown(result: Any) -> str:
    """One check's verdict in a line, without what a machine decides (seconds) or the number of a line."""
    from pytest_trainloop.core.finding import code_of

    outcome = result.outcome
    if outcome == "skipped" and not result.applies:
        outcome = "absent"
    lines = {(f.level, f.cause, " ".join(code_of(f.where).split())) for f in result.findings}
    found = [f"{level} {cause} @ {line}" if line else f"{level} {cause}" for level, cause, line in sorted(lines)]
    return "; ".join([outcome, *found])


def judge(job: tuple[str, tuple[str, ...] | None]) -> tuple[str, Verdicts, str]:
    """One loop's verdicts by some checks, None for all; and of a pair the text of the finding that it is for."""
    name, only = job
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            report = _subjects()[name](only)
            text = texts.text_of(report, pairs()[name]) if name in pairs() else ""
            return name, {r.check: shown(r) for r in report.results}, text
    except Exception as error:  # a loop that cannot be judged at all is a difference too
        return name, dict.fromkeys(only or ("all",), f"not judged; {type(error).__name__}"), ""


_subjects = cache(subjects)


def drawn(name: str) -> float:
    """A number from 0 to 1 for each loop, another one for each commit."""
    return int(hashlib.sha256(f"{_commit()} {name}".encode()).hexdigest()[:8], 16) / 16**8


@cache
def _commit() -> str:
    return _git("rev-parse", "HEAD").strip()


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def jobs(given: argparse.Namespace, stored: Stored) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """What to judge: the name of each loop, and the checks."""
    of_loops, of_losses = registry.of("loop"), registry.of("loss")
    whole, part = set(of_loops) | set(of_losses), set[str]()
    if given.only:
        whole = set(given.only.split(","))
        if unknown := sorted(whole - set(registry.registered())):
            raise SystemExit(f"{unknown[0]} is no check")
    if given.changed is not None:
        base = given.changed or _git("log", "-1", "--format=%H", "--", str(STORED)).strip() or "HEAD"
        whole, part = checks_touched(_git("diff", "--name-only", base).split())
        print(f"changed: {', '.join(sorted(whole)) or 'no check'}; {len(part)} share changed code")
    index, count = map(int, given.share.split("/"))
    for name in sorted(_subjects(), key=drawn):
        mine = of_losses if " loss " in name else of_loops
        chosen = tuple(c for c in mine if c in whole or (c in part and drawn(name) < 0.1))
        if given.own:
            chosen = (pairs()[name].check,) if name in pairs() and pairs()[name].check in chosen else ()
        if stored.loops and not given.store and not given.k and name not in stored.loops:
            continue  # nothing to compare with: --missing --store judges it
        known = given.missing and name in stored.loops
        if chosen and given.k in name and not known and int(drawn(name) * 16**8) % count == index:
            yield name, None if len(chosen) == len(mine) else chosen


def run(given: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    stored = Stored.parsed(STORED.read_text(encoding="utf-8")) if STORED.exists() else Stored()
    todo, differs, began, done = list(jobs(given, stored)), Difference(), time.monotonic(), 0
    part = given.only or given.k or given.missing or given.changed is not None or given.minutes or given.share != "0/1"
    # no multiprocessing.Pool: its processes may have no children, and loaders and ranks have
    forks = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(given.processes, mp_context=forks) as pool:
        waiting = [pool.submit(judge, job) for job in todo]
        for ended in concurrent.futures.as_completed(waiting):
            (name, found, text), done = ended.result(), done + 1
            for check, verdict in found.items():
                differs.note(name, check, stored.of(name, check), verdict)
            if text and text != texts.stored(pairs()[name].check).get(pairs()[name].name):
                print(f"{name}: another text", flush=True)
                if given.store:
                    texts.store(pairs()[name], text, {pair.name for pair in pairs().values()})
            if given.store:
                stored.put(name, found)
                if done % 50 == 0:
                    STORED.write_text(stored.text(), encoding="utf-8")
            if given.minutes and time.monotonic() - began > 60 * given.minutes:
                pool.shutdown(cancel_futures=True)
                break
    for name in sorted(set(stored.loops) - set(_subjects()) if not part else ()):
        differs.note(name, "all", "stored", "there is no such loop")
        stored.loops.pop(name)
    if given.store:
        if not stored.usual:
            settle(stored)
        STORED.write_text(stored.text(), encoding="utf-8")
    if missing := len(set(_subjects()) - set(stored.loops)):
        print(f"{missing} loops and losses have no stored verdicts: run --missing --store")
    left = f", {len(todo) - done} left out" if done < len(todo) else ""
    print(f"{done} loops and losses judged in {time.monotonic() - began:.0f} s{left}")
    return differs.summed_up(done)


def settle(stored: Stored) -> None:
    """Choose the usual outcome of each check, once: a later change of it would rewrite every line."""
    counted: dict[str, Counter[str]] = {}
    for verdicts in stored.loops.values():
        for check, verdict in verdicts.items():
            counted.setdefault(check, Counter())[verdict] += 1
    stored.usual = {check: of.most_common(1)[0][0] for check, of in sorted(counted.items())}
    for name, verdicts in list(stored.loops.items()):
        stored.put(name, verdicts)


@dataclass
class Difference:
    """What differs between two sets of verdicts."""

    counted: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)
    """Verdicts of checks that are not stored yet, where nothing was found."""

    def note(self, name: str, check: str, before: str, after: str) -> None:
        if before == after or ((name, check) in BY_TIMING and {before, after} <= {*_USUAL}):
            return
        if not before and after in _USUAL:
            self.first[after] += 1
            return
        accused = not name.startswith("faulty ") and _is_bad(after) and not _is_bad(before)
        lost = name.startswith("faulty ") and "fault " in before and "fault " not in after
        advised = not name.startswith("faulty ") and "advice " in after and "advice " not in before
        kind = "correct loops advised" if advised else "other verdicts changed"
        kind = "correct loops accused" if accused else "faults lost" if lost else kind
        self.counted[kind] += 1
        marks = {"correct loops accused": "ACCUSED ", "correct loops advised": "ADVISED ", "faults lost": "LOST "}
        mark = marks.get(kind, "")
        print(f"{mark}{name}: {check}: {before or 'not stored'} -> {after}", flush=True)

    def summed_up(self, judged: int) -> int:
        """1 where something is lost, accused or advised, or where more than few of so many loops differ otherwise."""
        if self.first:
            print(f"not stored yet: {', '.join(f'{n} {outcome}' for outcome, n in self.first.most_common())}")
        kinds = ("faults lost", "correct loops accused", "correct loops advised", "other verdicts changed")
        print(", ".join(f"{self.counted[kind]} {kind}" for kind in kinds))
        others = self.counted.pop(kinds[-1], 0)
        return int(bool(self.counted) or others > judged / FEW)


_USUAL = ("passed", "absent", "skipped")

FEW = 20
"""Of so many loops one may differ otherwise: some stored verdicts are older than the code."""

BY_TIMING = {("correct prefetch_thread", "precision_parity")}
"""Where a thread of the loop's own decides how many steps a run makes, and so whether a check can compare two."""


def _is_bad(verdict: str) -> bool:
    return verdict.startswith(("failed", "error", "not judged", "unreliable"))


def compare(commit: str) -> int:
    before = Stored.parsed(_git("show", f"{commit}:{STORED.relative_to(ROOT).as_posix()}"))
    after, differs = Stored.parsed(STORED.read_text(encoding="utf-8")), Difference()
    for name in sorted({*before.loops, *after.loops}):
        if name not in after.loops or name not in before.loops:
            differs.note(name, "all", "stored" if name in before.loops else "", "stored" if name in after.loops else "")
            continue
        for check in sorted({*before.usual, *after.usual}):
            differs.note(name, check, before.of(name, check), after.of(name, check))
    return differs.summed_up(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running = commands.add_parser("run")
    running.add_argument("--only", default="", help="checks, separated by commas")
    running.add_argument("--own", action="store_true", help="each faulty loop by the check that names its fault")
    running.add_argument("--changed", nargs="?", const="", help="checks whose code differs from a commit")
    running.add_argument("-k", default="", help="only loops whose name contains this")
    running.add_argument("--missing", action="store_true", help="only loops that have no stored verdicts yet")
    running.add_argument("--share", default="0/1", help="I/N: one of N equal parts")
    running.add_argument("--minutes", type=float, default=0.0, help="stop after so many")
    running.add_argument("--processes", type=int, default=2)
    running.add_argument("--store", action="store_true", help="write what differs into the stored file")
    comparing = commands.add_parser("compare")
    comparing.add_argument("commit", nargs="?", default="HEAD")
    given = parser.parse_args()
    return run(given) if given.command == "run" else compare(given.commit)


if __name__ == "__main__":
    raise SystemExit(main())
