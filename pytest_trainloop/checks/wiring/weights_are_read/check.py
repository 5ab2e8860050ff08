"""Every pass reads the weights as they are, and the batch as it is.

What it does
    It notes in the first steps which weights the calls of torch are given, which parameters share their entries, which
    are made inside a forward pass, and what later batches are computed with.

Why is this bad?
    Gradients arrive, the optimizer moves the weights, and the loss is computed with others: with a copy that was taken
    once, with a layer that exists for one pass, or with the mask and the graph of the first batch. Nothing raises.

How it decides
    Read once: no call is given a weight, or a view of it, after the first step of its optimizer, though gradients go on
    coming. Weights moved after that step must change nothing that is backpropagated, bit for bit: in 12 steps where
    gradients arrive by backward passes; in 60 where they are assigned by hand (a copy that is brought up to date now
    and then looks the same for a while), and weights moved before ``fit`` must change it then.
    Tied by ``data``: two parameters in the optimizers have the same entries in memory. The loop is run in float64 with
    one parameter in both places; where the losses of the first steps differ by more than rounding, the two are stepped
    otherwise than one. (With plain SGD they are not: the two steps add up.)
    Made anew: inside a call of the model a parameter is used that did not exist a step before, at the same line in each
    step. It may be meant, as a random convolution for augmentation is: advice.
    Kept from the first batch: a value made of the first batch alone meets two later batches row by row (a mask, a
    product with an adjacency, an index), and the line that makes it does not run again. With another first batch it
    must be another value; statistics over the rows, which no order of rows changes, are no such value.
    Masters with other values: bfloat16 or float16 weights get the gradients, float32 tensors of their shapes, which no
    module holds, get the steps, and after the first step each weight is its master, rounded, bit for bit. Before that
    step most entries of a weight were more than one ULP away from its master: what the weights held (a checkpoint that
    was loaded after the masters were made) is written over.

Faulty
    >>> joined = torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     scores = F.linear(F.pad(model.encoder(x), (0, 1), value=1.0), joined)
    ...     F.cross_entropy(scores, y).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     joined = torch.cat([model.head.weight, model.head.bias[:, None]], 1)
    ...     scores = F.linear(F.pad(model.encoder(x), (0, 1), value=1.0), joined)
    ...     F.cross_entropy(scores, y).backward()
    ...     optimizer.step()

Known limits
    Parameters that share a part of their entries are not looked at. What numpy keeps is not seen.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (parameters are made in __init__)
    https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, share, some, them

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.weights_are_read.kept import KeptValue
    from pytest_trainloop.checks.wiring.weights_are_read.masters import OtherMasters
    from pytest_trainloop.checks.wiring.weights_are_read.reads import MadeAnew
    from pytest_trainloop.checks.wiring.weights_are_read.tied import Tied
    from pytest_trainloop.checks.wiring.weights_are_read.unread import Unread
    from pytest_trainloop.runs.evidence import Evidence

_LEARNING = ("overfit_one_batch", "update_ratio", "loss_at_init")

CAUSES = {
    "weights_read_once": Cause(
        proof="gradients arrive, and moved after the first step they change nothing that is backpropagated",
        repair="run this line in every forward pass, on the parameters themselves: in forward(), by model(x), "
        "or by functional_call(model, dict(model.named_parameters()), x)",
        explains=(*_LEARNING, "memory_growth", "every_param_moves", "input_dependence"),
        change=("seen",),
    ),
    "tied_through_data": Cause(
        proof="the two are one place in memory, and with one parameter in both places the losses differ",
        repair="decoder.weight = embedding.weight   # the parameter itself, before the optimizer is built",
        explains=("resume_equivalence:untied", "weight_decay_groups"),
        change=("seen",),
    ),
    "layer_made_anew": Cause(
        proof="a parameter is used in each pass that did not exist in the pass before",
        repair="make the layer once, in __init__, as self.layer = nn.Linear(...)",
        explains=_LEARNING,
        change=("seen",),
        settle="draw such weights under torch.no_grad(), or as plain tensors, where they are an augmentation",
    ),
    "masters_hold_others": Cause(
        proof="the first gradient is taken at other weights than the step starts from, and its result replaces them",
        repair="make the float32 masters after the checkpoint is loaded, or copy the weights into them once, before "
        "the loop",
        explains=(*_LEARNING, "resume_equivalence"),
    ),
    "kept_from_first_batch": Cause(
        proof="a value made from the first batch meets the rows of later ones, and another batch gives another value",
        repair="compute it in every pass, or keep it under a key that tells the batches apart",
        explains=(*_LEARNING, "batch_independence", "determinism", "accumulation_equivalence", "input_dependence"),
        change=("seen",),
    ),
}


@check(needs={"run"}, causes=CAUSES, rank=15)
def weights_are_read(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.weights_are_read.kept import kept_values
    from pytest_trainloop.checks.wiring.weights_are_read.masters import other_masters
    from pytest_trainloop.checks.wiring.weights_are_read.reads import Reads
    from pytest_trainloop.checks.wiring.weights_are_read.tied import tied_through_data
    from pytest_trainloop.checks.wiring.weights_are_read.unread import unread_weights

    unread = unread_weights(evidence)
    if unread is not None:
        yield _unread(unread)
    yield from map(_tied, tied_through_data(evidence))
    yield from map(_anew, evidence.shared(Reads.of).made_anew)
    masters = other_masters(evidence)
    if masters is not None:
        yield _masters(masters)
    yield from map(_kept, kept_values(evidence))


def _unread(found: Unread) -> Finding:
    names = found.names
    return Finding(
        cause="weights_read_once",
        summary=f"{some(names)} {be(names)} read {found.until} and never again",
        measured=f"{len(names)} of the {found.of} parameters in optimizers: gradients reach {them(names)} in every "
        "step, and no call is given the new values",
        shown_by=f"moved by 0.25 after the first step, the losses of {found.steps} further steps stay the same, bit "
        "for bit",
        culprits=names,
        where=found.root,
        change=found.read,
    )


def _tied(found: Tied) -> Finding:
    return Finding(
        cause="tied_through_data",
        summary=f"{found.first} and {found.second} are two parameters with the same entries in memory, and each is "
        "stepped",
        measured=f"with one parameter in both places the losses of the first steps change by {share(found.change)}; "
        f"rounding is below {share(found.bound)}",
        shown_by="both ways were run in float64 from the same weights",
        culprits=(found.first, found.second),
        where=found.where,
        change=found.assigned or found.where,
        repair=f"{found.second} = {found.first}   # the parameter itself, before the optimizer is built",
    )


def _anew(found: MadeAnew) -> Finding:
    return Finding(
        cause="layer_made_anew",
        level="advice",
        summary=f"{found.module} uses weights of shape {found.shape} that are made anew in every pass, and no step "
        "trains them",
        measured="in each of the steps another parameter is used at this line",
        shown_by="none of them existed when the step before was made",
        culprits=(found.module,),
        where=str(found.place),
    )


def _masters(found: OtherMasters) -> Finding:
    names = found.names
    return Finding(
        cause="masters_hold_others",
        summary=f"the optimizer steps float32 masters that hold other values than {some(names)}: the first "
        "step writes the masters over these weights",
        measured=f"{len(names)} of {found.of} weights differ from their masters, by up to {found.apart:.3g}, where one "
        f"ULP of {found.dtype} is {found.ulp:.2g}",
        shown_by="after the first step each weight is its master, rounded, bit for bit",
        culprits=names,
        where=found.where,
    )


def _kept(found: KeptValue) -> Finding:
    return Finding(
        cause="kept_from_first_batch",
        summary=f"what is made from {found.name} of the first batch is used for all later ones",
        measured=f"a tensor of shape {found.shape}; made from the second batch it differs by "
        f"{share(found.change)} of its largest entry",
        shown_by=f"later batches meet it row by row in {found.function}, and the line that makes it runs once",
        culprits=(found.name,),
        where=str(found.used),
        change=str(found.made),
    )
