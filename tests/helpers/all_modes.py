"""Everything of this package that looks at a run without changing it, entered at once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.edge_batches.content import LookUps
from pytest_trainloop.checks.batch.edge_batches.runs import Squeezes
from pytest_trainloop.checks.batch.every_row_teaches.calls import Indices
from pytest_trainloop.checks.batch.segment_independence.rollouts import StepValues
from pytest_trainloop.checks.learning.activations_alive import units
from pytest_trainloop.checks.learning.weight_decay_groups import l2_in_loss
from pytest_trainloop.checks.loss.learnable_targets import comparisons
from pytest_trainloop.checks.loss.loss_at_init import first_loss
from pytest_trainloop.checks.loss.loss_at_init.chance_level import InitialLosses
from pytest_trainloop.checks.loss.loss_contract.calls import LossCalls
from pytest_trainloop.checks.loss_function.precisions_agree.property import Magnitudes
from pytest_trainloop.checks.numerics.checkpointing_equivalence.recomputation import Calls as RecomputedCalls
from pytest_trainloop.checks.numerics.optimizer_numerics.watched_steps import ZeroDenominators
from pytest_trainloop.checks.numerics.parameter_precision import runs as precision_runs
from pytest_trainloop.checks.numerics.precision_parity import further, modes, operations
from pytest_trainloop.checks.scale.compile_parity.compared import Operations
from pytest_trainloop.checks.scale.distributed_equivalence import rank_runs
from pytest_trainloop.checks.state.data_order import arrivals, places, reading
from pytest_trainloop.checks.state.determinism.first_difference import CallLog
from pytest_trainloop.checks.state.evaluation_is_pure import interposed
from pytest_trainloop.checks.state.memory_growth.holders import Lines
from pytest_trainloop.checks.wiring.step_order.further import Writes
from pytest_trainloop.checks.wiring.weights_are_read import kept, weights
from pytest_trainloop.frontends import api
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.instruments.tracing.cut_candidates import Tracer
from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins
from pytest_trainloop.instruments.tracing.root_terms import RootTerms
from pytest_trainloop.recording.construction import Construction
from pytest_trainloop.recording.watch import Watch
from pytest_trainloop.runs.hooks import around_steps, before_calls, on_arrival
from pytest_trainloop.runs.timing.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record


def instruments(watch: Watch) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """The contexts of all modes that watch, of hooks of each kind, and of the patches that come with them."""
    given = [
        NonFiniteOrigins(),
        Calls(),
        Indices(),
        comparisons.FirstSteps(),
        kept.ThreeBatches(steps=3),
        StepValues(torch.Size([4]), lambda: None),
        units._Activations(own_data=True),
        l2_in_loss._Squares(cut=False),
        RootTerms(),
        InitialLosses(),
        first_loss._FirstBackward(),
        LossCalls(),
        ZeroDenominators(),
        precision_runs._LostWrite(),
        further.AngleLog(),
        operations.OpLog(),
        arrivals.Arrivals(),
        places.Places(set()),
        CallLog(),
        Lines(),
        Tracer(),
        weights.Reads(),
        LookUps(),
        Squeezes(),
    ]
    for one in given:
        yield from one.contexts(watch)
    yield Construction().watching()
    yield rank_runs._Draws(watch, rank_runs.RankResult())
    yield RecomputedCalls(watch, [], lambda generator: None)
    yield reading.Draws()
    yield interposed._Casts(interposed.Run())
    yield Writes(watch, {"0.weight"})
    yield weights.Lines()
    yield from (Magnitudes(), modes.RecordChoices(modes.Choices()), Operations(), Operations(own=True), TensorMemory())
    yield around_steps(watch, lambda optimizer: None, lambda optimizer, taken: None)
    yield before_calls(watch, lambda module, args, kwargs: None)


@contextlib.contextmanager
def all_at_once() -> Iterator[Record]:
    """Everything on, with the instruments of ``observe``; the record of the run."""
    watch = Watch()
    with api.observed(watch), contextlib.ExitStack() as around:
        for context in instruments(watch):
            around.enter_context(context)
        for handle in on_arrival(watch, lambda *_call: None):
            around.callback(handle.remove)
        yield watch.record
