"""Small batches that can be learned, the same on every call: drawn from fixed seeds, in the default dtype."""

from __future__ import annotations

import torch


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(rows: int = 4, length: int = 12, vocab: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Arithmetic progressions modulo ``vocab``: inputs, and the same shifted by one."""
    drawn = torch.randint(0, vocab, (rows, 2), generator=_generator(seed))
    start, stride = drawn[:, :1], drawn[:, 1:] % 5 + 1
    ids = (start + stride * torch.arange(length + 1)) % vocab
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(rows: int = 8, classes: int = 4, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One-channel images, a pattern per class under noise: images and labels."""
    patterns = torch.randn(classes, 1, size, size, generator=_generator(99))
    labels = torch.arange(rows) % classes
    return patterns[labels] + 0.3 * torch.randn(rows, 1, size, size, generator=_generator(seed)), labels


def table(rows: int = 16, features: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Regression: features of unit variance, a smooth target of unit spread, shape ``(rows, 1)``."""
    x = torch.randn(rows, features, generator=_generator(seed))
    direction = torch.randn(features, 1, generator=_generator(98))
    return x, 1.4 * torch.sin(x @ direction / features**0.5 * 2)


def labelled(rows: int = 16, features: int = 6, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Classification: clusters, and the index of each row's cluster."""
    centres = 2 * torch.randn(classes, features, generator=_generator(97))
    labels = torch.arange(rows) % classes
    return centres[labels] + 0.5 * torch.randn(rows, features, generator=_generator(seed)), labels


def views(rows: int = 8, left: int = 6, right: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of the same hidden rows, for towers that must agree."""
    hidden = torch.randn(rows, 4, generator=_generator(seed))
    maps = torch.randn(4, left + right, generator=_generator(96))
    both = hidden @ maps / 2
    return both[:, :left].contiguous(), both[:, left:].contiguous()


def series(rows: int = 8, length: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine waves, shape ``(rows, length, 1)``, and each one's next value."""
    drawn = torch.rand(rows, 2, generator=_generator(seed))
    time = torch.arange(length + 1) * (0.3 + 0.5 * drawn[:, :1]) + 6 * drawn[:, 1:]
    waves = torch.sin(time).unsqueeze(-1)
    return waves[:, :-1].contiguous(), waves[:, -1].contiguous()


def ring(rows: int = 16, seed: int = 0) -> torch.Tensor:
    """Points near the unit circle, the real samples of a small GAN."""
    angle = 6.2832 * torch.rand(rows, 1, generator=_generator(seed))
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def episode(rows: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, actions and returns; two of the three actions pay off, by the state's sign."""
    states = torch.randn(rows, 4, generator=_generator(seed))
    actions = torch.randint(0, 3, (rows,), generator=_generator(seed + 1))
    returns = (actions == (states[:, 0] > 0).long()).to(states.dtype) + states[:, 1].tanh()
    return states, actions, returns
