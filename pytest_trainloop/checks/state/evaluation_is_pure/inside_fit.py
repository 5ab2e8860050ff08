"""What evaluations that ``fit`` calls do to training: the experiments in their order, and what each of them shows."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from pytest_trainloop.checks.state.evaluation_is_pure.causes import ENDS_INSIDE, found
from pytest_trainloop.checks.state.evaluation_is_pure.naming import holder_of, largest_change, modules_by_path
from pytest_trainloop.checks.state.evaluation_is_pure.seeds import SeedsInFit, changes_of_plan, evaluates
from pytest_trainloop.checks.state.evaluation_is_pure.taken_out import TakenOut
from pytest_trainloop.core.wording import filled, some
from pytest_trainloop.instruments.tracing.statements import end_of
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.runs.memory_budget import require_room
from pytest_trainloop.runs.split_run import same_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.state.evaluation_is_pure.taken_out import Course
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.snapshot import Difference

COPIES, STORED = 6, 16
"""Times the weights in float64 that are held at the peak, and that lie in temporary files, with an optimizer that keeps
two moments."""

MOST_NAMED = 6

CAUSE_OF = {"gradient": "window_cleared", "weight": "weights_left", "buffer": "buffers_moved_by_evaluation"}
"""By kind of leaf; what else a module holds is ``state_left``."""

COMPONENT = {"gradient": "the gradients", "weight": "the weights", "buffer": "the buffers"}

STATE = ("scalar", "tensor", "array", "length")


class InsideFit:
    """The evaluations that ``fit`` calls, taken out. ``undecided`` says why nothing is known of them."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.undecided = "no evaluation inside fit was found that could be taken out"
        self.findings: list[Finding] = []

    @classmethod
    def of(cls, evidence: Evidence) -> InsideFit:
        made, record = cls(evidence), evidence.run()
        if record.raised is None and evidence.repeatable and evaluates(record):
            made.findings = list(made._judge())
        return made

    def _judge(self) -> Iterator[Finding]:
        seen = self._evidence.shared(SeedsInFit.of)
        if not seen.evaluates:
            return
        require_room(self._evidence, COPIES, "it keeps copies of the whole training state", stored=STORED)
        runs = TakenOut(self._evidence, seen.evaluations, changes_of_plan(self._evidence))
        # fit may need what an evaluation sets, as a score in an attribute, or its own precision
        for runs.double, undone in ((True, _anything), (True, _of_training), (False, _of_training)):
            without = runs.run(undone)
            if without.record.raised is None:
                break
        if without.record.raised is not None or not without.calls:
            return
        self.undecided = ""
        candidates: dict[str, list[str]] = {}
        for path, taken in without.changed.items():
            cause = _cause_of(taken.difference)
            if cause and (taken.stepped or cause != "weights_left"):  # not a target network, or an average
                candidates.setdefault(cause, []).append(path)
        if not without.windows:
            candidates.pop("window_cleared", None)
        if not candidates or not _differs(runs.run(lambda _: False), without):
            return
        suspects: list[tuple[str, list[str], Course]] = []
        for cause, paths in candidates.items():
            # what is counted in evaluation alone may change as well
            alone = cause in ("buffers_moved_by_evaluation", "state_left") and len(paths) <= MOST_NAMED
            for part in [[path] for path in paths] if alone else [paths]:
                left = runs.run(partial(_undone_but, part, undone), watched=part)
                if _differs(left, without) and self._is_fault(cause, part, left):
                    suspects.append((cause, part, left))
        if suspects and self._only_evaluates(runs, undone, without):
            for cause, part, left in suspects:
                yield self._finding(cause, part, left, without)
        else:
            self.undecided = "evaluations inside fit change training, perhaps on purpose"

    def _is_fault(self, cause: str, paths: list[str], left: Course) -> bool:
        """Whether nobody wants it: early stopping puts the best weights back, and centres or prototypes are
        computed again by a function that does nothing else."""
        if left.record.raised is not None:
            return False
        before, after = left.forwards
        if cause == "weights_left":  # put in for the forward passes that follow, from an average
            return after > 0 and bool(holder_of(left.holders)) and not left.known
        if cause == "window_cleared":
            return bool(left.windows)
        owners = dict(modules_by_path(self._evidence.fresh_loop()))
        if all(isinstance(owners.get(path.rpartition(".")[0]), NORM_MODULES) for path in paths):
            return True
        # what a hook at the end of an epoch does besides evaluating comes before all of its passes, or after them
        return left.writer in left.elsewhere and (left.in_forward or (before > 0 and after > 0))

    @staticmethod
    def _only_evaluates(runs: TakenOut, undone: Callable[[Difference], bool], without: Course) -> bool:
        """Whether training is the same whatever the model computes in these calls: not where they steer it, or make its
        data (samples of a generator, rollouts, pseudo labels). And whether two equal runs are the same at all."""
        plain, displaced = (runs.run(_of_training, displaced=turned) for turned in (False, True))
        return not _differs(displaced, plain) and not _differs(runs.run(undone), without)

    @staticmethod
    def _finding(cause: str, paths: list[str], left: Course, without: Course) -> Finding:
        taken = next((left.changed[path] for path in paths if path in left.changed), without.changed[paths[0]])
        names = [path.removesuffix(".grad") for path in (left.windows if cause == "window_cleared" else paths)]
        steps = left.record.rounds
        facts = {
            "level": "fault",
            "what": some(names),
            "evaluation": taken.function,
            "holder": holder_of(left.holders) if cause == "weights_left" else "",
            "backwards": next(iter(left.windows.values()), 0),
            "when": "inside fit",
            "raised": False,
            "component": COMPONENT.get(taken.difference.leaf.kind, some(names)),
        }
        by_the_model = re.search(r"self\.\w+(\s*[-+*/]?=[^=]|\.\w+_\()", left.where)
        if cause != "window_cleared" and not by_the_model:
            facts["change"] = end_of(None, left.where, taken.function.removesuffix("()"))
        facts["tried"] = f"with {facts['component']} restored after {taken.function} training ends as without it"
        change = largest_change(left.end, without.end, _trained(without), same_tensor)
        measured = filled(ENDS_INSIDE, {**facts, **change, "rounds": steps})
        return found(cause, left.where, names[:MOST_NAMED], measured=measured, **facts)


def _cause_of(difference: Difference) -> str:
    """What it would be called if training depends on it; nothing for what belongs to no module."""
    leaf = difference.leaf
    of_module = leaf.kind in STATE and "model" in leaf.reached_from
    return CAUSE_OF.get(leaf.kind, "state_left" if of_module else "")


def _anything(_difference: Difference) -> bool:
    return True


def _of_training(difference: Difference) -> bool:
    """Whether a module or an optimizer holds it, and not the project's own bookkeeping or data."""
    return difference.leaf.kind not in STATE or bool(_cause_of(difference))


def _undone_but(paths: list[str], undone: Callable[[Difference], bool], difference: Difference) -> bool:
    return difference.leaf.path not in paths and undone(difference)


def _trained(course: Course) -> set[str]:
    return {name for name, start in course.start.items() if not same_tensor(start, course.end.get(name))}


def _differs(one: Course, without: Course) -> bool:
    """Whether training is another, by the weights that move without evaluations."""
    moved = _trained(without)
    return one.record.raised is not None or any(
        not same_tensor(one.end.get(name), without.end.get(name)) for name in moved
    )
