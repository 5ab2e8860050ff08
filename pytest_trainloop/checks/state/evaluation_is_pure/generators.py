"""The global random generators, and who seeds them."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.events import Place

TORCH = "torch's generator"
NUMPY = "numpy's generator"
PYTHON = "python's generator"


class Seed(NamedTuple):
    """A call that sets the state of a global generator."""

    call: str
    place: Place


def global_states() -> dict[str, object]:
    """The states of the global generators, to be compared."""
    states: dict[str, object] = {TORCH: torch.get_rng_state().numpy().tobytes(), PYTHON: hash(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["CUDA's generator"] = b"".join(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states[NUMPY] = (keys.tobytes(), *rest)
    return states


@contextlib.contextmanager
def noted_seeds(note: Callable[[Seed], None]) -> Iterator[None]:
    """Call ``note`` for each call that seeds a global generator."""

    def noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def seed(*args: Any, **kwargs: Any) -> Any:
                note(Seed(name, here()[0]))
                return original(*args, **kwargs)

            return seed

        return around

    with Patches() as patches:
        patches.put(torch, "manual_seed", noting("torch.manual_seed()"))
        patches.put(torch, "set_rng_state", noting("torch.set_rng_state()"))
        patches.put(random, "seed", noting("random.seed()"))
        if (numpy := sys.modules.get("numpy")) is not None:
            patches.put(numpy.random, "seed", noting("np.random.seed()"))
        yield


def generator_of(call: str) -> str:
    """The generator that a call seeds."""
    return {"random": PYTHON, "np": NUMPY}.get(call.partition(".")[0], TORCH)
