"""A compiled loop trains as the eager one does.

What it does
    With a knob ``compile=False`` it runs the loop both ways, from the same weights and over the same batches, and
    compares what each optimizer step reads and leaves: gradients, weights, buffers, options of parameter groups.

Why is this bad?
    A compiler is trusted to change nothing but speed. Where it, or what the project does around it, changes the
    gradients, the training that runs for weeks is not the one that was developed, and nothing is raised.

How it decides
    The loop is built in float64. The compiled run is made under no mode of this package, since torch compiles nothing
    under one; gradients are read before each optimizer step, and after each the compiled run goes on from the eager
    run's weights. Both make the same operations, so that gradients agree to rounding: 1e3 machine epsilons of the
    lowest precision seen; below float64 a difference must also be ten times what rounding changes in the eager run.
    Random numbers are those of the eager run (torch's ``fallback_random``); where the runs differ and something draws,
    dropout is left out of both.
    Where they differ, one thing is changed at a time. 1. The knob on and ``torch.compile`` disabled: if the loop still
    differs, the compiler is not the reason. 2. Torch's wrapper around the model, with nothing compiled: it is the
    wrapper; with plain names in it the loop agrees: it is the names. 3. Compiled again for each step: if the loop now
    agrees, the graph held a value of an earlier step. 4. Backend ``eager``, then ``aot_eager``, then the loop's own:
    the first that differs says whether the captured graph, the traced backward pass or the generated code is the
    reason. The project's own operators are compared with what they declare. 5. Each module is compiled alone: the
    innermost that differs is named.
    Graph breaks, and functions that are compiled again in later steps, are advice with their line.

Faulty
    >>> if compile:
    ...     torch.compile(model, backend="aot_eager")

Fixed
    >>> if compile:
    ...     model = torch.compile(model, backend="aot_eager")

Known limits
    Five optimizer steps are compared, fewer of large models (1 GiB of kept gradients and weights). Compiling takes its
    time, some seconds for a small model with inductor, within ``--trainloop-timeout``; the option ``backend``, as in
    ``compile_parity={"backend": "aot_eager"}``, tries another. An optimizer whose ``step`` is compiled calls no hooks:
    the weights that it leaves are compared where the next batch is taken. What compiled code does to speed and memory
    is not judged. The process forgets what it had compiled before (``torch.compiler.reset``).

References
    https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
    https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.scale.compile_parity.causes import CAUSES
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

BACKENDS = ("own", "eager", "aot_eager", "inductor")


@check(needs={"run"}, causes=CAUSES, rank=20, long=True, steps=200)
def compile_parity(evidence: Evidence, *, backend: str = "own") -> Iterator[Finding]:
    """The backend is the loop's own (``own``), or always the one that ``backend`` names."""
    if backend not in BACKENDS:
        raise UsageError(f"the option backend is {backend!r}; {', '.join(BACKENDS)} are known")
    from pytest_trainloop.checks.scale.compile_parity.parity import Parity

    runs = Parity(evidence, None if backend == "own" else backend)
    if runs.fault is not None:
        yield runs.fault
        return
    runs.require_compared()
    yield from runs.advice()
    yield from runs.saved()
    runs.require_generated_code()
