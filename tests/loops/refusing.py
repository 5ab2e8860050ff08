"""A correct loop that takes its own batches only: whatever is altered is refused, or gets a nonsensical loss.

It keeps a fingerprint of each of its batches. Which part looks, and what it does about another batch, is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.declare import nested

ROWS, LENGTH, WORDS, CLASSES = 12, 7, 20, 3


class NotOurs(Exception):
    """An exception of the project's own."""


def _nan(value: torch.Tensor) -> torch.Tensor:
    return value * float("nan")


def _vector(value: torch.Tensor) -> torch.Tensor:
    return value * torch.ones(2)


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach()


def _number(value: torch.Tensor) -> float:
    return float(value)


def _nothing(value: torch.Tensor) -> None:
    return None


EXCEPTIONS: tuple[type[Exception], ...] = (RuntimeError, ValueError, AssertionError, KeyError, IndexError, NotOurs)
NONSENSE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": _nan,
    "vector": _vector,
    "detached": _detached,
    "number": _number,
    "nothing": _nothing,
}
PLACES = ("model", "loss", "fit")
MESSAGE = "this batch is none of the data set"


@dataclass(slots=True)
class Refusal:
    """What a loop does with a batch that is none of its own; ``None`` for ``how``: nothing."""

    where: str
    how: type[Exception] | str | None
    sees: str = "values"
    """What is compared: "shapes", or "values" as well."""
    own: set[Any] = field(default_factory=set)
    times: int = 0
    """How many batches were refused."""

    def learn(self, batch: Any) -> None:
        self.own.add(self._fingerprint(batch))

    def refuses(self, batch: Any) -> bool:
        if self.how is None or self._fingerprint(batch) in self.own:
            return False
        self.times += 1
        return True

    def look(self, where: str, batch: Any) -> None:
        if where == self.where and isinstance(self.how, type) and self.refuses(batch):
            raise self.how(MESSAGE)

    def value(self, batch: Any, value: torch.Tensor) -> Any:
        nonsense = NONSENSE[self.how] if isinstance(self.how, str) else None
        return nonsense(value) if nonsense is not None and self.refuses(batch) else value

    def _fingerprint(self, batch: Any) -> tuple[Any, ...]:
        tensors = [t.detach() for t in nested.tensors(batch)]
        shapes = tuple((tuple(t.shape), t.dtype, t.device.type) for t in tensors)
        return shapes if self.sees == "shapes" else (shapes, tuple(str(t.tolist()) for t in tensors))


class Texts(nn.Module):
    """A mean over real tokens, and two layers."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, padding_idx=0)
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.refusal = refusal

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.refusal.look("model", (ids, mask))
        weights = mask.to(self.table.weight.dtype)[..., None]
        mean = (self.table(ids) * weights).sum(1) / weights.sum(1)
        return self.out(torch.tanh(self.hidden(mean)))


class Tables(nn.Module):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 16), nn.Linear(16, CLASSES)
        self.refusal = refusal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.refusal.look("model", (x,))
        return self.out(torch.tanh(self.hidden(x)))


def _table(seed: int) -> tuple[torch.Tensor, ...]:
    labels = torch.arange(ROWS) % CLASSES
    drawn = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed))
    return F.one_hot(labels, 6) + 0.3 * drawn, labels


def _texts(seed: int) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(ROWS) % CLASSES
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=drawn)
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths[:, None]
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=drawn)
    ids[:, 0] = labels + 1
    return ids * mask, mask.long(), labels


class Gathered(torch.utils.data.Dataset[Any]):
    """Items of the batches, one after another."""

    def __init__(self, batches: list[tuple[torch.Tensor, ...]]) -> None:
        self.columns = [torch.cat(column) for column in zip(*batches, strict=True)]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[index] for column in self.columns)


def refusing(
    refusal: Refusal,
    *,
    texts: bool = False,
    declared: tuple[str, ...] = (),
    made_of: str = "fit",
    knobs: tuple[str, ...] = (),
) -> Callable[..., TrainLoop]:
    """A function that builds the loop. ``declared``: the optional fields that it gives; ``made_of``: "fit", "step" or
    "loss"; ``knobs``: of "accumulate", "precision", "checkpoint"."""
    gives: Any = _texts if texts else _table
    batches = [gives(seed) for seed in range(12)]
    for batch in batches:
        refusal.learn(batch)
        refusal.learn(batch[:-1])

    def built(accumulate: int = 1, precision: str = "fp32", checkpoint: bool = False) -> TrainLoop:
        model = (Texts if texts else Tables)(refusal)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

        def outputs(model: nn.Module, *inputs: torch.Tensor) -> Any:
            if checkpoint:
                return torch.utils.checkpoint.checkpoint(model, *inputs, use_reentrant=False)
            return model(*inputs)

        def loss(model: nn.Module, batch: Any) -> Any:
            refusal.look("loss", batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                value = F.cross_entropy(outputs(model, *batch[:-1]), batch[-1])
            return refusal.value(batch, value)

        def step(batch: Any) -> None:
            refusal.look("fit", batch)
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

        def fit(given: Any) -> None:
            optimizer.zero_grad()
            for number, batch in enumerate(given, start=1):
                refusal.look("fit", batch)
                (loss(model, batch) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        def split_batch(batch: Any, k: int) -> list[Any]:
            refusal.look("split", batch)
            return list(zip(*(part.chunk(k) for part in batch), strict=True))

        def evaluate() -> float:
            model.eval()
            with torch.no_grad():
                right = (model(*batches[1][:-1]).argmax(1) == batches[1][-1]).float().mean().item()
            model.train()
            return right

        def load(state: Any) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        given = {
            "loss": loss,
            "batches": list(batches),
            "loader": torch.utils.data.DataLoader(Gathered(batches), batch_size=ROWS),
            "padding": Padding(pad_id=0),
            "evaluate": evaluate,
            "split_batch": split_batch,
            "save": lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            "load": load,
            "rows_interact": False,
            "ordered": False,
        }
        fields = {"batches" if name == "loader" else name: given[name] for name in declared}
        if made_of != "loss":
            fields["fit" if made_of == "fit" else "step"] = fit if made_of == "fit" else step
        else:
            fields["loss"] = loss
        return TrainLoop(model=model, optimizer=optimizer, batch=batches[0], **fields)

    return _with_knobs(built, knobs)


def _with_knobs(built: Callable[..., TrainLoop], knobs: tuple[str, ...]) -> Callable[..., TrainLoop]:
    def none() -> TrainLoop:
        return built()

    def accumulates(accumulate: int = 1) -> TrainLoop:
        return built(accumulate=accumulate)

    def every(accumulate: int = 1, precision: str = "fp32", checkpoint: bool = False) -> TrainLoop:
        return built(accumulate, precision, checkpoint)

    return {0: none, 1: accumulates}.get(len(knobs), every)
