"""A compiled loop trains as the eager one does.

What it does
    With a knob ``compile=False`` it runs the loop both ways, from the same weights and over the same batches. It
    compares what each optimizer step reads and leaves: gradients, weights, buffers, options of parameter groups.

Why is this bad?
    A compiler is trusted to change nothing but speed. Where it, or what the project does around it, changes the
    gradients, the training that runs for weeks is not the one that was developed, and nothing is raised.

How it decides
    1. The loop is built in float64. The compiled run is made under no mode of this package: torch compiles nothing
       under one. After each step it goes on from the eager run's weights.
    2. Gradients must agree to 1e3 machine epsilons of the lowest precision seen. Below float64 a difference must also
       be ten times what rounding changes in the eager run.
    3. Random numbers are those of the eager run (``fallback_random``). If the runs differ and something draws, dropout
       is left out of both.
    4. If they differ, one thing is changed at a time. The first row of the table that holds is the cause. Modules
       compiled alone show the innermost that differs.
    5. The compiled loop's ``load`` must restore its own checkpoint. If only the loop without compiling does not restore
       it, that is advice.

    | first that holds | cause | advice if |
    |---|---|---|
    | the compiled copy's parameters are in no optimizer | ``copy_compiled`` |  |
    | with ``torch.compile`` disabled it still differs | ``other_computation`` |  |
    | torch's wrapper differs with nothing compiled; plain names heal it | ``prefix_hides_parameters`` |  |
    | the wrapper differs with plain names too | ``wrapper_changes`` |  |
    | compiled again for each step, it agrees | ``stale_value`` |  |
    | the project's operator breaks its declaration | ``operator_misdeclared`` |  |
    | it raises; not with ``torch.compile`` disabled | ``compiling_raises`` |  |
    | backend ``eager``, ``aot_eager``, or the loop's own differs first | ``compiled_code_differs`` |  |
    | ``load`` does not restore | ``checkpoint_not_restored`` | with compiling it does |
    | nothing was compiled | ``never_runs`` | always |
    | graph breaks; functions compiled again in later steps | ``graph_breaks``, ``recompilations`` | always |

When it is skipped
    It skips loops whose rounding hides a difference, and backends that cannot be tried.

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
