"""One launched process, from its start to its end: its environment, what it gives back, the files that it writes."""

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

from pytest_trainloop.core.paths import PACKAGE
from pytest_trainloop.core.whose import is_ours, mistake
from pytest_trainloop.recording import opened_files
from pytest_trainloop.recording.source import here

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

_OF_SYSTEM = ("/dev/", "/proc/", "/sys/")
_OF_PYTHON = (f"{os.sep}__pycache__{os.sep}", f"{os.sep}torchinductor_", f"{os.sep}triton{os.sep}")


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
        if sys.platform == "linux":  # the kernel ends this process when its parent is killed
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for other in others:
            other.close()
        _redirect(Path(folder), rank)
        _set_environment(rank, ranks, folder)
        tell = _teller(connection)
        result = _run(rank, ranks, folder, tell, work, seconds)
        try:
            text = pickle.dumps(result)
        except Exception as error:
            text = pickle.dumps(result | {"value": None, "unsent": f"{type(error).__name__}: {error}"})
        (Path(folder) / f"result{rank}").write_bytes(text)
        tell("end", "raised" if result["raised"] else "left")
        connection.recv()
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        os._exit(0)


def _teller(connection: Connection) -> Callable[[str, Any], None]:
    """Tells the parent what happens, as it happens."""
    lock, own = threading.Lock(), os.getpid()

    def tell(what: str, value: Any) -> None:
        if os.getpid() != own:
            return  # a worker process of the project's
        try:
            with lock:
                connection.send((what, value))
        except OSError:
            os._exit(1)  # nobody is there to hear of it

    return tell


def _run(
    rank: int, ranks: int, folder: str, tell: Callable[[str, Any], None], work: Callable[[int], Any], seconds: float
) -> dict[str, Any]:
    import torch

    from pytest_trainloop.runs.accelerate_state import forget_process
    from pytest_trainloop.runs.ranks.collectives import Groups, Log

    torch.set_num_threads(1)  # first of all: threads of the parent's are not here, and OpenMP would wait for them
    torch.set_num_threads = lambda *_: None
    forget_process()
    result: dict[str, Any] = {"value": None, "raised": None, "error": None}
    try:
        log = Log(tell)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Groups(rank, ranks, folder, 2 * seconds + 60, log).begin()
        log.begin()
        with contextlib.closing(_Files(tell)):
            result["value"] = work(rank)
    except BaseException as error:
        result["raised"], result["error"] = as_data(error)
    return result


def as_data(error: BaseException) -> tuple[Raised, Any]:
    """An exception as text; with it the parts of one of this package, from which the other process makes it again."""
    from pytest_trainloop.core import errors
    from pytest_trainloop.runs.user_traceback import raised

    if is_ours(error):
        error = mistake(error)
    noted = raised(error)
    if isinstance(error, errors.UserCodeError):  # what the project's own code raised
        noted = replace(
            noted, summary=error.error.summary, traceback=error.error.traceback, message=error.error.summary
        )
    ours = type(error).__module__ == errors.__name__
    return noted, (type(error), error.args, vars(error)) if ours else None


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
    """The variables that torchrun sets, and gloo's network interface: the machine itself.

    What a process puts aside for its own time goes where the parent removes it: Python does so at the end of a process,
    which those here do not come to. The sockets of multiprocessing are directly in the folder: their names must be
    short.
    """
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    number, size = str(rank), str(ranks)
    os.environ |= {
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
    with contextlib.suppress(KeyError, OSError):  # where torch keeps what it compiled; else each launch compiles again
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
        )
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    util.get_temp_dir = lambda: folder


class _Files:
    """Tells of each file that this process opens to write, ``tell("wrote", (path, place))``, until ``close``: by
    Python's audit events, and those that libraries open in C++ or Rust."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        from pytest_trainloop.recording.torch_internals import around_zip_files

        self._tell, self._pid, self._known = tell, os.getpid(), set[str]()
        opened_files.listen(self._note)
        around_zip_files(self._note)
        safetensors: Any = sys.modules.get("safetensors.torch")
        if safetensors is not None:
            save = safetensors.serialize_file

            def noted(data: Any, path: Any, *more: Any, **named: Any) -> Any:
                self._note(path)
                return save(data, path, *more, **named)

            safetensors.serialize_file = noted

    def close(self) -> None:
        opened_files.stop(self._note)
        self._pid = 0

    def _note(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or os.getpid() != self._pid:
            return
        full = str(Path(os.fsdecode(path)).resolve())
        if full in self._known or full.startswith((*_OF_SYSTEM, PACKAGE)) or any(part in full for part in _OF_PYTHON):
            return
        self._known.add(full)
        place = here()[0]
        if place.file:
            self._tell("wrote", (full, place))
