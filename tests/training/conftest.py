"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@pytest.fixture
def fake_ranks() -> Iterator[DeviceMesh]:
    """Two tp ranks, of which the other neither computes nor sends."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()
