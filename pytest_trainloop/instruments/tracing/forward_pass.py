"""One forward pass of a fresh loop in which every tensor of data is a leaf that a gradient can reach.

All trainable weights are moved a little first: behind a layer that starts at zero nothing depends on anything yet.
Dropout is off, and batch norms use their running statistics. Checkpoints are plain calls: what they would run again
would come after the pass, when its modes are closed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.instruments.gradients.dependence import moved_a_little
from pytest_trainloop.instruments.tracing.arguments import takes_data
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import Lineage, Node, name_of, watched
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import around_modules
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import tree_map
from pytest_trainloop.recording.torch_names import EMBEDDINGS, LOSSES
from pytest_trainloop.runs.checkpoint_bypass import switched, without
from pytest_trainloop.runs.no_randomness import NoRandomness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.run import RunPlan

MOST_OPS = 20_000
"""Operations of one pass that are kept."""

LONGEST = 16
"""Backward passes after which a run ends even without a step: the forward pass was long before."""

Replacement = Callable[["Op"], Any]
"""Makes what takes the place of an operation's result."""


@dataclass(slots=True, eq=False)
class Op:
    """One call of a torch function in the pass, with the user's line and the module."""

    number: int
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: Place
    module: str
    out: Any = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        return list(tensors_in(self.args, self.kwargs))

    @property
    def outputs(self) -> list[torch.Tensor]:
        return list(tensors_in(self.out))

    @property
    def named(self) -> str:
        """The module and the function, for a message."""
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass(slots=True, eq=False)
class DataInput:
    """A tensor of data that enters the model: an input, or what an embedding looked up."""

    leaf: torch.Tensor
    """What to differentiate by."""
    ids: torch.Tensor | None = None
    """The ids that were looked up."""
    source: Node | None = None
    """What the input, or the ids, were computed by."""


@dataclass(eq=False)
class ForwardPass(WatchingMode):
    """The pass of a run by ``plan``: what enters the model, and the operations between."""

    at_call: Callable[[Any], Any] = lambda arguments: arguments
    """Gives the arguments and keywords for each outermost call of a model, from those that the loop calls it with."""
    at_end: Callable[[ForwardPass, Any], None] = lambda seen, output: None
    """Called with what each outermost call of a model returns."""
    at_loss: Callable[[ForwardPass, str, tuple[Any, ...], dict[str, Any]], None] = lambda seen, name, args, kwargs: None
    """Called with the name, arguments and keywords of each call of a loss function."""
    eval_mode: bool = False
    """Whether the model is in evaluation mode for the pass."""
    flipped: frozenset[str] = frozenset()
    """Paths of the layers whose ``batch_first`` is flipped."""
    replacements: Mapping[int, Replacement] = field(default_factory=dict)
    """Other results in place of operations, by their number."""
    edits: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Other values in place of tensors of data that enter the model, by their number."""
    open_inputs: bool = True
    """Whether the model's arguments are made leaves, too: a model may refuse that (``x.numpy()``)."""
    everywhere: bool = False
    """Whether operations outside of models are kept as well."""
    data_inputs: list[DataInput] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    lineage: Lineage = field(default_factory=Lineage)
    _depth: int = 0
    _count: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        WatchingMode.__init__(self)

    def plan(self, base: RunPlan, **changed: Any) -> RunPlan:
        """The run of this pass: until the first step. ``fit`` may raise after what is judged."""
        if self.eval_mode:
            changed = {"varied": "in evaluation mode", "varying": self._modes_only, **changed}
        return replace(base, prepare=moved_a_little, contexts=self.contexts, enough=_over, may_raise=True, **changed)

    def _modes_only(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """The pass in evaluation mode, with nothing else of what this class does."""

        def enter(module: nn.Module, _args: Any, _kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                self._switch_modes(module)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._depth -= 1
            if not self._depth:
                self._close()

        self._depth = 0
        return (around_modules([module for _, module in watch.table.named_modules()], enter, leave),)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self, NoRandomness(self._draws), switched(without))

    def _draws(self, _name: str) -> bool:
        """Outside of models all functions draw: this may be the data."""
        return not self._depth

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        modules = [module for _, module in watch.table.named_modules()]
        try:
            with super().watching(watch), around_modules(modules, self._enter, self._leave):
                yield
        finally:
            self._close()
            self.lineage.forget()
            self.ops.clear()
            self.data_inputs.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or watch.is_suspended:
            return None
        if self._depth:
            self._depth += 1
            if takes_data(module, args) and torch.is_grad_enabled():
                with watch.suspended():
                    return tuple(self._opened(a) for a in args), kwargs
            return None
        if not torch.is_grad_enabled() or watch.backward is not None or watch.record.begun or watch.stepping:
            return None
        self._depth = 1
        self._switch_modes(module)
        with watch.suspended():
            args, kwargs = self.at_call((args, kwargs))
            if self.open_inputs:
                args, kwargs = tree_map(self._opened, args), tree_map(self._opened, kwargs)
            return args, kwargs

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self._watch
        if watch is None or watch.is_suspended or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self._close()
            if output is not None:
                with watch.suspended(), torch.enable_grad():
                    self.at_end(self, output)

    def _switch_modes(self, root: nn.Module) -> None:
        for module in members.modules(root):
            if self.eval_mode and module.training:
                module.training = False
                self._undo.append(lambda module=module: setattr(module, "training", True))  # type: ignore[misc]
            first = getattr(module, "batch_first", None)
            if (
                isinstance(first, bool)
                and self._watch is not None
                and self._watch.table.path_of(module) in self.flipped
            ):
                module.batch_first = not first  # type: ignore[assignment]
                self._undo.append(lambda module=module, first=first: setattr(module, "batch_first", first))  # type: ignore[misc]

    def _close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _opened(self, value: Any) -> Any:
        """The value, its gradient reaching a leaf if it is a tensor of data."""
        if not _plain(value) or value.requires_grad or isinstance(value, nn.Parameter):
            return value
        leaf = self._leaf(value)
        self.data_inputs.append(DataInput(leaf, source=self.lineage.of(value)))
        return leaf.clone()

    def _leaf(self, value: torch.Tensor) -> torch.Tensor:
        edit = self.edits.get(len(self.data_inputs), torch.clone)
        return edit(value.detach()).requires_grad_()

    def active(self) -> bool:
        """Until the first step has ended: a closure that it calls computes the loss too. What the optimizer itself
        computes is left out: kept, its results would be several times the weights."""
        watch = self.watch
        return not (watch.is_suspended or watch.stepping or watch.record.begun or watch.backward is not None)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if not watched(name):
            return passed_on(func, args, kwargs)
        with watch.suspended():
            if name in LOSSES:
                self.at_loss(self, name, args, kwargs)
            parents = self.lineage.before(name, args, kwargs)
            op = Op(self._count, name, func, args, kwargs, here()[0], watch.module_path())
        out = passed_on(func, args, kwargs)
        if self._depth or self.everywhere:
            out = self._kept(watch, op, out)
        with watch.suspended():
            self.lineage.note(watch, func, name, args, kwargs, parents, out)
        return out

    def _kept(self, watch: Watch, op: Op, out: Any) -> Any:
        self._count += 1
        op.out = out
        if op.number in self.replacements:
            with watch.suspended():
                out = op.out = self.replacements[op.number](op)
        elif op.name in EMBEDDINGS and isinstance(out, torch.Tensor) and torch.is_grad_enabled():
            with watch.suspended():
                out = op.out = self._looked_up(op, out)
        if len(self.ops) < MOST_OPS:
            self.ops.append(op)
        return out

    def _looked_up(self, op: Op, out: torch.Tensor) -> torch.Tensor:
        ids = next((t for t in op.inputs if not t.is_floating_point()), None)
        leaf = self._leaf(out)
        self.data_inputs.append(DataInput(leaf, ids, None if ids is None else self.lineage.of(ids)))
        if not out.requires_grad:
            return leaf.clone()
        return leaf + (out - out.detach())  # zeros, by which the table gets the gradient that the loop may read


def _over(record: Record) -> bool:
    return record.begun or len(record.backwards()) >= LONGEST


def recomputed(op: Op) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs of an operation as leaves, and its outputs computed from these.

    Gradients between them are those of the operation alone, whatever else its arguments have in common. Weights are no
    leaves. Both lists are empty where the operation cannot be called again.
    """
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach().clone()
        if not value.requires_grad or isinstance(value, nn.Parameter):
            return fresh
        leaves.append(fresh.requires_grad_())
        return fresh.clone()  # the operation may write in place

    with torch.enable_grad():
        given = tree_map(leaf, (op.args, dict(op.kwargs)))
        try:
            return leaves, list(tensors_in(op.func(*given[0], **given[1])))
        except Exception as error:  # a function of the project's own may need more than its arguments
            reraise_ours(error)
            return [], []


def _plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and not value.is_nested
        and value.dim() > 0
        and value.numel() > 0
    )


def axis_of(tensor: torch.Tensor, rows: int) -> int | None:
    """The one axis of this size; None where there is none, or more than one."""
    found = [d for d, size in enumerate(tensor.shape) if size == rows]
    return found[0] if len(found) == 1 else None


def weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """A sum with another weight for each entry, so that no two cancel by symmetry as softmax outputs would."""
    weights = torch.linspace(0.5, 1.5, values.numel(), dtype=torch.float64, device=values.device)
    phases = torch.cos(torch.arange(values.numel(), dtype=torch.float64, device=values.device) * math.e)
    return (values.double().flatten() * (weights + 0.3 * phases)).sum()


def grads(of: torch.Tensor, by: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient with respect to each of these tensors; the graph is kept."""
    if not of.requires_grad or not by:
        return [None] * len(by)
    return list(torch.autograd.grad(of, by, retain_graph=True, allow_unused=True))
