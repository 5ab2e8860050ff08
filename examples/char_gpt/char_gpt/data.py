"""The language reference of the running CPython as characters: vocabulary, random crops, loaders."""

from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Vocabulary:
    characters: str

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        ids = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([ids[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


class Crops(Dataset[Batch]):
    """Every window of ``context`` characters, with the same window one character later as its target."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        if len(tokens) <= context:
            raise ValueError(f"{len(tokens)} characters given, a crop of {context} needs at least {context + 1}")
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, start: int) -> Batch:
        crop = self.tokens[start : start + self.context + 1]
        return crop[:-1], crop[1:]


@dataclass(frozen=True)
class Corpus:
    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor


@cache
def load_corpus(validation_share: float = 0.1) -> Corpus:
    text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = Vocabulary("".join(sorted(set(text))))
    tokens = vocabulary.encode(text)
    cut = int(len(tokens) * (1 - validation_share))
    return Corpus(vocabulary, tokens[:cut], tokens[cut:])


def crop_loader(
    tokens: Tensor, context: int, batch_size: int, batches: int, seed: int | None = None
) -> DataLoader[Batch]:
    """``batches`` batches of random crops; with a ``seed`` the same ones in every pass."""
    crops = Crops(tokens, context)
    count = batches * batch_size
    if seed is not None:
        starts = torch.randint(len(crops), (count,), generator=torch.Generator().manual_seed(seed))
        return DataLoader(crops, batch_size, sampler=starts.tolist())
    return DataLoader(crops, batch_size, sampler=RandomSampler(crops, replacement=True, num_samples=count))
