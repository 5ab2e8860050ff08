"""No statement in the loop's modules is a slip that changes the training.

What it does
    It reads the source of the modules that the loop's function refers to. It looks for statements that resemble one of
    the slips in the table. For each it runs the loop as written and with the statement edited, three steps in float64.

Why is this bad?
    ``np.fliplr(image)`` changes nothing, ``p.require_grad = False`` freezes nothing, and swapped arguments raise no
    error. The loss falls all the same.

How it decides
    1. A statement is a candidate if the table names its form. The edit uses names of the same function only.
    2. The edited functions are compiled in memory. No file changes.
    3. Every finding is a fault: a loss that is backpropagated differs by more than rounding (1e3 eps of float64).
    4. The check is silent if nothing differs, or if the edited loop raises.
    5. A result is kept only if it is a new tensor, array or image of the same shape and type, and the call changed
       nothing.
    6. A swap counts as intended if another call of the function keeps the order of the parameters. So it does if a name
       speaks of swapping, and for names of one letter.
    7. A reshape whose sizes are divided (``steps // 2``) is silent, and so is one that merges or splits neighbours.
    8. A method is called only if its object is one of torch's kinds: a tensor, a module, an optimizer, a scheduler.

    | statement | cause |
    |---|---|
    | ``x.masked_fill(mask, 0)``: the result is lost | ``result_not_kept`` |
    | ``optimizer.zero_grad``: the parentheses are missing | ``method_not_called`` |
    | ``p.requires_grad == False``; ``p.require_grad = False`` | ``comparison_as_statement``,
      ``attribute_without_effect`` |
    | ``loss =+ penalty`` | ``plus_behind_the_equals_sign`` |
    | ``h, c = h[rows], h[rows]``, ``min(q1, q1)``, a copied line: one name twice, where another one fits |
      ``name_repeated`` |
    | ``settings.get("label_smooting", 0.0)``, where the key is ``label_smoothing`` | ``key_misspelt`` |
    | ``x.reshape(b, c, h, w)`` of (b, h, w, c); ``x.view(b, heads, t, d)`` of (b, t, heads * d) |
      ``reshape_for_permute`` |
    | ``for head in heads: total += head(x); return total`` | ``return_inside_loop`` |
    | ``for x in steps: out, state = self.gru(x, hidden)``, and nothing reads ``state`` | ``state_not_carried`` |
    | ``self.encoder(x)`` without ``mask=mask``, and nothing else reads ``mask`` | ``argument_not_given`` |
    | ``focal(x, alpha, gamma)`` of ``def focal(x, gamma, alpha)``; ``logvar, mean = encode(x)``, which returns
      ``mean, logvar`` | ``arguments_swapped``, ``results_swapped`` |

When it is skipped
    - The loop cannot be run again: it was observed, or is a script.
    - Two runs under one seed backpropagate different losses.

Faulty
    >>> def fit(model, optimizer, batches):
    ...     for x, y in batches:
    ...         optimizer.zero_grad
    ...         F.cross_entropy(model(x), y).backward()
    ...         optimizer.step()

Fixed
    >>> def fit(model, optimizer, batches):
    ...     for x, y in batches:
    ...         optimizer.zero_grad()
    ...         F.cross_entropy(model(x), y).backward()
    ...         optimizer.step()

Known limits
    Statements outside of functions and the source of installed packages are not read. What runs in worker processes
    that are spawned gets no edit.

References
    https://github.com/udacity/deep-learning-v2-pytorch/issues/12
    https://errorprone.info/bugpattern/ArgumentSelectionDefectChecker
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.no_typos.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=12, steps=1)
def no_typos(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.no_typos.trials import confirmed

    yield from confirmed(evidence)
