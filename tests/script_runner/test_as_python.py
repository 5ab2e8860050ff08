"""A watched script finds the world as Python gives it to a script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.script_runner.conftest import HEAD, TRAIN

LOOK = """
import json, pathlib, pickle

class Own:
    pass

pickle.loads(pickle.dumps(Own()))
main = sys.modules["__main__"]
seen = {
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
    "spec": None if __spec__ is None else __spec__.name, "package": __package__, "main": main.Own is Own,
    "module": Own.__module__,
}
"""


def seen_alone(folder, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, text=True, capture_output=True, check=True, env={"LOOK": "1"}
    )
    return done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("form", ["script", "module", "package", "folder"])
def test_main_argv_path_and_folder_are_those_of_python(watch, folder, capsys, form):
    source = LOOK + "print(json.dumps(seen))\n"
    head = "import os, sys\n"
    name, module = {
        "script": ("deep/train.py", ""),
        "module": ("pack/train.py", "pack.train"),
        "package": ("pack/__main__.py", "pack"),
        "folder": ("deep/__main__.py", ""),
    }[form]
    (folder / name).parent.mkdir()
    if form in ("module", "package"):
        (folder / "pack/__init__.py").touch()
    (folder / name).write_text(head + source)
    given = ["-m", module] if module else ["deep" if form == "folder" else name]
    alone = seen_alone(folder, *given, "--config", "tiny.yaml", "--", "-x")
    from pytest_trainloop.frontends.script_runner.command import command

    assert command([*given, "--", "--config", "tiny.yaml", "--", "-x"]) == 2
    watched = capsys.readouterr().out
    if form == "folder":  # Python runs a folder by a loader of its own, with a spec
        assert '"path"' in watched
        return
    assert watched == alone


def test_words_behind_the_script_are_the_scripts_with_and_without_dashes(watch):
    said = watch("print(sys.argv)", "--steps", "3", args=("--steps", "9", "-v"))
    assert "['train.py', '--steps', '9', '-v']" in said.out
    said = watch("print(sys.argv)", args=("--", "--steps", "9"))
    assert "['train.py', '--steps', '9']" in said.out


def test_argparse_speaks_for_the_script(watch):
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n" + TRAIN
    said = watch(script, args=("--nonsense",))
    assert said.status == 2
    assert "usage: train.py" in said.err
    assert "unrecognized arguments: --nonsense" in said.err
    assert watch(script, args=()).status == 0


def test_modules_beside_the_script_are_found(watch, folder):
    (folder / "src").mkdir()
    (folder / "src/settings.py").write_text("RATE = 0.1")
    said = watch("import settings\n" + TRAIN, name="src/train.py")
    assert said.status == 0
    assert "src/train.py: 30 optimizer steps watched" in said.out


def test_a_module_of_a_package_imports_relatively(watch, folder):
    (folder / "pack").mkdir()
    (folder / "pack/__init__.py").touch()
    (folder / "pack/settings.py").write_text("RATE = 0.1")
    said = watch("from .settings import RATE\n" + TRAIN, name="pack/train.py", module="pack.train")
    assert said.status == 0
    assert "-m pack.train: 30 optimizer steps watched" in said.out


def test_a_script_that_changes_its_folder(watch, folder):
    said = watch("os.makedirs('out')\nos.chdir('out')\nopen('log', 'w').close()\n" + TRAIN, "--trainloop-json=all.json")
    assert said.status == 0
    assert "files the script wrote: out/log" in said.out
    assert (folder / "all.json").exists()


def test_a_script_that_redirects_its_output(watch, folder):
    said = watch("sys.stdout = open('log', 'w')\n" + TRAIN)
    assert "30 optimizer steps watched" in said.out


def test_warnings_signals_and_exit_functions_of_the_script_work(watch):
    said = watch("""
        import signal
        before = signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            train(model, optimizer, loader())
        signal.signal(signal.SIGTERM, before)
    """)
    assert said.status == 0
    assert said.out.count("asked to end") == 2


def test_training_in_a_thread_is_watched(watch):
    said = watch("""
        import threading
        thread = threading.Thread(target=lambda: train(mlp_, torch.optim.SGD(mlp_.parameters(), lr=0.1), loader()))
        mlp_ = mlp()
        thread.start()
        thread.join()
    """)
    assert said.status == 0
    assert "4 optimizer steps watched" in said.out


@pytest.mark.processes
def test_processes_of_the_script_do_no_harm(folder):
    """Workers forked and spawned, children that train by themselves, exit functions, a thread that never ends."""
    (folder / "train.py").write_text(
        HEAD
        + """
import atexit, multiprocessing, threading

def child(queue):
    model = mlp()
    for _ in range(9):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    queue.put("trained by itself")

def main():
    atexit.register(print, "its own end", flush=True)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(method, queue.get(), flush=True)
        process.join()
        assert process.exitcode == 0
    if os.fork() == 0:
        sys.exit(7)
    print("forked", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*rows())
    while True:
        train(model, optimizer, DataLoader(dataset, batch_size=2, num_workers=1))

if __name__ == "__main__":
    main()
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest_trainloop", "--steps=20", "train.py"],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fork trained by itself" in done.stdout
    assert "spawn trained by itself" in done.stdout
    assert "forked 7" in done.stdout
    assert done.stdout.count("optimizer steps watched") == 1
    assert "20 optimizer steps watched" in done.stdout
    assert done.stdout.rstrip().endswith("its own end")
