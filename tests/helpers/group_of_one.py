"""A process group of this one process, as projects make it that always wrap their model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
