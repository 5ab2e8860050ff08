"""What the four state checks cost on a project that declares everything: own steps, processor time and peak memory.

Each is judged in a process of its own, after the watched run that all checks share: the green project, and one with the
fault that the check names. Memory is the high-water mark of the process (``VmHWM``) above its resident memory after
that run, next to the size of the parameters. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHECKS = ("evaluation_is_pure", "resume_equivalence", "data_order", "memory_growth")
WIDTH = 1024
"""Three square layers of it: 3 million parameters, 12 MiB, and twice that of Adam's moments."""


def project(faulty: str) -> Any:
    """A function that builds the project, with the fault of one check, or none."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from pytest_trainloop import TrainLoop

    x, y = torch.randn(96, WIDTH), torch.randint(10, (96,))

    def make() -> TrainLoop:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        loader = DataLoader(
            TensorDataset(x, y),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
        )
        history: list[Any] = []

        def fit(batches: Any) -> None:
            model.train()
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                history.append(loss if faulty == "memory_growth" else loss.item())

        @torch.no_grad()
        def evaluate() -> float:
            model.eval()
            if faulty == "evaluation_is_pure":
                for p in model.parameters():
                    p.mul_(0.9)
            return float(F.cross_entropy(model(x[:8]), y[:8]))

        def save() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            torch.set_rng_state(state["rng"])
            if faulty != "resume_equivalence":
                optimizer.load_state_dict(state["optimizer"])

        def repeated() -> Any:
            loader.generator.manual_seed(0)
            return iter(loader)

        batches = loader
        if faulty == "data_order":
            batches = type("Repeated", (), {"__iter__": lambda self: repeated(), "__len__": lambda self: len(loader)})()
        return TrainLoop(
            model=model, optimizer=optimizer, batches=batches, fit=fit, evaluate=evaluate, save=save, load=load
        )

    return make


def resident(name: str) -> float:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure(check: str, faulty: str) -> dict[str, Any]:
    """One check in this process, after the watched run."""
    import torch

    from pytest_trainloop.judging.battery import Settings, Subject

    torch.set_num_threads(1)
    subject = Subject("project", project(faulty), settings=Settings())
    subject.run_check("step_order")
    before, began = resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark begins anew
    result = subject.run_check(check)
    return {
        "outcome": result.outcome,
        "causes": [f.cause for f in result.faults],
        "steps": result.steps,
        "seconds": round(time.process_time() - began, 2),
        "memory": round(resident("VmHWM") - before),
    }


@pytest.mark.parametrize("faulty", [False, True], ids=["green", "red"])
@pytest.mark.parametrize("check", CHECKS)
def test_cost(check: str, faulty: bool) -> None:
    command = [sys.executable, __file__, check, check if faulty else ""]
    done = subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
    print(f"{check:20} {'red' if faulty else 'green':6} {json.loads(done.stdout.splitlines()[-1])}")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))
