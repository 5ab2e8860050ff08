"""What ``python -m pytest_trainloop --write-test`` does with scripts of public repositories, as a table.

python -m scripts.public.doors FOLDER [-k TEXT] [--list FILE]

FOLDER holds checkouts named ``owner+name``; FOLDER/site, where it exists, packages that they import. FILE has a line
for each script, its path in FOLDER and its arguments, in place of the list here. Small made-up data take the place of
downloads. ``bare`` is the script alone up to the step at which the watched one is stopped, ``watched`` with the report,
``written`` with a test as well, in
processor seconds. The test counts where pytest judges something by it, unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import numpy

NLP, MORVAN, YUNJEY = (
    "graykode+nlp-tutorial",
    "MorvanZhou+PyTorch-Tutorial/tutorial-contents",
    "yunjey+pytorch-tutorial",
)
SCRIPTS = f"""
{NLP}/1-1.NNLM/NNLM.py
{NLP}/2-1.TextCNN/TextCNN.py
{NLP}/3-2.TextLSTM/TextLSTM.py
'{NLP}/4-2.Seq2Seq(Attention)/Seq2Seq(Attention).py'
'{NLP}/4-3.Bi-LSTM(Attention)/Bi-LSTM(Attention).py'
{NLP}/5-1.Transformer/Transformer.py
{NLP}/5-2.BERT/BERT.py
karpathy+minGPT/projects/adder/adder.py
karpathy+minGPT/projects/chargpt/chargpt.py --model.model_type=gpt-nano --data.block_size=32
{MORVAN}/302_classification.py
{MORVAN}/306_optimizer.py
{MORVAN}/401_CNN.py
{MORVAN}/404_autoencoder.py
{MORVAN}/406_GAN.py
{YUNJEY}/tutorials/01-basics/feedforward_neural_network/main.py
{YUNJEY}/tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py
{YUNJEY}/tutorials/03-advanced/generative_adversarial_network/main.py
{YUNJEY}/tutorials/03-advanced/variational_autoencoder/main.py
pytorch+examples/mnist/main.py --no-accel --batch-size 32
pytorch+examples/vae/main.py --no-accel --batch-size 32
pytorch+examples/time_sequence_prediction/train.py
locuslab+TCN/TCN/adding_problem/add_test.py --cuda --seq_len 50
locuslab+TCN/TCN/copy_memory/copymem_test.py --cuda --blank_len 50
eriklindernoren+PyTorch-GAN/implementations/gan/gan.py
eriklindernoren+PyTorch-GAN/implementations/wgan/wgan.py
vwxyzjn+cleanrl/cleanrl/ppo.py --total-timesteps 4000 --num-envs 2 --num-steps 64
vwxyzjn+cleanrl/cleanrl/dqn.py --total-timesteps 4000 --learning-starts 200
"""
DIGITS = (
    f"{MORVAN}/mnist",
    f"{YUNJEY}/tutorials/data",
    "pytorch+examples/data",
    "eriklindernoren+PyTorch-GAN/data/mnist",
)
"""Where scripts look for MNIST, as torchvision stores it."""

STEPS = 30
BARE = f"""
import os, runpy, sys
from torch.optim import optimizer
seen = [0]
def count(*_):
    seen[0] += 1
    if seen[0] > {STEPS}:
        sys.stdout.flush()
        os._exit(0)
optimizer.register_optimizer_step_pre_hook(count)
sys.argv[:] = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="")
    parser.add_argument("--list", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    _make_data(folder)
    text = options.list.read_text(encoding="utf-8") if options.list else SCRIPTS
    ran = judged = 0
    print("bare s | watched s | written s | exit | verdict | written test | script")
    for line in text.strip().splitlines():
        script, *args = shlex.split(line)
        if options.k not in script or not (folder / script).exists():
            continue
        row, good = _tried(folder / script, args, folder)
        ran, judged = ran + 1, judged + good
        print(f"{row} | {script.partition('/')[0].partition('+')[2]}/{'/'.join(script.split('/')[-2:])}", flush=True)
    print(f"{ran} scripts, {judged} written tests judge something as they were written")
    return 0


def _tried(script: Path, args: list[str], folder: Path) -> tuple[str, bool]:
    test = script.parent / "test_door.py"
    for old in (test, test.with_suffix(".pt"), test.with_suffix(".json")):
        old.unlink(missing_ok=True)
    words = [script.name, *args]
    bare, _ = _run(["-c", BARE, *words], script, folder)
    watched, done = _run(["-m", "pytest_trainloop", *words], script, folder)
    writing, _ = _run(["-m", "pytest_trainloop", f"--write-test={test.name}", *words], script, folder)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = next((line for line in lines if "optimizer steps" in line and "passed" in line), (lines or [""])[-1])
    verdict = said.removeprefix(script.name).strip()[:70]
    if not test.exists():
        return f"{bare:.1f} | {watched:.1f} | {writing:.1f} | {done.returncode} | {verdict} | none", False
    result = test.with_suffix(".json")
    options = ["--trainloop", f"--trainloop-json={result.name}", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    took, tested = _run(["-m", "pytest", *options, test.name], script, folder)
    loops = json.loads(result.read_text(encoding="utf-8"))["loops"] if result.exists() else []
    of = [check["outcome"] for loop in loops for check in loop["checks"]]
    counts = ", ".join(f"{of.count(each)} {each}" for each in ("passed", "failed", "error", "skipped") if each in of)
    form = "a script" if "Script(" in test.read_text(encoding="utf-8") else "a function"
    good = "passed" in of or "failed" in of
    shown = f"{form}: {counts or (tested.stdout.strip().splitlines() or ['?'])[-1][:60]}; {took:.0f} s"
    return f"{bare:.1f} | {watched:.1f} | {writing:.1f} | {done.returncode} | {verdict} | {shown}", good


def _run(words: list[str], script: Path, folder: Path) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Processor seconds and what was said, in the script's own folder."""
    repository = folder / script.relative_to(folder).parts[0]
    paths = [str(Path(__file__).parents[2]), str(repository), str(folder / "site")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=script.parent,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(words, -1, "", "not through in 600 s")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def _make_data(folder: Path) -> None:
    """Digits in torchvision's files, waves and a text: small, and with something to learn."""
    draw = numpy.random.default_rng(0)
    for place in DIGITS:
        raw = folder / place / "MNIST" / "raw"
        if raw.exists() or not (folder / place.partition("/")[0]).exists():
            continue
        raw.mkdir(parents=True)
        for name, count in (("train", 3000), ("t10k", 2000)):
            labels = draw.integers(0, 10, count, dtype=numpy.uint8)
            images = draw.integers(0, 60, (count, 28, 28), dtype=numpy.uint8)
            images[numpy.arange(count), labels * 2 + 4] += 190
            head = struct.pack(">iiii", 2051, count, 28, 28)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels.tobytes())
    text = folder / "karpathy+minGPT/projects/chargpt/input.txt"
    if text.parent.exists():
        words = ["O God, O God!", *"the cat sat on a mat and saw it run to him".split()]
        text.write_text(" ".join(draw.choice(words, 4000)), encoding="utf-8")
    waves = folder / "pytorch+examples/time_sequence_prediction"
    if waves.exists() and not (waves / "traindata.pt").exists():
        subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=waves, check=False)


if __name__ == "__main__":
    sys.exit(main())
