"""What is compared: the optimizer steps of two runs, operators with what they declare, and a loop with its checkpoint.

The steps of the eager run are kept. The other run takes over its weights and buffers after each step: an optimizer that
divides by the size of a gradient magnifies its rounding from step to step.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pytest_trainloop.core import members
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.declare.fields import path_parameter
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.instruments.gradients.compare import Agreement, agreement, by_tensor
from pytest_trainloop.instruments.gradients.tolerances import CANCELLATION
from pytest_trainloop.instruments.gradients.vectors import vectors
from pytest_trainloop.recording.compiler_internals import fake_results, schema_of
from pytest_trainloop.recording.function_mode import OperationMode, tensors_in
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.samples import as_real, raw_bytes, readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import aliased_arguments
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.process_state import preserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

Tensors = dict[str, torch.Tensor]

PREFIX = "_orig_mod."
"""Of the names of parameters in torch's wrapper around a compiled model."""

COMPARED_STEPS = 5
"""Optimizer steps that are compared: shapes that vary are compiled again in the second and for good, and what is
compiled once more after that is compiled again and again."""

BYTES = 2**30
"""Of gradients and weights that are kept, at most: larger models are compared for fewer steps."""

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "alpha", "eps", "maximize")
"""What an optimizer's groups hold that changes an update; ``foreach`` and ``capturable`` only change its speed."""

OF_TORCH = frozenset(
    "aten prims prim c10d _c10d_functional _c10d_functional_autograd quantized torchvision torchaudio inductor mkldnn "
    "mkl onednn dtensor debugprims profiler streams rngprims".split()
)
"""Namespaces of operators that are no project's own."""


@dataclass(slots=True)
class Moment:
    """One optimizer step."""

    held: frozenset[str]
    """The parameters of its optimizer."""
    gradients: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    """Weights and buffers after the step."""
    closures: int = 0
    """Calls of its closure. The gradients of the first call are compared, and the weights after the step only where
    there was no other call: a line search magnifies rounding."""


class Difference(NamedTuple):
    """The first step at which two runs differ."""

    step: int
    """Counted from 0."""
    part: str
    """"gradients", "weights" or "buffers"."""
    names: tuple[str, ...]
    found: Agreement
    """Of all gradients, or of the weights or buffers that differ most: eager first."""
    without: tuple[str, ...] = ()
    """Parameters that have a gradient in the eager run only."""


class StepTrace:
    """Keeps the steps of one run, and compares them with those of an earlier one, ``other``, where it is given."""

    def __init__(self, bound: float = 0.0, other: StepTrace | None = None) -> None:
        self.start: Tensors = {}
        self.options: dict[str, dict[str, Any]] = {}
        """Of each parameter at its first step: its group's options, and whether it requires grad."""
        self.held_from_start = False
        """Whether all optimizers were known before the first step."""
        self.names: list[str] = []
        """The names of all parameters, as the loop's modules have them."""
        self.moments: list[Moment] = []
        self.made_by: list[int] = []
        """For each batch that was asked for, the steps made by then."""
        self.drew: list[bool] = []
        """For each step, whether torch's generator has advanced since the one before."""
        self.at_batches = 0
        """Steps that were compared when the next batch was asked for, since no hook was called for them."""
        self.difference: Difference | None = None
        self.not_comparable = ""
        """Why the two cannot be compared, in words."""
        self._bound, self._other, self._most = bound, other, COMPARED_STEPS
        self._generator = b""
        self._loop: TrainLoop | None = None
        self._optimizers: list[Any] = []
        self._open: list[tuple[int, Moment]] = []

    @property
    def through(self) -> bool:
        """Whether enough was seen."""
        enough = (len(self.moments) >= self._most and not self._open) or self.at_batches >= self._most
        return enough or self.difference is not None or bool(self.not_comparable)

    @property
    def compared(self) -> int:
        """The number of steps that were compared."""
        seen = len(self.moments) if self._other is None else min(len(self.moments), len(self._other.moments))
        return seen or self.at_batches

    def begin(self, loop: TrainLoop) -> None:
        """Keep the weights that the run begins with, or begin with those of the other run."""
        self._loop, self._optimizers = loop, [o for o in loop.optimizers if hasattr(o, "param_groups")]
        self.names = [n for prefix, module in loop.modules.items() for n, _ in members.named_parameters(module, prefix)]
        self.held_from_start = bool(self._optimizers)
        for optimizer in self._optimizers:
            self._held(optimizer)
        tensors = self._tensors()
        if self._other is None:
            self.start = _copies(tensors)
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            self._most = max(1, min(COMPARED_STEPS, BYTES // max(2 * size, 1)))
            return
        self._most = max(len(self._other.moments), 1)
        first = self._other.start
        if only := sorted(first.keys() ^ tensors.keys()):
            self.not_comparable = f"{only[0]} is only in one of them"
        elif shaped := [n for n in first if first[n].shape != tensors[n].shape]:
            one, two = (tuple(side[shaped[0]].shape) for side in (first, tensors))
            self.not_comparable = f"{shaped[0]} has shape {one} in one and {two} in the other"
        self._take_over(first)

    def end(self) -> None:
        """Release the loop."""
        self._loop, self._optimizers = None, []
        self._open.clear()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """For a step hook: read the gradients, or give the step a closure that reads them after its first call."""
        if self.through or not hasattr(optimizer, "param_groups"):
            return None
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        nth, held = len(self.moments), self._held(optimizer)
        moment = Moment(frozenset(held))
        known = self._other.moments[nth : nth + 1] if self._other is not None else []
        if any(one.held != moment.held for one in known) and not any("param_groups" in name for name in held):
            self.not_comparable = f"step {nth + 1} is that of another optimizer, or of other parameters"
            return None
        self.moments.append(moment)
        state = raw_bytes(torch.default_generator.get_state())
        self.drew.append(state != self._generator)
        self._generator = state
        self._open.append((nth, moment))

        def read() -> None:
            gradients = {n: t.grad for n, t in held.items() if t.grad is not None and t.grad.layout is torch.strided}
            if self._other is None:
                moment.gradients = _copies(gradients)
            elif nth < len(self._other.moments):
                self._compare_gradients(nth, self._other.moments[nth].gradients, gradients)

        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            read()
            return None

        @functools.wraps(closure)
        def called(*given: Any, **keywords: Any) -> Any:
            out = closure(*given, **keywords)
            moment.closures += 1
            if moment.closures == 1:
                read()
            return out

        return ((args[0], called, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": called})

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """For a step hook: keep or compare what the step leaves."""
        if not self._open or not hasattr(optimizer, "param_groups"):
            return
        nth, moment = self._open.pop()
        if self._other is None:
            moment.after = _copies(self._tensors())
        elif nth < len(self._other.moments) and self.difference is None:
            expected = self._other.moments[nth]
            if moment.closures <= 1:
                self._compare_after(nth, expected)
            self._take_over(expected.after)

    def at_batch(self, number: int, _batch: Any) -> None:
        """Compare what steps have left that no hook was called for: those that are compiled."""
        if self._other is None:
            if number == len(self.made_by):
                self.made_by.append(len(self.moments))
            return
        made = self._other.made_by[number] if number < len(self._other.made_by) else 0
        if self.moments or self.through or made == 0:
            return
        if made == self._other.made_by[number - 1] + 1:
            self._compare_after(made - 1, self._other.moments[made - 1])
            self.at_batches += 1
        if self.difference is None:
            self._take_over(self._other.moments[made - 1].after)

    def _compare_gradients(self, nth: int, expected: Tensors, got: Tensors) -> None:
        one, two = _flat(expected), _flat(got)
        names = tuple(n for n, found in by_tensor(one, two).items() if not found.difference <= self._bound)
        whole = agreement(*vectors([one, two]))
        if names and not whole.difference <= self._bound:  # else it cancels to rounding in one tensor
            self.difference = Difference(nth, "gradients", names, whole, tuple(n for n in names if n not in got))

    def _compare_after(self, nth: int, expected: Moment) -> None:
        """The weights where the gradient is more than rounding, which an optimizer may magnify; and the buffers."""
        now, gradients = self._tensors(), expected.gradients
        both = {n: t.detach() for n, t in now.items() if n in expected.after and t.shape == expected.after[n].shape}
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        masks = {n: g.abs() > CANCELLATION * largest for n, g in gradients.items() if n in both}
        weights = [{n: side[n][mask] for n, mask in masks.items()} for side in (expected.after, both)]
        buffers = [n for n in both if n not in gradients and not now[n].requires_grad]
        states = [{n: side[n] for n in buffers} for side in (expected.after, both)]
        for part, pair, bound in (("weights", weights, self._bound / CANCELLATION), ("buffers", states, self._bound)):
            found = by_tensor(*map(_flat, pair))
            names = tuple(n for n, agreement in found.items() if not agreement.difference <= bound)
            if names and self.difference is None:
                worst = max((found[n] for n in names), key=lambda agreement: agreement.difference)
                self.difference = Difference(nth, part, names, worst)

    def _held(self, optimizer: Any) -> Tensors:
        """The tensors that an optimizer holds, by name; their options are noted."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        held = {name: t for name, t in self._tensors().items() if id(t) in groups}
        for name, tensor in held.items():
            group = groups[id(tensor)]
            options = {option: _constant(group[option]) for option in OPTIONS if option in group}
            self.options.setdefault(name, {**options, "requires_grad": tensor.requires_grad})
        return held

    def _tensors(self) -> Tensors:
        return {} if self._loop is None else tensors_of(self._loop, self._optimizers)

    def _take_over(self, values: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                value = values.get(name)
                if value is not None and value.shape == tensor.shape and not torch.equal(value, tensor):
                    write(tensor.detach(), value)


def tensors_of(loop: TrainLoop, optimizers: list[Any]) -> Tensors:
    """Every parameter and buffer of the loop's modules by its plain name, and what else its optimizers hold."""
    found: Tensors = {}
    for prefix, module in loop.modules.items():
        for name, tensor in (*members.named_parameters(module, prefix), *members.named_buffers(module, prefix)):
            if readable(tensor) and tensor.layout is torch.strided:
                found.setdefault(plain(name), tensor)
    known = {id(tensor) for tensor in found.values()}
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, tensor in enumerate(group["params"]):
                if id(tensor) not in known and readable(tensor) and tensor.layout is torch.strided:
                    found[f"{type(optimizer).__name__}[{o}].param_groups[{g}][{i}]"] = tensor
    return found


def _constant(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return tuple(map(_constant, value)) if isinstance(value, (tuple, list)) else value


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _flat(tensors: Tensors) -> Tensors:
    return {name: as_real(t).detach().to("cpu", torch.float64).reshape(-1) for name, t in tensors.items()}


class Operations(OperationMode):  # type: ignore[no-untyped-call]
    """Notes the lowest precision of an eager run and whether anything draws; with ``own`` also the first operator of
    the project that does something that it does not declare to the compiler. Changes nothing."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.lowest: torch.dtype = torch.float64
        self.draws: dict[str, None] = {}
        self.broken: tuple[str, bool, str, str] | None = None
        """Its name, whether it writes, what it declares and does, and the line."""
        self._own = own

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._own and self.broken is None and getattr(func, "namespace", "aten") not in OF_TORCH:
            return self._compared(func, args, kwargs)
        out = passed_on(func, args, kwargs)
        for tensor in tensors_in(out):
            dtype = tensor.dtype
            if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(self.lowest).eps:
                self.lowest = dtype
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            attends = "attention" in func.__name__  # it has the tag whatever its dropout
            drops = any(isinstance(a, float) and 0.0 < a < 1.0 for a in args[3:6]) or kwargs.get("dropout_p")
            if drops or not attends:
                self.draws[func.__name__.partition(".")[0]] = None
        return out

    def _compared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator does, with what it declares: the inputs that it writes to, and the shapes, dtypes and
        strides that its fake implementation gives."""
        try:
            declared = list(tensors_in(fake_results(func, args, kwargs)))
        except Exception as error:  # it has no fake implementation, or one that raises: the compiler says so itself
            reraise_ours(error)
            declared = []
        before = [(i, t, t.clone()) for i, t in enumerate(tensors_in(args)) if readable(t)]
        out = passed_on(func, args, kwargs)
        written = {id(args[i]) for i in aliased_arguments(func)[1] if i < len(args)}
        said = [
            (True, f"its schema is {schema_of(func)}, and tensor {i + 1} of its arguments has other values after it")
            for i, tensor, copied in before
            if id(tensor) not in written and not torch.equal(tensor.nan_to_num(), copied.nan_to_num())
        ]
        for real, fake in zip(tensors_in(out), declared, strict=False):
            pairs = (("shape", tuple(real.shape), tuple(fake.shape)), ("dtype", real.dtype, fake.dtype))
            for what, mine, its in (*pairs, ("strides", real.stride(), fake.stride())):
                if mine != its and real.numel():
                    said.append((False, f"it gives {what} {mine}, and its fake implementation says {its}"))
        if said:
            self.broken = (func.name().partition(".")[0], *said[0], str(here()[0]))
        return out


def without_prefix(name: str) -> str:
    """The name of a parameter, or of a module, in a model that is not compiled."""
    return "" if name == PREFIX[:-1] else name.replace(PREFIX, "").removesuffix(f".{PREFIX[:-1]}")


class Loads:
    """Notes calls of ``load_state_dict(strict=False)`` that load nothing into some names only because of the prefix."""

    def __init__(self) -> None:
        self.not_loaded: list[tuple[str, str, torch.Tensor, Any]] = []
        """Line, plain name, tensor, and what the state has for it."""

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For ``Patches.put``, of ``nn.Module.load_state_dict``."""

        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            place = str(here()[0])
            out = original(module, state_dict, *args, **kwargs)
            missing = dict.fromkeys(getattr(out, "missing_keys", ()))  # in torch's order, which findings keep
            given = {without_prefix(name): state_dict[name] for name in set(getattr(out, "unexpected_keys", ()))}
            tensors = module.state_dict(keep_vars=True)
            loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
            self.not_loaded = [one for one in self.not_loaded if id(one[2]) not in loaded]
            for name in missing:
                own, tensor = without_prefix(name), tensors.get(name)
                if own in given and isinstance(tensor, torch.Tensor):
                    self.not_loaded.append((place, own, tensor, given[own]))
            return out

        return load_state_dict

    def left(self) -> tuple[str, tuple[str, ...]]:
        """Line and names of the first load whose values are missing; both empty where there is none."""
        other = [
            (place, name)
            for place, name, tensor, value in self.not_loaded
            # another shape is another layer, that the state has nothing for
            if isinstance(value, torch.Tensor) and tensor.shape == value.shape
            if not torch.equal(tensor.detach().double(), value.detach().to(tensor.device).double())
        ]
        return (other[0][0], tuple(name for place, name in other if place == other[0][0])) if other else ("", ())


class Restored(NamedTuple):
    """What ``load`` of one loop does with what another one saved."""

    left: tuple[str, ...]
    """The parameters that do not have the values that were saved."""
    place: str
    """The line that does not load some of them because of the prefix."""
    refused: str
    """What ``load`` raises."""
    prefixed: list[str]
    """The names in a saved state that have the prefix."""


def restored(evidence: Evidence, knob: str, *, saves: bool, loads: bool, returned: bool = False) -> Restored | None:
    """Save one fresh loop and load it into another, with these values of the knob; with ``returned`` only a state that
    ``save`` returns. None where that cannot be tried."""
    plan, watch, refused, prefixed = evidence.plan(), Loads(), "", list[str]()
    with preserved(), torch.no_grad():
        first = build(evidence.make, {**plan.knobs, knob: saves}, plan.seed)
        second = build(evidence.make, {**plan.knobs, knob: loads}, plan.seed + 1)
        save, load = first.save, second.load
        if save is None or load is None or (returned and path_parameter(save, load)):
            return None
        if not returned:
            for name, tensor in tensors_of(first, []).items():
                if tensor.requires_grad and name in tensors_of(second, []):
                    tensor.mul_(0.5).add_(0.25)  # no loop begins with these
        try:
            with patched(nn.Module, "load_state_dict", watch.around):
                if path_parameter(save, load):
                    _through_a_file(save, load)
                else:
                    state = copy.deepcopy(save())
                    prefixed += [name for name in _keys(state) if PREFIX in name]
                    load(state)
        except Exception as error:  # of the project's save and load: resume_equivalence says so
            reraise_ours(error)
            if not (returned and prefixed):
                return None
            refused = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        before, after = tensors_of(first, []), tensors_of(second, [])
        known = {n: t for n, t in after.items() if n in before and (returned or t.requires_grad)}
        left = tuple(n for n, tensor in known.items() if not torch.equal(tensor, before[n]))
        return Restored(left, watch.not_loaded[0][0] if watch.not_loaded else "", refused, prefixed)


def _through_a_file(save: Callable[..., Any], load: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="trainloop-") as folder:
        path: Path | str = Path(folder) / "checkpoint.pt"
        try:
            save(path)
        except (TypeError, AttributeError):
            path = str(path)
            save(path)
        load(path)


def _keys(state: Any) -> Iterator[str]:
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    for key, value in pairs:
        if isinstance(key, str):
            yield key
        yield from _keys(value)
