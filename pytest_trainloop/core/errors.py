"""The exceptions of this package. Standard library only.

``TrainLoopError``
    ``UsageError``        what the user wrote cannot be judged; one sentence says what was given and what is needed
    ``UserCodeError``     the user's own code raised; carries it as text
    ``CheckFailed``       a check found a fault (also an AssertionError, for tests that call checks)
``TimeRanOut``            a run took longer than ``--trainloop-timeout``; the check that needed it is skipped
    ``OutOfBudget``       the checks of this loop took what they may take together: the check is not looked at
``CannotDecide``          a check's way to skip, with a reason a user can act on
    ``DoesNotApply``      the loop does not pose the check's question
    ``Refused``           the loop raised on a batch that the check made, and not on its own
``BrokenRun``             fit raised because of what this package put around it: a mistake of ours
``OwnMistake``            this package made a mistake, as text; the check that meets it ends as an error
``Unreliable``            two identical runs differ where the check needs them equal
``BrokenCheck``           the warning that a card or a picture could not be made because of a mistake of ours
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.finding import Result, UserError


class TrainLoopError(Exception):
    """Base of the exceptions that this package raises to its users: ``except TrainLoopError`` catches them all."""


class UsageError(TrainLoopError):
    """What was given cannot be judged. The message says what was given, what is needed, and where.

    ``place`` is the user's line, ``train.py:57``, put at the end in parentheses; empty where it is not known.
    """

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(f"{message} ({place})" if place else message)
        self.place = place


class UserCodeError(TrainLoopError):
    """The user's own code raised while the loop was built or run.

    ``one_check``: it is code that one check alone calls, so that the others go on.
    """

    def __init__(self, error: UserError, *, one_check: bool = False) -> None:
        super().__init__(f"{error.stage} raised {error.summary}")
        self.error = error
        self.one_check = one_check


class CheckFailed(TrainLoopError, AssertionError):
    """At least one check failed, or met an exception of the loop's. The message has the failure texts.

    ``results`` are the ``Result`` objects of all checks, also of those that passed.
    """

    def __init__(self, message: str, results: Sequence[Result] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


class TimeRanOut(Exception):
    """A run of ``fit`` took longer than it may: whatever a check saw before, it is skipped, since a verdict would
    depend on how fast the machine is. No ``CannotDecide``: a check must not go on to another question instead."""

    def __init__(self, steps: int, seconds: float, where: str = "") -> None:
        self.steps, self.seconds = steps, seconds
        super().__init__(
            f"time ran out after {steps} steps{where}: give --trainloop-timeout={2 * seconds:g} or more (it is "
            f"{seconds:g} s), or a smaller model"
        )


class OutOfBudget(TimeRanOut):
    """The checks of one loop have taken the ``seconds`` that they may take together, and this one was not looked at.

    ``needed`` is an estimate of the seconds that would do, infinite where there is none.
    """

    def __init__(self, seconds: float, needed: float) -> None:
        self.steps, self.seconds = 0, seconds
        self.needed = needed
        given = f"--trainloop-budget={needed:.0f} may do" if needed < math.inf else "give --trainloop-budget=SECONDS"
        Exception.__init__(
            self, f"the {seconds:g} s that the checks of one loop may take were over; {given}, or use a smaller model"
        )


class CannotDecide(Exception):
    """Raised inside a check that cannot decide: the check is skipped with this reason.

    ``needs`` names what the user can give to have it decided, as one would type it: ``"padding="``, ``"accumulate=1"``.
    """

    def __init__(self, reason: str, *, needs: str = "") -> None:
        super().__init__(reason)
        self.needs = needs


class DoesNotApply(CannotDecide):
    """Raised inside a check whose question this loop does not pose: there is nothing that the user left out."""


class Refused(CannotDecide):
    """Raised inside a check where the loop raised on what the check made for it (rows cut, split, in another order, in
    float64), and not on its own batches. A check with other questions goes on to these first."""


class NotRecorded(CannotDecide):
    """Raised inside a check that compares with what was recorded, where nothing is: the loop need not be run."""


class Unreliable(Exception):
    """Raised inside a check when two identical runs of the loop differ where they must be equal."""


class BrokenRun(Exception):
    """Raised inside a check when ``fit`` raised in a run of this package and comes back without what is put around it:
    a mistake of ours, although the exception is one of the project's."""


REPORT = "please report it in the issue tracker of pytest-trainloop"
"""What every text about a mistake of this package asks for."""


class OwnMistake(Exception):
    """This package made a mistake: an exception of its own code, as text.

    ``place`` is the line of this package, empty where it is not known; ``traceback`` has all frames.
    """

    def __init__(self, summary: str, *, place: str = "", traceback: str = "") -> None:
        super().__init__(summary)
        self.place, self.traceback = place, traceback

    @property
    def sentence(self) -> str:
        """What was wrong and where, behind the name of a check: "step_order was stopped by ..."."""
        at = f" ({self.place})" if self.place else ""
        return f"a mistake in pytest-trainloop, not in your code: {self}{at}; {REPORT}"


class BrokenCheck(UserWarning):
    """A card or a picture could not be made because of a mistake of this package, which should be reported."""
