"""However a launch ends, no process, no file and no shared memory of it is left, and this process is as before."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pytest_trainloop.core.errors import CannotDecide, TimeRanOut
from pytest_trainloop.recording.torch_internals import load_for_wrappers
from pytest_trainloop.runs.ranks.launch import launch

SHARED_MEMORY = Path("/dev/shm")


def with_workers(folder, then):
    """Work that has a loader's worker process beside it, and writes down the numbers of both."""

    def work(rank):
        loader = iter(DataLoader(range(64), num_workers=1, multiprocessing_context="fork"))
        next(loader)
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        (folder / f"pids{rank}").write_text(" ".join(map(str, pids)))
        return then(rank)

    return work


def alive(folder):
    found = [int(pid) for file in folder.glob("pids*") for pid in file.read_text().split()]
    assert len(found) >= 4
    return [pid for pid in found if is_alive(pid)]


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def ends(rank):
    return rank


def raises(rank):
    raise ValueError


def hangs(rank):
    if rank:
        dist.barrier()


def sleeps(rank):
    time.sleep(600)


def is_killed(rank):
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crashes(rank):
    if rank:
        faulthandler._sigsegv()
    dist.barrier()


def exits(rank):
    sys.exit(rank)


@pytest.mark.parametrize("then", [ends, raises, hangs, sleeps, is_killed, crashes, exits])
def test_nothing_is_left(then, tmp_path, monkeypatch):
    load_for_wrappers()  # torch makes a folder of its own where it is loaded first
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path has 107 characters at most
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = state(), names(SHARED_MEMORY), len(names(Path("/proc/self/fd")))
    with pytest.raises(TimeRanOut) if then is sleeps else contextlib.nullcontext():
        launched = launch(with_workers(tmp_path, then), 2, timeout=1.5 if then is sleeps else 60)
    assert alive(tmp_path) == []
    assert (state(), names(SHARED_MEMORY), len(names(Path("/proc/self/fd")))) == before
    temporary.rmdir()  # which is possible where nothing is left in it
    assert multiprocessing.active_children() == []
    ended = {is_killed: "signal SIGKILL", crashes: "signal SIGSEGV"}
    if then in ended:
        assert launched.raised.ended == ended[then]
        assert launched.waiting == (0,)


def names(folder):
    return {path.name for path in folder.iterdir()}


def state():
    return (
        dict(os.environ),
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        dist.is_initialized(),
        signal.getsignal(signal.SIGINT),
        Path.cwd(),
    )


SCRIPT = """
import sys
from pathlib import Path
from pytest_trainloop.runs.ranks.launch import launch
from tests.ranks.test_nothing_left import sleeps, with_workers

def then(rank):
    print("ready", file=sys.__stderr__)
    sleeps(rank)

launch(with_workers(Path(sys.argv[1]), then), 2, timeout=300)
"""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number, tmp_path):
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    session = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True
    )
    while len(list(tmp_path.glob("pids*"))) < 2:
        assert session.poll() is None, session.stderr.read()
        time.sleep(0.02)
    session.send_signal(number)
    try:
        _, error = session.communicate(timeout=20)
    except subprocess.TimeoutExpired:  # Python drops an interrupt that comes in a destructor: a user presses it again
        session.send_signal(number)
        _, error = session.communicate(timeout=60)
    for _ in range(600):  # loader workers look every five seconds for a parent that was killed
        if not alive(tmp_path):
            break
        time.sleep(0.02)
    assert alive(tmp_path) == []
    if number == signal.SIGINT:
        assert error.rstrip().endswith("KeyboardInterrupt")
        assert {n for n in names(temporary) if not n.startswith("torchinductor_")} == set()


def test_from_a_thread_without_forks_being_warned_of(recwarn):
    found = []
    thread = threading.Thread(target=lambda: found.append(launch(ends, 2, timeout=60)))
    thread.start()
    thread.join()
    assert [rank.value for rank in found[0]] == [0, 1]
    assert not recwarn.list


def test_what_cannot_be_sent_back():
    with pytest.raises(CannotDecide, match="what rank 0 gives back cannot be sent to this process"):
        launch(lambda rank: threading.Lock(), 2, timeout=60)


def test_what_a_rank_writes_is_kept_out_of_the_terminal(capfd):
    def work(rank):
        print("line of", rank)
        os.write(2, b"from below\n")
        os.system("echo from a process")

    ranks = launch(work, 2, timeout=60)
    assert [rank.output for rank in ranks] == [f"line of {n}\nfrom below\nfrom a process\n" for n in (0, 1)]
    assert capfd.readouterr() == ("", "")
