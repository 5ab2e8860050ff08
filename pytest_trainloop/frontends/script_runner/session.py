"""One script run under watch, and judged."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import BrokenCheck, UsageError
from pytest_trainloop.core.report import files
from pytest_trainloop.core.report.section import checked_nothing
from pytest_trainloop.frontends import api
from pytest_trainloop.frontends.script_runner import target
from pytest_trainloop.frontends.script_runner.files import WrittenFiles
from pytest_trainloop.frontends.script_runner.handover import Handover
from pytest_trainloop.frontends.script_runner.outcome import FAULT, NOTHING, Outcome, refuse
from pytest_trainloop.frontends.script_runner.page import Page
from pytest_trainloop.frontends.script_runner.ranks import OneOfRanks
from pytest_trainloop.frontends.script_runner.short_passes import Passes
from pytest_trainloop.frontends.script_runner.stack import line_of_main_thread
from pytest_trainloop.frontends.script_runner.stopping import Ending, Stopped, end, leave
from pytest_trainloop.frontends.script_runner.trial import refusal
from pytest_trainloop.frontends.script_runner.words import in_words, needing_a_test
from pytest_trainloop.frontends.script_runner.written import alias_of, script_file, test_file
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.guard import Exited
from pytest_trainloop.runs.ranks.peers import Peers
from pytest_trainloop.runs.user_traceback import raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.core.report import Report
    from pytest_trainloop.declare.selection import Plan
    from pytest_trainloop.frontends.script_runner.options import Options
    from pytest_trainloop.frontends.script_runner.spawned import Spawning


class Session:
    """Runs the script of the command line once, and says what its training came to."""

    def __init__(
        self, options: Options, plan: Plan, *, ranks: OneOfRanks | None = None, spawning: Spawning | None = None
    ) -> None:
        self._options = options
        self._plan = plan
        self._folder = Path.cwd()
        self._name = ("-m " if options.target.is_module else "") + options.target.name
        self._ending = Ending(options.steps, self._give_up)
        self._handover = Handover(alias_of(options.target)) if options.write_test else None
        self._watch = Watch(before_step=self._before_step, before_backward=self._ending.before_backward)
        self._page = Page(sys.stdout, self._name, verbose=options.verbose)
        self._passes = Passes(options.limit_batches)
        self._ranks = ranks
        self._spawning = spawning
        self._waited = ""
        self._shared: Mapping[Callable[..., Any], Any] = {}
        self._children = 0
        self._closing = contextlib.ExitStack()
        self._error: BaseException | None = None

    def run(self) -> int:
        """The exit status of the command."""
        if self._options.torchrun:
            set_torchrun()
        try:
            code = self._options.target.prepare()
        except UsageError as error:
            return refuse(str(error))
        except SyntaxError:
            traceback.print_exc(limit=0)
            return FAULT
        if (peers := Peers.of_torchrun()) is not None:
            self._ranks = OneOfRanks(peers)
        self._run(lambda: target.run(code))
        if self._ending.elsewhere:
            return _as_alone(self._error)
        if self._spawning is not None and (status := self._spawning.status) is not None:  # a spawned rank has reported
            return leave(status)
        return leave(self._judge())

    def run_in_rank(self, script: Callable[[], None]) -> None:
        """Run a function of the script's in a rank that it has spawned. Raises what it raised."""
        self._run(script)
        leave(self._judge())
        if self._error is not None and not isinstance(self._error, Stopped):
            raise self._error

    def _run(self, script: Callable[[], None]) -> None:
        """Run the script under watch; what it raised is kept."""
        self._files = WrittenFiles()
        with self._ending.around(), self._closing:
            self._observation = self._closing.enter_context(api.observed(self._watch))
            self._closing.enter_context(self._counting_children())
            if self._spawning is not None and self._ranks is None:
                self._closing.enter_context(self._spawning.watching())
            if self._ranks is not None:
                self._closing.enter_context(self._ranks.noted(self._watch, self._end_waiting))
            self._closing.enter_context(self._passes.watched())
            try:
                script()
            except BaseException as error:
                self._error = error
        if self._waited:
            threading.Event().wait()  # another thread reports, and ends the process

    def _before_step(self, watch: Watch) -> None:
        if self._handover is not None:
            try:
                with watch.suspended():
                    self._handover.look(watch)
            except Exception as error:  # of the project's own objects; neither it nor a mistake of ours ends the script
                watch.record.note_mistake(error)
        self._ending.before_step(watch)

    def _give_up(self) -> None:
        """Judge and end where the script goes on in spite of being stopped."""
        self._page.remarks.append("it swallowed the exception that ends it, and was ended where it was")
        self._end_here()

    def _end_waiting(self) -> None:
        """The same where this rank waits for others for ever, or they have failed."""
        self._waited = line_of_main_thread() or "no line of yours"
        self._end_here()

    def _end_here(self) -> None:
        try:
            self._closing.close()
        except Exception as error:  # of whatever the script has left half done
            self._watch.record.note_mistake(error)
        self._observation.close()
        try:
            status = self._judge()
        except BaseException:  # in a thread of ours nobody would hear of it
            traceback.print_exc()
            status = FAULT
        end(status)

    def _judge(self) -> int:
        """Print everything; the exit status. Of several ranks one prints."""
        own_failure = self._own_failure()
        record = self._watch.record
        if isinstance(self._error, Exception) and not record.note_mistake(self._error):
            record.raised = raised(self._error)
        record.cut_short = self._ending.stopped or bool(self._waited)
        if self._ranks is None:
            return self._say(own_failure)
        self._ranks.tell_end(own_failure, self._waited, stopped=self._ending.stopped)
        if not self._ranks.reports:
            self._ranks.leave(self._watch, None if api.nothing_trained(record) else self._report())
            return 0
        self._shared = self._ranks.gather(self._watch)
        failure = self._ranks.failure()
        if failure:
            self._page.remarks += self._ranks.ended()
        if own_failure and not failure:  # it lost a rank that was stopped
            record.raised, record.cut_short = None, True
        status = FAULT
        try:
            status = self._say(failure)
            self._page.flush()
        finally:
            self._ranks.report(status)
        return status

    def _say(self, own_failure: str) -> int:
        try:
            report = self._report()
        except UsageError:  # nothing trained, and no rank waits for ever for another
            return self._nothing(own_failure)
        if self._ranks is not None:
            report = self._ranks.with_others(report)
        elif self._is_quiet() and report.ok:
            return 0
        os.chdir(self._folder)
        if self._waited and not own_failure:
            self._page.remarks.append(f"it waited for another rank at {self._waited}, and was ended there")
        if remark := self._passes.remark(stopped=self._ending.stopped):
            self._page.remarks.append(remark)
        self._page.steps(self._watch, stopped=self._ending.stopped, failed=bool(own_failure or self._waited))
        if own_failure:
            self._page.failed(own_failure)
        self._page.report(report)
        self._page.files(self._files.listed())
        self._write_test()
        needing = needing_a_test(report, self._plan.skip)
        self._page.closing(len(needing), written=bool(self._options.write_test))
        lines = self._outcome().tell(report, own_failure)
        self._page.written(lines)
        if not report.ok or own_failure:
            return FAULT
        if none := checked_nothing(report.entries):
            return refuse(f"{self._name}: nothing was judged: {none}")
        return NOTHING if any(line.style == "loud" for line in lines) else 0

    def _report(self) -> Report:
        """The verdicts. The script's own filters of warnings, which may raise, do not apply: the page tells of a check
        that broke."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BrokenCheck)
            judged = self._observation.judged(self._plan, raises=False, name=self._name, shared=self._shared)
            return in_words(judged)

    def _outcome(self) -> Outcome:
        script = Path(str(getattr(sys.modules["__main__"], "__file__", self._name)))
        return Outcome(self._options, self._folder, self._name, script)

    def _write_test(self) -> None:
        if self._handover is not None:
            file = self._folder / self._options.write_test
            loop, imports = self._handover.loop()
            if not loop.missing:
                files.write(file, test_file(loop, imports, self._options.target, file))
                if loop.kept is not None:
                    torch.save(loop.kept, file.with_suffix(".pt"))
                self._page.flush()
                if why := refusal(file, self._folder):
                    file.with_suffix(".pt").unlink(missing_ok=True)
                    loop.missing.append(f"its loop was passed to the checks, which could not judge it: {why}")
            if loop.missing:
                torchrun = self._options.torchrun or self._ranks is not None
                files.write(file, script_file(loop, imports, self._options, file, torchrun=torchrun))
            data = "" if loop.missing or loop.kept is None else str(Path(self._options.write_test).with_suffix(".pt"))
            self._page.wrote(self._options.write_test, data, runs_script=bool(loop.missing))

    def _nothing(self, own_failure: str) -> int:
        self._files.listed()
        if own_failure and (isinstance(self._error, Exception) or self._waited):
            self._page.failed(own_failure)
            self._page.written(self._outcome().tell_nothing(own_failure, ""))
            return FAULT
        passes = self._watch.backward_passes
        seen = f"{passes} backward passes and no optimizer step were" if passes else "no backward pass and no step was"
        sentence = f"{self._name}: nothing trained in this process, so nothing is judged: {seen} seen"
        if self._children:
            sentence += (
                f"; it started {self._children} child process{'es' * (self._children > 1)}, and what trains there is "
                "not watched: have it train in this process"
            )
        if own_failure:
            self._page.failed(own_failure)
        self._page.written(self._outcome().tell_nothing(own_failure, sentence))
        return refuse(sentence)

    def _own_failure(self) -> str:
        """How the script ended, where it failed by itself: a sentence, with its own traceback below."""
        steps = self._watch.record.steps
        error, at = self._error, f"after {steps} optimizer step{'s' * (steps != 1)}" if steps else "before any step"
        if error is None or isinstance(error, Stopped) or self._ending.stopped:
            return ""
        if isinstance(error, SystemExit):
            return "" if error.code in (None, 0) else f"the script ended itself by sys.exit({error.code!r}) {at}"
        if isinstance(error, Exited):
            return "" if error.args == (0,) else f"the script ended itself by os._exit({error}) {at}"
        if isinstance(error, KeyboardInterrupt):
            return f"interrupted {at}"
        what = raised(error)
        return f"the script raised {what.summary} {at}\n\n{what.traceback}"

    @contextlib.contextmanager
    def _counting_children(self) -> Iterator[None]:
        """Count the processes that the script starts, but for the workers of a DataLoader."""

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def start(process: Any) -> Any:
                run = getattr(process, "_target", None)
                self._children += not getattr(run, "__module__", "").startswith("torch.utils.data")
                return original(process)

            return start

        with patched(multiprocessing.process.BaseProcess, "start", around):
            yield

    @staticmethod
    def _is_quiet() -> bool:
        """Whether another process of the same ``torchrun`` reports."""
        return os.environ.get("RANK", "0") not in ("", "0")


def set_torchrun() -> None:
    """What ``torchrun --nproc-per-node=1`` sets, where it is not set yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, str(value))


def _as_alone(error: BaseException | None) -> int:
    """The status of a forked child of the script that came to the script's end."""
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        traceback.print_exception(error)
        return FAULT
    return 0
