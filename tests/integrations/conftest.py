"""What the integration tests share: run a loop bare, and let the battery judge it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_trainloop.frontends.api import check_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop import Finding, TrainLoop

LONG = dict.fromkeys(("overfit_one_batch", "update_ratio"), "takes long, and follows")

WIRING = {"step_order", "optimizer_holds_every_param", "gradient_reaches_every_param"}

ASTRAY = [*sorted(WIRING), "train_mode", "loss_contract", "grad_scaler", "precision_parity", "accumulation_equivalence"]


class Batches:
    """Sized and re-iterable, as the plugin gives them to ``fit``; no DataLoader and no list."""

    def __init__(self, batch: object, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[object]:
        return (copy.deepcopy(self.batch) for _ in range(self.count))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def a_process_without_accelerators() -> Iterator[None]:
    """What Accelerate keeps of the process is thrown away behind the test."""
    yield
    state = pytest.importorskip("accelerate").state
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture
def run() -> Callable[..., int]:
    """``run(loop, batches=12)``: run the loop bare, give the number of optimizer steps that it took."""

    def bare(loop: TrainLoop, batches: int = 12) -> int:
        steps = []
        hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.append(optimizer))
        try:
            loop.fit(Batches(loop.batch, batches))
        finally:
            hook.remove()
        return len(steps)

    return bare


@pytest.fixture
def assert_silent(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``assert_silent(make)``: every check that could run passed, and the wiring checks did run: all checks under
    ``--all-checks``, else those that a framework's own calls can lead astray."""
    only = None if request.config.getoption("--all-checks") else ASTRAY

    def judge(make: Callable[..., TrainLoop]) -> None:
        results = check_loop(make, only=only, raises=False).results
        spoken = [
            (r.check, r.outcome, r.reason, r.error, [f.summary for f in r.faults])
            for r in results
            if r.outcome not in ("passed", "skipped")
        ]
        assert spoken == []
        assert {r.check for r in results if r.outcome == "passed"} >= WIRING, [(r.check, r.reason) for r in results]

    return judge


@pytest.fixture
def root_fault() -> Callable[..., Finding]:
    """``root_fault(make, "check:cause")``: the fault of that name; every other check that failed is explained by it."""

    def judge(make: Callable[..., TrainLoop], name: str) -> Finding:
        results = check_loop(make, skip=LONG, raises=False).results
        assert [(r.check, r.reason) for r in results if r.outcome in ("error", "unreliable")] == []
        faults = {f"{result.check}:{fault.cause}": fault for result in results for fault in result.faults}
        assert name in faults, (faults, [(r.check, r.outcome, r.reason) for r in results])
        root = faults.pop(name)
        assert all(root.accounts_for(fault.check, fault.cause) for fault in faults.values()), faults
        return root

    return judge
