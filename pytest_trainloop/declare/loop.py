"""``TrainLoop``, ``Padding`` and ``Roles``: what a project declares of its training loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from pytest_trainloop.core import places
from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare import nested
from pytest_trainloop.declare.fields import a, is_whole, named_modules, require_fields
from pytest_trainloop.declare.refusals import refusing_slips

Fit = Callable[[Sequence[Any]], Any]
Step = Callable[[Any], Any]
Loss = Callable[[Any, Any], torch.Tensor]
Parts = Callable[[Any, Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How a batch is padded, for ``TrainLoop(padding=...)``.

    >>> padding = Padding(pad_id=0, ignore_index=-100)

    Parameters
    ----------
    pad_id
        the token id at padded positions. Not given: padding is read from a mask, from lengths, or from an embedding's
        ``padding_idx``; where none of these is there, checks of padding are skipped
    ignore_index
        the label at padded positions, which the loss ignores. Not given: that of the loss call
    dim
        the padded dimension (time)
    of
        the tensors of the batch that are padded so, by their keys or by paths as in findings, together with their mask
        or lengths: ``("src", "src_mask")``. Not given: read from the values. A batch with several sequences, as source
        and target, takes a list: ``padding=[Padding(of=("src", "src_mask")), Padding(of=("tgt", "tgt_mask"))]``

    Raises
    ------
    UsageError
        a number is not a whole one, or ``of`` holds something other than names
    """

    pad_id: int | None = None
    ignore_index: int | None = None
    dim: int = 1
    of: Sequence[str] | None = None
    _more: tuple[Padding, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name, needed in (("pad_id", "the token id at padded positions"), ("ignore_index", "a label"), ("dim", "")):
            given = getattr(self, name)
            if not is_whole(given) and (given is not None or name == "dim"):
                what = f"{needed}, a whole number," if needed else "the number of a dimension"
                shown = repr(given) if isinstance(given, (str, float, bool)) else a(given)
                place = places.shown(*places.caller())
                raise UsageError(f"Padding.{name} is {shown}; {what} is needed", place=place)
        of = (self.of,) if isinstance(self.of, str) else self.of
        if of is not None and not (isinstance(of, Sequence) and of and all(isinstance(name, str) for name in of)):
            place = places.shown(*places.caller())
            raise UsageError(
                f'Padding.of is {a(of)}; names of tensors are needed, as in of=("src", "src_mask")', place=place
            )
        object.__setattr__(self, "of", of if of is None else tuple(of))

    @property
    def all(self) -> tuple[Padding, ...]:
        """This one, and those declared with it."""
        return (self, *self._more)

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of tensors in ``of``, of each declaration."""
        return [tuple(one.of) for one in self.all if one.of]

    @classmethod
    def first_of(cls, several: Sequence[Padding]) -> Padding:
        """The first, which knows the others."""
        first = replace(several[0])
        object.__setattr__(first, "_more", tuple(several[1:]))
        return first


@refusing_slips({"mask": "the name of a tensor of the batch is needed"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the tensors of a batch are, for ``TrainLoop(roles=...)``: each by its key or by a path as in findings,
    several as a tuple.

    >>> roles = Roles(mask="attention_mask", weights="sample_weight")

    ``batch_roles_hold`` tests each declaration: the gradient depends on the tensor, and not on what a mask or lengths
    leave out.

    Parameters
    ----------
    mask
        (rows, positions), of two values: positions where it is 0 do not count, whatever other tensors hold there. A
        mask that is added to scores is far below 0 at such positions
    padding_mask
        (rows, positions): positions where it is 1 or True do not count (``key_padding_mask``)
    lengths
        (rows,), whole numbers: positions from there on do not count
    weights
        (rows,) or (rows, positions): how much each counts in the loss. A mask that only the loss reads is such a tensor
    segments
        whole numbers: the graph, document or episode of each entry. Entries of one must not depend on another
    graph
        edges (2, edges), or an adjacency (nodes, nodes)
    inputs
        what else must be read: a condition, a timestep, positions

    Raises
    ------
    UsageError
        no name is given, or something other than a name
    """

    mask: str | Sequence[str] | None = None
    padding_mask: str | Sequence[str] | None = None
    lengths: str | Sequence[str] | None = None
    weights: str | Sequence[str] | None = None
    segments: str | Sequence[str] | None = None
    graph: str | Sequence[str] | None = None
    inputs: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for role in (f.name for f in fields(self)):
            given = getattr(self, role)
            names = (given,) if isinstance(given, str) else given
            if names is not None and not (isinstance(names, Sequence) and all(isinstance(n, str) for n in names)):
                shown = _plain_or_type(given) if not isinstance(given, Sequence) else f"{a(given)} with other entries"
                raise UsageError(
                    f'Roles.{role} is {shown}; the name of a tensor of the batch is needed, or several: {role}="key"',
                    place=places.shown(*places.caller()),
                )
            object.__setattr__(self, role, () if names is None else tuple(names))
        if not self.named:
            raise UsageError(
                'Roles() names no tensor; at least one is needed, as in Roles(mask="attention_mask")',
                place=places.shown(*places.caller()),
            )

    @property
    def named(self) -> list[tuple[str, str]]:
        """Each role that is given, with the name of a tensor."""
        return [(f.name, name) for f in fields(self) for name in getattr(self, f.name)]

    def require_in(self, batch: Any) -> None:
        """Raise ``UsageError`` for a name that no tensor of the batch has."""
        for role, name in self.named:
            nested.require_names([batch], [name], f"TrainLoop.roles: {role}")


@dataclass(slots=True, kw_only=True)
class TrainLoop:
    """A project's own model and its own training loop.

    Build everything inside the function that returns it, so that each call gives a fresh loop:

    >>> def make(accumulate=1):
    ...     model = GPT.tiny()
    ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ...     return TrainLoop(
    ...         model=model,
    ...         optimizer=optimizer,
    ...         batch=example_batch(),
    ...         fit=lambda batches: train(model, optimizer, batches, accumulate=accumulate),
    ...     )

    Parameters
    ----------
    model
        a module, or a list or dict of modules (a GAN's generator and discriminator)
    optimizer
        one, or a list; left out where the loop makes its own (found from what runs)
    batch
        an example batch, any nested structure of tensors: tuple, dict, dataclass, ``ModelOutput``
    batches
        fresh, different batches: a DataLoader, any iterable, or ``batches(n)``
    fit
        ``fit(batches)``, the project's own loop over the batches it is given
    step
        ``step(batch)`` in place of ``fit``, for a project with a per-batch function
    loss
        ``loss(model, batch) -> scalar tensor``: a probe, never compared with what the loop backpropagates
    frozen
        paths of what should not train, e.g. ``("backbone.",)``: parameters of that name, and all below it
    evaluate
        ``evaluate()``, called once after a short run, for the mode in which it runs the model
    padding
        ``Padding(pad_id=..., ignore_index=..., dim=...)``: which entries of the batch are padding; a list of them for
        several sequences in one batch
    roles
        ``Roles(mask=..., weights=...)``: what tensors of the batch are. Each must count as what it is
    batch_dim
        the dimension along which rows lie in every tensor of the batch, where it is not 0
    split_batch
        ``split_batch(batch, k)``, the project's own way to split a batch: a list of k micro-batches
    rows_interact
        True: the examples of a batch should interact (contrastive losses, batch statistics); False: they must not
    ordered
        True: the order of the rows of a batch carries something (halves are two views, the next row is the target);
        False: it carries nothing, and rows that change places all together must not change the loss
    nondeterministic
        True: two runs under one seed may differ, and ``determinism`` is left out; False: they must not, whatever the
        reason
    expected_init_loss
        the expected first loss, as the loop computes it; more than a factor of 1.5 away is a fault
    scheduler, scaler
        the loop's own; both are found from what runs as well
    steps
        the optimizer steps of the whole training, as in ``len(loader) * epochs // accumulate``: the schedule is judged
        by them. Read again for each setting of the function's keywords
    epochs
        the epochs of the whole training, for a scheduler that is called once an epoch
    pretrained
        the parts that begin with loaded weights, by their paths; True for the whole model. Loaded values that are
        initialised again before training are then a fault
    save, load
        stopping and going on: ``save()`` returns a state and ``load(state)``, called on a fresh loop, takes it. Or
        ``save(path)`` writes and ``load(path)`` reads: a ``pathlib.Path`` in an empty temporary folder, and the folder
        itself where the parameter's name says folder or dir; it is removed afterwards. What else they write goes where
        the project puts it
    renews
        what ``load`` should not restore, e.g. ``("optimizer", "scheduler")``: "optimizer", "scheduler", "scaler",
        "rng", or paths as in failures of ``resume_equivalence`` (``"model.bank"``), with all that lies below them. The
        resumed run is judged for the rest
    parts
        ``parts(model, batch)``, the terms of the loss by name: a mapping of each to its value, or to (weight, value);
        they must add up to what the loop backpropagates

    Raises
    ------
    UsageError
        a field is of a kind that cannot be judged; the message says what is needed
    """

    model: Any
    optimizer: Any = None
    batch: Any = None
    loss: Loss | None = None
    fit: Fit | None = None
    step: Step | None = None
    batches: Any = None
    scheduler: Any = None
    scaler: Any = None
    steps: int | None = None
    epochs: int | None = None
    evaluate: Callable[[], Any] | None = None
    save: Callable[..., Any] | None = None
    load: Callable[[Any], Any] | None = None
    renews: Sequence[str] | None = None
    frozen: Sequence[str] | None = None
    padding: Padding | None = None
    roles: Roles | None = None
    batch_dim: Any = None
    split_batch: Callable[[Any, int], Sequence[Any]] | None = None
    parts: Parts | None = None
    expected_init_loss: float | None = None
    pretrained: bool | Sequence[str] | None = None
    rows_interact: bool | None = None
    ordered: bool | None = None
    nondeterministic: bool | None = None
    _modules: dict[str, nn.Module] = field(init=False, repr=False)
    _seed: int = field(init=False, repr=False, default=0)
    _kept: Any = field(init=False, repr=False, default=None)
    _place: tuple[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._place = places.caller()
        try:
            self._modules = named_modules(self.model)
            if isinstance(self.frozen, Iterator):
                self.frozen = tuple(self.frozen)
            if isinstance(self.renews, Iterator):
                self.renews = tuple(self.renews)
            require_fields(self)
            self.padding = one_padding(self.padding, "TrainLoop.padding")
            if self.roles is not None and not isinstance(self.roles, Roles):
                raise UsageError(f'TrainLoop.roles is {_plain_or_type(self.roles)}; Roles(mask="key") is needed')
        except UsageError as error:
            raise self.located(error) from None

    def located(self, error: UsageError) -> UsageError:
        """The error with the line of the field that its message begins with: where its function is defined, or where
        the field is given."""
        named = re.match(r"(?:TrainLoop\.)?(\w+)", str(error))
        if error.place or named is None:
            return error
        name = named[1] if named[1] in self.field_names() else ""
        place = places.of_function(getattr(self, name, None)) or places.of_keyword(*self._place, "TrainLoop", name)
        return UsageError(str(error), place=place)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The declared modules by the prefix that their parameters' names carry ("" for a single model)."""
        return self._modules

    @property
    def seed(self) -> int:
        """The seed that the loop was built under, which its data are drawn by."""
        return self._seed

    @property
    def kept(self) -> Any:
        """The batches of its DataLoader that an earlier run read, if any are kept."""
        return self._kept

    def built_under(self, seed: int, kept: Any = None) -> None:
        """Set ``seed`` and ``kept``."""
        self._seed, self._kept = seed, kept

    @property
    def optimizers(self) -> list[Any]:
        """The declared optimizers as a list, empty where none was given."""
        if self.optimizer is None:
            return []
        if isinstance(self.optimizer, Mapping):
            return list(self.optimizer.values())
        if isinstance(self.optimizer, (list, tuple, set)):
            return list(self.optimizer)
        return [self.optimizer]

    @staticmethod
    def field_names() -> tuple[str, ...]:
        """The names that the constructor takes."""
        return tuple(f.name for f in fields(TrainLoop) if f.init)


def one_padding(given: Any, field: str) -> Padding | None:
    """A declared padding, or the first of several. Raises ``UsageError``, which names the field, for anything else."""
    if given is None or isinstance(given, Padding):
        return given
    if isinstance(given, (list, tuple)):
        if not given:
            raise UsageError(
                f"{field} is an empty {type(given).__name__}; at least one Padding is needed, or leave it out"
            )
        for number, one in enumerate(given):
            if not isinstance(one, Padding):
                raise UsageError(f"{field}[{number}] is {_plain_or_type(one)}; a Padding is needed")
        return Padding.first_of(given)
    pad_id = given if is_whole(given) else 0
    raise UsageError(f"{field} is {_plain_or_type(given)}; Padding(pad_id={pad_id}) is needed")


def _plain_or_type(given: Any) -> str:
    return repr(given) if isinstance(given, (str, int, float)) else a(given)
