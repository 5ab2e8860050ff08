"""One launched process, from its start to its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import getpass
import os
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from dataclasses import replace
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.source import place_of
from pytest_trainloop.whose import is_ours, mistake

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from pytest_trainloop.recording.events import Raised

ASK_FOR_STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (5 if hasattr(signal, "SIGRTMIN") else 0)
"""The signal at which a process writes down where its threads are; none that a project or a scheduler is known to use.
"""

FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_", "KUBERNETES_", "LSB_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""Variables of other launchers that frameworks read before torchrun's."""

_PR_SET_PDEATHSIG = 1


def main(
    rank: int,
    ranks: int,
    folder: str,
    connection: Connection,
    work: Callable[[int], Any],
    seconds: float,
    parent: int,
    others: tuple[Connection, ...],
) -> None:
    """Run ``work(rank)``, leave what it gave in ``folder`` and wait until the parent ends the process."""
    # What the parent leaves to collect may be a process group of its own, whose end waits for threads that no fork has.
    gc.freeze()
    try:
        os.setpgid(0, 0)
        _end_with(parent)
        for other in others:
            other.close()
        _redirect(Path(folder), rank)
        _set_environment(rank, ranks, folder)
        tell = _Teller(connection)
        result = _run(rank, ranks, folder, tell, work, seconds)
        _write(Path(folder) / f"result{rank}", result)
        tell("end", "raised" if result["raised"] else "left")
        connection.recv()
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        os._exit(0)


class _Teller:
    """Tells the parent what happens, as it happens."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __call__(self, what: str, value: Any) -> None:
        if os.getpid() != self._pid:
            return  # a worker process of the project's
        try:
            with self._lock:
                self._connection.send((what, value))
        except OSError:
            os._exit(1)  # nobody is there to hear of it


def _run(
    rank: int, ranks: int, folder: str, tell: _Teller, work: Callable[[int], Any], seconds: float
) -> dict[str, Any]:
    import torch

    from pytest_trainloop.ranks.collectives import Log
    from pytest_trainloop.ranks.files import Files
    from pytest_trainloop.ranks.groups import Groups
    from pytest_trainloop.runs.accelerate_state import forget_process

    torch.set_num_threads(1)  # first of all: threads of the parent's are not here, and OpenMP would wait for them
    torch.set_num_threads = lambda *_: None
    forget_process()
    shown: list[str] = []
    result: dict[str, Any] = {"value": None, "raised": None, "error": None, "warnings": shown}
    try:
        log = Log(tell)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Groups(rank, ranks, folder, 2 * seconds + 60, log).begin()
        log.begin()
        files = Files(lambda: log.steps, tell)
        files.begin()
        warnings.showwarning = lambda message, category, filename, line, *_: shown.append(
            f"{category.__name__}: {message} ({place_of(str(filename), line)})"
        )
        with contextlib.closing(files):
            result["value"] = work(rank)
    except BaseException as error:
        result["raised"], result["error"] = as_data(error)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        text = pickle.dumps(result)
    except Exception as error:
        text = pickle.dumps(result | {"value": None, "unsent": f"{type(error).__name__}: {error}"})
    path.write_bytes(text)


def as_data(error: BaseException) -> tuple[Raised, Any]:
    """An exception as text; with it the parts of one of this package, from which the other process makes it again."""
    from pytest_trainloop import errors
    from pytest_trainloop.runs.user_traceback import raised

    if is_ours(error):
        error = mistake(error)
    told = raised(error)
    if isinstance(error, errors.UserCodeError):  # what the project's own code raised
        told = replace(told, summary=error.error.summary, traceback=error.error.traceback, message=error.error.summary)
    ours = type(error).__module__ == errors.__name__
    return told, (type(error), error.args, vars(error)) if ours else None


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _redirect(folder: Path, rank: int) -> None:
    """Keep what is written out of the terminal, and stacks in a file of their own."""
    out = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    stacks = (folder / f"stack{rank}").open("w")  # open as long as the process lives
    faulthandler.enable(stacks)
    faulthandler.register(ASK_FOR_STACK, stacks, all_threads=True, chain=False)


def _set_environment(rank: int, ranks: int, folder: str) -> None:
    """As torchrun does it. What a process puts aside for its own time goes where the parent removes it: Python does so
    at the end of a process, which those here do not come to.

    The sockets of multiprocessing are directly in the folder: their names must be short.
    """
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(_environment(rank, ranks))
    with contextlib.suppress(KeyError, OSError):  # where torch keeps what it compiled; else each launch compiles anew
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
        )
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    util.get_temp_dir = lambda: folder


def _environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables that torchrun sets, and gloo's network interface: the machine itself."""
    number, size = str(rank), str(ranks)
    return {
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": "0",
        "ROLE_RANK": number,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "trainloop",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
