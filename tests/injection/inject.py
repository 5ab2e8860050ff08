"""Mistakes of the package, made on purpose: one of its functions raises whenever it is entered.

Each mistake lives in a forked process of its own, since it may leave torch's modes or patched functions behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop import UsageError, check_loop, check_loss
from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.recording import as_caller
from tests.injection.loops import LOOPS, LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop import Result

ASKS = "please report it"
"""Part of the sentence that every error of ours ends with."""

TRIES = 6
"""Checks that may stay silent about one mistake before it counts as silent; the quickest of each name first."""

SECONDS = 60
_MAKES = {make.__name__: make for make in (*LOOPS, *LOSSES)}


class InjectedError(Exception):
    """Of no class that anybody catches by name."""


Kind = Literal["InjectedError", "RuntimeError", "AttributeError"]
"""How a function goes wrong: it raises an exception of its own, or one as torch does; or C code refuses there."""

_STATEMENTS = {"InjectedError": "raise 'note'()", "RuntimeError": "raise 'note'()", "AttributeError": "'note'().nope"}


@dataclass(frozen=True, slots=True, order=True)
class Function:
    """A function of the package, by where its code begins."""

    file: str
    line: int
    name: str

    @classmethod
    def of(cls, code: types.CodeType) -> Function:
        return cls(code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_name)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


@dataclass(frozen=True, slots=True)
class Judging:
    """One check of one loop, and the seconds that it took."""

    seconds: float
    loop: str
    check: str

    def results(self) -> tuple[Result, ...]:
        judge: Any = check_loss if _MAKES[self.loop] in LOSSES else check_loop
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = judge(_MAKES[self.loop], only=[self.check], raises=False)
            str(report)
        return report.results


@dataclass(slots=True)
class Entered:
    """Which functions each judgement enters."""

    by: dict[Function, list[Judging]] = field(default_factory=dict)

    @classmethod
    def in_all(cls, checks_of: Callable[[str], Iterable[str]]) -> Entered:
        """One traced judgement for each loop and check."""
        entered = cls()
        for loop, make in _MAKES.items():
            for check in checks_of("loss" if make in LOSSES else "loop"):
                entered.note(loop, check)
        return entered

    def note(self, loop: str, check: str) -> None:
        forget()
        Judging(0.0, loop, check).results()  # imports are over then
        forget()
        began = time.perf_counter()
        with _entered() as codes:
            Judging(0.0, loop, check).results()
        judging = Judging(time.perf_counter() - began, loop, check)
        for function in {Function.of(code) for code in codes if not code.co_name.startswith("<") or _is_lambda(code)}:
            self.by.setdefault(function, []).append(judging)

    def judgings(self, function: Function) -> list[Judging]:
        """The quickest judgement of each check that enters the function, then the other ones."""
        ordered = sorted(self.by[function], key=lambda judging: judging.seconds)
        first = {judging.check: judging for judging in reversed(ordered)}.values()
        return sorted(first, key=lambda judging: judging.seconds) + [j for j in ordered if j not in first]


def _is_lambda(code: types.CodeType) -> bool:
    return code.co_name == "<lambda>"


@contextlib.contextmanager
def _entered() -> Iterator[set[types.CodeType]]:
    """The package's code that is entered, by both of Python's hooks: checks use one of them themselves."""
    codes: set[types.CodeType] = set()

    def see(frame: types.FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            codes.add(frame.f_code)

    tracer, profiler = sys.gettrace(), sys.getprofile()
    threading.setprofile(see)
    sys.settrace(see)
    sys.setprofile(see)
    try:
        yield codes
    finally:
        sys.settrace(tracer)
        sys.setprofile(profiler)
        threading.setprofile(None)  # type: ignore[arg-type]


def forget() -> None:
    """Empty the caches of the package's functions: what is remembered is not entered."""
    as_caller._KNOWN.clear()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pytest_trainloop":
            for value in list(vars(module).values()):
                for held in (value, *(vars(value).values() if isinstance(value, type) else ())):
                    clear = getattr(held, "cache_clear", None)
                    if clear is not None and getattr(held, "__module__", "").startswith("pytest_trainloop"):
                        clear()


# putting a mistake in place


@functools.cache
def holders() -> list[types.FunctionType]:
    """The functions of the package that exist before any is entered."""
    functions = [each for each in gc.get_objects() if type(each) is types.FunctionType]
    return [function for function in functions if function.__code__.co_filename.startswith(PACKAGE)]


class Mistake:
    """Has a function raise in every call, under its own file name."""

    def __init__(self, function: Function, kind: Kind = "InjectedError") -> None:
        self.function, self.kind = function, kind
        self.entered = 0

    def put(self) -> bool:
        """Whether there is such a function, which raises from now on."""
        found = False
        for holder in holders():
            if (changed := self.within(holder.__code__)) is not holder.__code__:
                holder.__code__ = changed
                found = True
        return found

    def within(self, code: types.CodeType) -> types.CodeType:
        """The code with the function's own replaced, however deep in it that is; the same object where it is not."""
        if Function.of(code) == self.function:
            return self._raising(code)
        if not any(isinstance(each, types.CodeType) for each in code.co_consts):
            return code
        consts = tuple(self.within(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
        same = all(a is b for a, b in zip(consts, code.co_consts, strict=True))
        return code if same else code.replace(co_consts=consts)

    def _raising(self, code: types.CodeType) -> types.CodeType:
        """A function with the same variables of its surroundings, generator or not, whose first statement raises."""
        free = ", ".join(code.co_freevars)
        lines = [
            "def around():",
            f"    {' = '.join(code.co_freevars)} = None" if free else "    pass",
            "    def raising(*_args, **_kwargs):",
            f"        {_STATEMENTS[self.kind]}",
            f"        ({free},)" if free else "        pass",
            "        yield" if code.co_flags & 0x20 else "        pass",
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a string is not callable
            module = compile("\n".join(lines), code.co_filename, "exec")
        (around,) = (each for each in module.co_consts if isinstance(each, types.CodeType))
        (raising,) = (each for each in around.co_consts if isinstance(each, types.CodeType))
        consts = tuple(self._note if each == "note" else each for each in raising.co_consts)
        return raising.replace(co_consts=consts, co_name=code.co_name, co_firstlineno=code.co_firstlineno)

    def _note(self) -> Exception:
        self.entered += 1
        return RuntimeError("injected") if self.kind == "RuntimeError" else InjectedError("injected")


# what becomes of it

_SAYS = {"error": 0, "raised": 1, "blamed": 2, "skipped with a request": 3, "silent": 4, "not entered": 5}
"""What a mistake can end as. Good are the first two: an error that asks for a report, and an exception that leaves the
call. Bad are an error of the project's, a skip, and nothing at all."""

GOOD = ("error", "raised")


def ends(judging: Judging, mistake: Mistake) -> tuple[str, str]:
    """What a mistake that is in place ends as in one judgement, and a text."""
    before = mistake.entered
    try:
        results = judging.results()
    except UsageError as error:
        return "blamed", f"{error}"
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    for result in results:
        if result.outcome == "error":
            return ("error" if ASKS in result.reason else "blamed"), result.reason
        if ASKS in result.reason:
            return "skipped with a request", result.reason
    if mistake.entered == before:
        return "not entered", ""
    return "silent", "; ".join(f"{r.check} {r.outcome} {r.reason} {[f.cause for f in r.findings]}" for r in results)


@dataclass(frozen=True, slots=True)
class End:
    """What one mistake ended as: the best end of the judgements that were tried."""

    end: str
    judging: str
    text: str
    tried: int


def end_of(function: Function, judgings: Sequence[Judging], kind: Kind = "InjectedError", tries: int = TRIES) -> End:
    """What a mistake in this function ends as, found in a process of its own."""
    holders()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            for found in _ends(Mistake(function, kind), judgings[:tries]):
                os.write(write, (json.dumps(found) + "\n").encode())
        finally:
            os._exit(0)
    os.close(write)
    lines = _read(read, pid).splitlines()
    found = [tuple(json.loads(line)) for line in lines]
    if not found:
        return End("silent", "", "the process came to no end in time, or died", 0)
    best = min(found, key=lambda each: _SAYS[each[0]])
    return End(*best, tried=len(found))


def _ends(mistake: Mistake, judgings: Sequence[Judging]) -> Iterator[tuple[str, str, str]]:
    forget()
    if not mistake.put():
        yield "not entered", "", "no such function is there"
        return
    for judging in judgings:
        end, text = ends(judging, mistake)
        yield end, f"{judging.loop}[{judging.check}]", text[:300]
        if end in GOOD:
            return


def _read(read: int, pid: int) -> str:
    """What the process writes until it ends, or until its time is over."""
    said, until = b"", time.monotonic() + SECONDS
    while (left := until - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0] or not (more := os.read(read, 65536)):
            break
        said += more
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return said.decode()


def shown(ends: dict[Function, End], file: Path) -> None:
    """Write one line for each function."""
    lines = [f"{end.end}\t{function}\t{end.judging}\t{end.text}".replace("\n", " ") for function, end in ends.items()]
    file.write_text("\n".join(lines) + "\n")
