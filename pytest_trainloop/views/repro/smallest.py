"""The smallest batch of a finding as a file, and a loop that is judged on it in place of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.loop import TrainLoop
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from pytest_trainloop.core.finding import SmallestBatch
    from pytest_trainloop.runs.evidence import Evidence


GROWTH = (1, 2, 4)
"""Times the rows of the composition that are tried: a check that splits and compares may need more than the fault."""


def keep(
    evidence: Evidence, smallest: SmallestBatch, file: Path, causes_on: Callable[[Path], Collection[str]], cause: str
) -> bool:
    """Write the smallest batch of the loop's rows on which its check names the cause, and give True.

    ``causes_on`` gives the causes that the check names on the batch in a file. Where it is named on none, the file
    holds the rows of the composition; what else is changed of them is known in words only, and left out. There is no
    file where rows cannot be taken, or the batch cannot be pickled.
    """
    try:
        gradients = evidence.shared(StepGradients.of)
        rows = _unique([*smallest.rows, *range(gradients.rows)])
        first = len(_unique(smallest.rows))
        for size in (first * times for times in GROWTH):
            if size < gradients.rows:
                _write(gradients, rows[:size], file)
                if cause in causes_on(file):
                    return True
        _write(gradients, smallest.rows, file)
    except CannotDecide:
        return False
    except Exception as error:  # what pickles the project's own classes may raise anything
        reraise_ours(error)
        file.unlink(missing_ok=True)
    return False


def _unique(rows: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(rows))


def _write(gradients: StepGradients, rows: Sequence[int], file: Path) -> None:
    (batch,) = gradients.composed(Composition(tuple(rows)))
    torch.save(batch, file)


def on_batch(make: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """The same function, whose loops get the batch in the file in place of their own batches.

    Any class may be in the file: it was written by the project's own test.
    """
    batch = torch.load(file, weights_only=False)  # here, since it cannot be read inside a run in float64

    @functools.wraps(getattr(make, "func", make))
    def made(*args: Any, **knobs: Any) -> Any:
        loop = make(*args, **knobs)
        if isinstance(loop, TrainLoop):
            loop.batch, loop.batches = nested.copy(batch), None
        return loop

    return made
