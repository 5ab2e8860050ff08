"""What one rank does: a run of the loop with the knob ``ranks`` at their number, and what is noted of it besides its
record. ``RankResult`` is plain data, sent to the process that runs pytest."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, Subset

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import BrokenRun, CannotDecide, TimeRanOut, UsageError, UserCodeError
from pytest_trainloop.core.whose import of_the_project
from pytest_trainloop.instruments.compositions.step_runs import Variation
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.samples import as_real, places, readable, spaced
from pytest_trainloop.recording.shards import is_distributed, local
from pytest_trainloop.recording.source import here, layer
from pytest_trainloop.recording.torch_names import DRAWS, SAMPLES
from pytest_trainloop.runs import own_exceptions
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.run import run
from pytest_trainloop.runs.same_start import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.core.finding import UserError
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.compositions.step_runs import StepRuns
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.ranks.facts import Launch
    from pytest_trainloop.runs.run import RunPlan

State = dict[str, bytes]
"""The sampled entries of weights and buffers by name, as doubles."""

Shard = tuple[tuple[int, ...], tuple[float, ...], int]
"""Of a DTensor: the numbers of the sampled entries that the rank holds, their values, and how many the sample has."""

MOST_DRAWS = 64
"""Draws at one line that are kept."""

REFUSALS = (CannotDecide, UsageError, UserCodeError, TimeRanOut, BrokenRun)

PEER_IS_GONE = re.compile(r"gloo.*(Connection (closed|reset)|Broken pipe|Read error|Write error)", re.DOTALL)
"""What gloo says in a rank that waits when another one has gone."""

_ELSEWHERE = re.compile(
    r"SyncBatchNorm|expected input tensor to be on (?:a )?GPU|not compiled with CUDA|no CUDA|No CUDA|NVIDIA driver|nccl"
    r"|NCCL|No backend type associated with device type|cuda",
)
"""What libraries say of devices that the machine does not have."""

_DRAWING = DRAWS | SAMPLES


class SharedOut(NamedTuple):
    """What one DistributedSampler gave its rank."""

    replicas: int
    seed: int
    shuffle: bool
    rows: tuple[int, ...] | None
    """The rows of the data set that it shares out, as a ``Subset`` names those of another; None where it is none."""
    size: int
    """How many rows it shares out."""
    order: tuple[int, ...]
    """The rows of this rank in the first epoch."""


@dataclass(slots=True)
class RankResult:
    """What one rank did in one run."""

    record: Record | None = None
    refused: tuple[str, Any] | None = None
    """The exception of this package that ended it: its class, and its arguments."""
    entered: State = field(default_factory=dict)
    """Weights and buffers before ``fit``."""
    states: list[State] = field(default_factory=list)
    """The same before each step, and at the end."""
    buffers: frozenset[str] = frozenset()
    """Which of these names are buffers."""
    stepped: set[str] = field(default_factory=set)
    """The parameters that an optimizer holds."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """The gradient of each DTensor as the first step read it."""
    ends: dict[str, Shard] = field(default_factory=dict)
    """The DTensors themselves, at the end."""
    draws: dict[Place, list[bytes]] = field(default_factory=dict)
    """By line what was drawn there, as digests."""
    written: dict[str, Place] = field(default_factory=dict)
    """The files that torch.save and safetensors wrote, with the line of each."""
    samplers: list[SharedOut] = field(default_factory=list)
    """The DistributedSamplers that were iterated over."""
    wrappers: int = 0
    """Instances of DistributedDataParallel that were built."""
    wrapper_calls: int = 0
    called: list[int] = field(default_factory=list)
    """How many of these calls there were before each step."""
    late: tuple[str, ...] = ()
    """Parameters of the wrapped modules that were not there when they were wrapped."""
    asks_for_rank: bool = False
    """Whether the project, or a library but torch, asked for its rank or for the number of ranks."""
    strange: list[str] = field(default_factory=list)
    """Weights and buffers that one process does not have, or has in another shape: the ranks share out the model."""

    def require(self) -> Record:
        """The record. Raises what ended the run in the rank."""
        if self.refused is not None:
            kind, given = self.refused
            raise next(known for known in REFUSALS if known.__name__ == kind)(*given)
        if self.record is None:
            raise CannotDecide("a rank gave no record")
        return self.record


# the runs of a rank


def over_own_batches(
    evidence: Evidence,
    ranks: int,
    seeds: Callable[[int], int],
    batches: int,
    stream: Callable[[int, TrainLoop], Iterator[Any]] | None = None,
) -> Callable[[int], RankResult]:
    """The work of a rank over the loop's own batches, or over what ``stream`` gives it, in the loop's own precision,
    under the seed that ``seeds`` gives it."""
    plan = _with_ranks(evidence, evidence.plan(), ranks)

    def work(rank: int) -> RankResult:
        result = RankResult()
        made = replace(
            plan,
            seed=seeds(rank),
            count=min(plan.count, batches),
            read_ahead=None,
            stream=None if stream is None else lambda loop: stream(rank, loop),
            enough=lambda _record: False,  # what ends one rank must end all: the batches
            around=lambda: wrappers_noted(result),
            contexts=lambda watch: (noted(watch, result, _Draws(watch, result)),),
            kept=None,
            further=True,
        )
        return _filled(result, lambda: run(evidence.make, made))

    return work


def over_shares(
    evidence: Evidence,
    runs: StepRuns,
    ranks: int,
    items: Callable[[int], Sequence[Any]],
    *,
    knobs: tuple[tuple[str, Any], ...],
    rows: Callable[[int], tuple[tuple[int, ...], ...]],
) -> Callable[[int], RankResult]:
    """The work of a rank over the items that are given for it, in float64, from the weights of ``runs``."""
    start = {plain(name): tensor for name, tensor in runs.start.items()}

    def work(rank: int) -> RankResult:
        result = RankResult()

        def prepare(watch: Watch) -> None:
            state = {plain(name): tensor for name, tensor in state_of(watch)}
            shapes = {name: tensor.shape for name, tensor in state.items()}
            result.strange += sorted(state.keys() ^ start.keys())
            result.strange += [n for n, shape in shapes.items() if n in start and start[n].shape != shape]
            with torch.no_grad():
                for name, tensor in state.items():
                    if name in start and start[name].shape == tensor.shape:
                        part = start[name]
                        for axis, (first, count) in enumerate(_held(tensor)):
                            part = part.narrow(axis, first, count)
                        local(tensor).copy_(part)

        def endless(chosen: Any) -> RunPlan:  # a rank that ended after a step of its own would leave the others waiting
            return replace(_with_ranks(evidence, evidence.plan(**chosen), ranks), enough=lambda _record: False)

        varied = Variation(
            knobs=knobs, rows=rows(rank), contexts=(lambda watch: (noted(watch, result, _Draws(watch, result)),),)
        )
        return _filled(result, lambda: runs.elsewhere(endless, prepare).made("share", lambda: items(rank), varied))

    return work


def raises_by_itself(evidence: Evidence, ranks: int) -> Callable[[int], bool]:
    """Whether ``fit`` raises in a rank where nothing watches it as well."""
    plan = replace(_with_ranks(evidence, evidence.plan(), ranks), read_ahead=None, kept=None)
    return lambda _rank: own_exceptions.is_own(evidence.make, plan)


def _with_ranks(evidence: Evidence, plan: RunPlan, ranks: int) -> RunPlan:
    return replace(plan, knobs={**plan.knobs, evidence.knobs["ranks"]: ranks})


def _filled(result: RankResult, make: Callable[[], Record]) -> RankResult:
    try:
        result.record = make()
        if result.record.raised is not None and PEER_IS_GONE.search(result.record.raised.summary):
            gone = ConnectionError(result.record.raised.summary)
            raise of_the_project(gone)  # for the launch, which knows who waited for whom
    except REFUSALS as refusal:
        given = refusal.args
        if isinstance(refusal, TimeRanOut):
            given = refusal.steps, refusal.seconds, " of a rank"
        elif isinstance(refusal, UserCodeError):
            given = (refusal.error,)
        result.refused = next(known.__name__ for known in REFUSALS if isinstance(refusal, known)), given
    return result


def results_of(launch: Launch) -> list[RankResult]:
    """What each rank did. Raises what ended one, where it is no fault of the loop's."""
    if launch.raised is not None and (what := launch.raised.raised) is not None:
        raise RuntimeError(f"rank {launch.raised.number}: {what.summary}")  # those of the loop are in its record
    made = [rank.value if isinstance(rank.value, RankResult) else RankResult() for rank in launch]
    for rank, result in enumerate(made):
        if result.refused is not None:
            try:
                result.require()
            except UserCodeError as refusal:
                error = refusal.error
            raise error_of_a_rank(launch, rank, error, error.summary)
    return made


def error_of_a_rank(launch: Launch, rank: int, error: UserError, text: str) -> Exception:
    """What the project's code raised in a rank: of this check alone, since the others ask for no ranks."""
    ranks = f"with ranks={len(launch)}"
    if _ELSEWHERE.search(text):
        return CannotDecide(f"{error.stage} raised {error.summary} {ranks}: it needs a device that is not here")
    if any(len(set(call.takes)) > 1 for call in launch[rank].collectives[-1:]):
        return CannotDecide(
            f"{error.stage} gathers tensors of different sizes {ranks}, which gloo refuses and nccl does not: pad them "
            "to one size to have ranks compared"
        )
    return UserCodeError(replace(error, stage=f"{error.stage} {ranks} (rank {rank})"), one_check=True)


# what is noted of a run


@contextlib.contextmanager
def wrappers_noted(result: RankResult) -> Iterator[None]:
    """Follow the DistributedDataParallel instances that are built and called, and who asks for its rank."""
    live: list[tuple[Any, list[torch.Tensor]]] = []

    def building(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            result.wrappers += 1
            live.append((wrapper, list(members.parameters(wrapper.module))))

        return init

    def calling(*_args: Any, **_kwargs: Any) -> None:
        result.wrapper_calls += 1

    def asking(*_args: Any, **_kwargs: Any) -> None:
        asks = layer(sys._getframe(3).f_code.co_filename) > 0  # behind what the patch puts around the call
        result.asks_for_rank = result.asks_for_rank or asks

    with Patches() as patches:
        patches.put(DistributedDataParallel, "__init__", building)
        patches.put(DistributedDataParallel, "forward", first(calling))
        for name in ("get_rank", "get_world_size"):
            patches.put(torch.distributed, name, first(asking))
        try:
            yield
        finally:
            for wrapper, before in live:
                known = {id(parameter) for parameter in before}
                late = (name for name, p in members.named_parameters(wrapper.module) if id(p) not in known)
                result.late += tuple(late)
            live.clear()


@contextlib.contextmanager
def noted(
    watch: Watch, result: RankResult, draws: contextlib.AbstractContextManager[Any], most: int = sys.maxsize
) -> Iterator[None]:
    """Fill the result while ``fit`` runs: weights before each of the first ``most`` steps and at the end, shards, files
    and samplers; ``draws`` notes the draws."""
    depth = 0
    table = watch.table

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        return ((plain(e.name), tensor) for e, tensor in zip(table.entries, table.tensors, strict=True))

    def state() -> State:
        """Sampled entries of what every rank is to hold in the same way: no shard."""
        found = {name: tensor for name, tensor in named() if readable(tensor) and not is_distributed(tensor)}
        buffers = {
            plain(f"{path}.{own}" if path else own): buffer
            for path, module in table.named_modules()
            for own, buffer in members.named_buffers(module, recurse=False)
            if readable(buffer) and not is_distributed(buffer)
        }
        result.buffers = frozenset(buffers)
        return {name: _doubles(tensor) for name, tensor in (found | buffers).items()}

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal depth
        if watch.is_suspended:
            return
        depth += 1
        if len(result.states) >= most:
            return
        with watch.suspended(), torch.no_grad():
            if depth == 1:
                result.states.append(state())
                result.called.append(result.wrapper_calls)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if (index := table.index(parameter)) is not None:
                    name = plain(table.entries[index].name)
                    result.stepped.add(name)
                    if is_distributed(parameter.grad) and name not in result.shards:
                        result.shards[name] = _shard(parameter.grad)

    def after(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal depth
        if not watch.is_suspended:
            depth = max(0, depth - 1)

    def saving(*args: Any, **kwargs: Any) -> None:
        given = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        if isinstance(given, (str, os.PathLike)):
            result.written.setdefault(os.path.realpath(given), here()[0])

    with Patches() as patches, hooked(before_steps(before), after_steps(after)), draws:
        for module, name in (("torch", "save"), ("safetensors.torch", "save_file")):
            if module in sys.modules:
                patches.put(sys.modules[module], name, first(saving))
        patches.put(DistributedSampler, "__iter__", functools.partial(_sharing, result.samplers))
        with watch.suspended(), torch.no_grad():
            result.entered = state()
        try:
            yield
        finally:
            with watch.suspended(), torch.no_grad():
                result.states.append(state())
                result.ends = {name: _shard(tensor) for name, tensor in named() if is_distributed(tensor)}


class _Draws(FunctionMode):
    """Notes what is drawn, by line."""

    def __init__(self, watch: Watch, result: RankResult) -> None:
        super().__init__()
        self._watch, self._draws = watch, result.draws

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name not in _DRAWING or self._watch.is_suspended:
            return out
        if not isinstance(out, torch.Tensor) or not readable(local(out)) or not out.numel():
            return out
        # of a generator of the project's own: a choice that all ranks have in common is one number, or whole ones
        if kwargs.get("generator") is None or (out.is_floating_point() and out.numel() > 1):
            kept = self._draws.setdefault(here()[0], [])
            if len(kept) < MOST_DRAWS:
                with self._watch.suspended(), torch.no_grad():
                    entries = repr(spaced(local(out)).tolist()).encode()
                    kept.append(hashlib.blake2b(entries, digest_size=8).digest())
        return out


def first(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``Patches.put``: calls ``note`` with the arguments, then the original."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        return called

    return wrap


def _sharing(found: list[SharedOut], original: Callable[..., Any]) -> Callable[..., Any]:
    known: list[Any] = []

    def rows_of(dataset: Any) -> tuple[int, ...] | None:
        """The rows of a ``Subset`` in the data set that it was taken from at last."""
        if not isinstance(dataset, Subset):
            return None
        inner = rows_of(dataset.dataset)
        return tuple(int(i) if inner is None else inner[i] for i in dataset.indices)

    @functools.wraps(original)
    def iterate(sampler: Any) -> Iterator[Any]:
        order = tuple(original(sampler))
        if not any(sampler is other for other in known):
            known.append(sampler)
            data = sampler.dataset
            shared = SharedOut(sampler.num_replicas, sampler.seed, sampler.shuffle, rows_of(data), len(data), order)
            found.append(shared)
        return iter(order)

    return iterate


def _doubles(tensor: torch.Tensor) -> bytes:
    return array("d", as_real(spaced(tensor.detach())).flatten().to(torch.float64).tolist()).tobytes()


def _shard(tensor: torch.Tensor) -> Shard:
    """What this rank holds of the sample of a whole DTensor (``samples.spaced``)."""
    held, part = _held(tensor), local(tensor.detach())
    sample = places(tensor.numel())
    entries = {}
    for number, place in enumerate(sample):
        at: list[int] = []
        for size in reversed(tensor.shape):
            place, coordinate = divmod(place, size)
            at.insert(0, coordinate)
        if all(first <= c < first + count for c, (first, count) in zip(at, held, strict=True)):
            entries[number] = float(part[tuple(c - first for c, (first, _) in zip(at, held, strict=True))])
    return tuple(entries), tuple(entries.values()), len(sample)


def _held(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Along each axis the first place that this rank holds, and how many."""
    held = [(0, size) for size in tensor.shape]
    if not is_distributed(tensor):
        return held
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    for number, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard():
            first, count = held[placement.dim]
            part = -(-count // mesh.size(number))
            begin = min(mesh.get_local_rank(number) * part, count)
            held[placement.dim] = first + begin, min(part, count - begin)
    return held
