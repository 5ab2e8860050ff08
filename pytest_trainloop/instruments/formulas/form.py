"""What a textbook form is: its arguments, the sums that it is made of, and how coefficients of these are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    DIVISIONS,
    JOINS,
    MASKING,
    MULTIPLICATIONS,
    NEGATIONS,
    RECIPROCALS,
    SUBTRACTIONS,
)

if TYPE_CHECKING:
    import torch

    from pytest_trainloop.core.finding import Level
    from pytest_trainloop.instruments.formulas.cut import Cut
    from pytest_trainloop.instruments.formulas.trial import Aim

Role = Literal[
    "probabilities",
    "log_probabilities",
    "scores",
    "labels",
    "signs",
    "classes",
    "values",
    "boxes",
    "corner_boxes",
    "positive",
    "shares",
]
"""What an argument holds. "labels" lie in [0, 1] (0 and 1, or soft); "signs" are -1 and 1; "classes" are whole numbers;
"boxes" have four numbers on the last axis, "corner_boxes" two corners, the smaller first; "positive" values are
above 0, and "shares" sum to 1 along the last axis."""

Coefficients = Mapping[str, float]
Basis = Callable[..., "Mapping[str, torch.Tensor] | None"]
"""Gives the parts of a form for its arguments (and its free numbers, as keywords), each with the shape of the value, or
with more entries that are then averaged; None where shapes do not fit."""

ARITHMETIC = (
    ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | DIVISIONS | NEGATIONS | RECIPROCALS | JOINS | MASKING
    | frozenset({"mean", "sum", "nanmean", "maximum", "minimum", "max", "min", "relu", "clamp", "clamp_min", "pow"})
    | frozenset({"__pow__", "square", "softplus", "log", "exp", "abs", "sqrt", "logsigmoid", "log_sigmoid", "addcmul"})
)  # fmt: skip
"""Functions whose result may be the value of a form."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong ingredient of a form."""

    cause: str
    """The cause of ``loss_formula`` that it is."""
    summary: str
    """What is computed, in one sentence, after the name of the form."""
    repair: str
    """What to write."""
    at: frozenset[str] = frozenset()
    """Functions whose call is to change, where all of them between the arguments and the value are in one line."""
    shown_by: str = ""
    """What the corrected form shows, besides its agreement."""
    shifted: bool = False
    """Whether it moves the optimum: no more is claimed than that the loss leaves the outputs that are best."""
    otherwise: Level | None = None
    """What it is where the loss gets the form to its aim all the same; nothing, where it claims that it does not."""
    level: Level = "fault"


@dataclass(frozen=True, slots=True)
class Reading:
    """What coefficients say of a form: the mistake, and whether the value is a cost (1) or a score (-1)."""

    direction: int = 0
    mistake: Mistake | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What fills the placeholders in the words of the mistake."""
    worse: Mistake | None = None
    """What it is where training makes the form worse, in place of a turned sign."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a form. ``learned``: it has a gradient (True), has none (False), or either (None)."""

    name: str
    role: Role = "values"
    learned: bool | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a form, right (no ``mistake``) or wrong in one ingredient.

    The value is written as a sum of the ``basis`` parts with constant coefficients, and of a constant ("1"). ``read``
    says what they mean: None where they are none of this form's. With ``fraction`` the value is a fraction of two such
    sums; their coefficients are "name" above and "/name" below the bar.
    """

    basis: Basis
    read: Callable[[Coefficients], Reading | None]
    mistake: Mistake | None = None
    fraction: bool = False
    roles: tuple[Role, ...] | None = None
    """What the arguments hold, where that is more than the form says."""
    aim: Aim | None = None
    """What the form put right is for."""
    suits: Callable[[Cut], bool] = lambda cut: True
    """Whether these arguments may be taken in this way."""
    holds: Callable[[Cut, Mapping[str, float]], bool] = lambda cut, numbers: True
    """Whether an agreement with these free numbers says anything: a clamp that cuts nothing is none."""
    look: Callable[[Cut, Reading], Reading] = lambda cut, reading: reading
    """What the value at other arguments adds to a reading."""


@dataclass(frozen=True, slots=True)
class Form:
    """One textbook form.

    ``needs`` are sets of functions, one of each set must lie between the arguments and the value. ``ops`` are the
    functions that may give the value. ``numbers`` are free numbers of the form with what is tried first; all plain
    numbers in the calls between are tried as well, where ``among`` admits them. ``forbids``: functions that may not lie
    between.
    """

    name: str
    page: str
    arguments: tuple[Argument, ...]
    variants: tuple[Variant, ...]
    ops: frozenset[str] = ARITHMETIC
    needs: tuple[frozenset[str], ...] = ()
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    among: Callable[[str, float], bool] = lambda name, number: True
    aim: Aim | None = None
    """What comes out right where each argument is what the form takes."""
    judges_direction: bool = True
    """Whether a loop that makes it worse on purpose is not known: else its sign is judged."""
    always_judged: bool = False
    """Whether its sign is judged next to other terms too, and whatever its target is: where every match of the loop is
    added to what is backpropagated, and is made worse."""
    suits: Callable[[Cut], bool] = lambda cut: True
    """Whether the arguments are those of this form, by shapes and values."""
    farthest: bool = False
    """Whether the values farthest from the value are tried first: many lie between."""
    on_unit: bool = False
    """Whether agreement for predictions in [0, 1] is enough where those of the run lie outside and a clamp lies
    between: a divisor that is kept above 0 is cut there."""


def one_part(
    form: Callable[..., torch.Tensor | None],
    mistake: Mistake | None = None,
    *,
    rises: bool = False,
    worse: Mistake | None = None,
    **more: Any,
) -> Variant:
    """A form that is known up to a factor and a constant: a cost, or (``rises``) a score. ``worse`` is what it is where
    the cost is raised; ``more`` are other fields of a ``Variant``."""

    def basis(*arguments: torch.Tensor, **numbers: float) -> Mapping[str, torch.Tensor] | None:
        made = form(*arguments, **numbers)
        return None if made is None else {"form": made}

    def read(found: Coefficients) -> Reading | None:
        factor = -found["form"] if rises else found["form"]
        return Reading(1 if factor > 0 else -1, mistake, worse=worse) if factor else None

    return Variant(basis, read, mistake, **more)


def same(a: float, b: float) -> bool:
    """Whether two fitted coefficients are one number."""
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
