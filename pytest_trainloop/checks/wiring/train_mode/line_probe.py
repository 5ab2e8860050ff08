"""What a model's calls on one line are given and return, and what the loop makes of their results."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop import members, nested
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.torch_names import EQUALITIES, SAMPLES
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import call_from_outside, hooked, unless_suspended
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from pytest_trainloop.recording.watch import Watch

Change = Literal["nothing", "evaluation mode", "other results"]

_NORMS = frozenset({"batch_norm", "instance_norm"})
_MAY_DROP = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh"})
_CHOOSES = frozenset({"argmax", "argmin", "argsort", "topk", "sort"})
_READS = frozenset({"item", "__float__", "__int__", "__bool__", "__format__", "tolist", "numpy"})


class LineProbe(WatchingMode):
    """Watches the outermost calls of a model on one line, in a run of its own.

    ``change`` says what is done to these calls: "evaluation mode" switches the model for them, "other results" replaces
    what they return and follows what is computed with it.
    """

    def __init__(self, site: object, change: Change = "nothing") -> None:
        super().__init__()
        self._site, self._change = site, change
        self._depth = 0
        self._open = False
        self._switched: list[nn.Module] = []
        self._scores: dict[int, bool] = {}
        self._kept: list[torch.Tensor] = []
        self._trained_on: set[int] = set()
        self.result: list[torch.Tensor] | None = None
        """The tensors that the first call returned."""
        self.shape: object = None
        """The structure and shapes of what the first call returned."""
        self.given: list[tuple[int, str]] = []
        """The optimizer step and a digest of the inputs of each call."""
        self.repeated_rows = False
        """Whether at least half the rows of some input repeat others."""
        self.dropped = False
        """Whether dropout of torch's was active in a call."""
        self.normed = False
        """Whether a norm of torch's used the statistics of the batch in a call."""
        self.scored = False
        """Whether a replaced result became one number outside torch: a loss, an accuracy."""
        self.taken_out = False
        """Whether replaced results left torch row by row (``numpy``, ``tolist``)."""
        self.on_training_batch = False
        """Whether a call was given what the model was trained on before."""

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, _args: Any) -> None:
            with watch.suspended():
                if self._depth:
                    self._depth += 1
                elif (call := call_from_outside(watch, module)) is not None and call.site == self._site:
                    self._depth, self._open = 1, True
                    evaluating = self._change == "evaluation mode"
                    self._switched = [m for m in members.modules(module) if trains(m)] if evaluating else []
                    for part in self._switched:
                        part.training = False

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self._depth = max(0, self._depth - 1)
            if self._depth:
                return None
            with watch.suspended():
                if self._open:
                    self._open = False
                    for part in self._switched:
                        part.training = True
                    if self._change == "other results":
                        return self._replaced((args, kwargs), output)
                    self._note(watch, (args, kwargs), output)
                elif self._change == "other results" and call_from_outside(watch, module) is not None:
                    self._note_elsewhere(list(nested.tensors((args, kwargs))))
                return None

        before = before_modules(unless_suspended(watch, enter))
        after = after_modules(unless_suspended(watch, leave), with_kwargs=True, always_call=True)
        with super().watching(watch), hooked(before, after):
            yield

    def _note(self, watch: Watch, given: Any, output: Any) -> None:
        tensors = [t for t in nested.tensors(given) if address(t)]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.detach().cpu().to(torch.float64).contiguous().numpy().tobytes())
        self.given.append((watch.record.steps, digest.hexdigest()))
        first = next((t for t in tensors if t.dim() > 1 and len(t) > 1), None)
        if first is not None and not self.repeated_rows:
            rows = first.detach().flatten(1)
            self.repeated_rows = 2 * len(torch.unique(rows, dim=0)) <= len(rows)
        if self.result is None and output is not None:
            self.result = [t.detach().clone() for t in nested.tensors(output)]
            self.shape = _shape(output)

    def _note_elsewhere(self, given: list[torch.Tensor]) -> None:
        """Keep what the model is trained on: an address may not be used again."""
        self._trained_on |= set(map(address, given)) - {0} if torch.is_grad_enabled() else set()
        self._kept += given

    def _replaced(self, given: Any, output: Any) -> Any:
        self.on_training_batch |= any(address(t) in self._trained_on for t in nested.tensors(given))
        for tensor in nested.tensors(output):
            if tensor.is_floating_point():
                tensor.mul_(-3.0).add_(1.0)
            self._follow(tensor, score=True)
        return output

    def _follow(self, tensor: torch.Tensor, *, score: bool) -> None:
        self._scores[id(tensor)] = score
        self._kept.append(tensor)  # an identity may not be used again

    def active(self) -> bool:
        """Inside the calls on the line, and wherever a score may be made of replaced results, also inside steps and
        backward passes."""
        return self._depth > 0 or (bool(self._scores) and not self.scored)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._depth:
            self.dropped = self.dropped or name in _MAY_DROP or ("dropout" in name and _flag(args, kwargs, 2, True))
            self.normed = self.normed or (name in _NORMS and _flag(args, kwargs, 5, False))
        out = passed_on(func, args, kwargs)
        known = [self._scores[id(t)] for t in tensors_in(args, kwargs) if id(t) in self._scores] if self._scores else []
        if not known or self.scored or name in SAMPLES:
            return out
        if name not in _READS:
            # what is chosen by results (an action, the next token) is no score until it is compared with something
            score = (any(known) and name not in _CHOOSES) or name in EQUALITIES
            for tensor in tensors_in(out):
                self._follow(tensor, score=score)
        elif "distributions" not in Path(sys._getframe(2).f_code.co_filename).parts:  # these validate their arguments
            self.scored = any(known) and args[0].numel() == 1
            self.taken_out = self.taken_out or args[0].numel() > 1
        return out

    @property
    def samples(self) -> bool:
        """Whether the same input is given several times between two steps, or in one call: dropout is wanted there."""
        return self.repeated_rows or len(set(self.given)) < len(self.given)

    @property
    def held_out(self) -> bool:
        """Whether the first input after each step is always the same."""
        first: dict[int, str] = {}
        for step, digest in self.given:
            first.setdefault(step, digest)
        return len(first) > 1 and len(set(first.values())) == 1

    def same_result(self, other: LineProbe) -> bool:
        if self.shape != other.shape or self.result is None or other.result is None:
            return False
        return all(torch.equal(a, b) for a, b in zip(self.result, other.result, strict=True))


def _flag(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: bool) -> bool:
    value = kwargs.get("training", kwargs.get("use_input_stats", default))
    return bool(args[position] if len(args) > position else value)


def _shape(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {str(k): _shape(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_shape, value)]
    return type(value).__name__
