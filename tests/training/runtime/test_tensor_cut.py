"""What a checkpoint holds whole is put where each rank's piece of it lies; a rank reads no more than that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from training.checkpoint.safetensors_files import TensorFiles, write_tensors
from training.runtime.tensor_cut import Cut, sharded_like
from training.strategies.zero import own_numbers


@pytest.fixture
def second_of_four_ranks() -> Iterator[None]:
    """A process group without peers: nothing here may talk to them."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


def in_host_memory(mesh: DeviceMesh, placements: tuple[Placement, ...], piece: torch.Tensor, rows: int) -> DTensor:
    """As FSDP's CPUOffloadPolicy makes parameters: the piece lies in host memory, the mesh is of other devices."""
    whole = torch.empty(rows, piece.shape[1], device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), piece.dtype)
    return DTensor(piece, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


@pytest.mark.parametrize(
    ("shape", "placements", "rows", "first_row"),
    [
        ((4,), (Shard(0),), 16, 4),
        ((4,), (Shard(0),), 7, 2),  # uneven: 2, 2, 2, 1
        ((2, 2), (Replicate(), Shard(0)), 16, 8),  # hsdp
    ],
)
@pytest.mark.usefixtures("second_of_four_ranks")
def test_moments_of_an_offloaded_parameter_never_touch_the_devices_of_its_mesh(
    shape: tuple[int, ...], placements: tuple[Placement, ...], rows: int, first_row: int
) -> None:
    """The mesh is of meta devices: whatever is moved there loses its values, and shows."""
    mesh = DeviceMesh("meta", torch.arange(4).reshape(shape), _init_backend=False)
    held = rows // mesh.size(mesh.ndim - 1) + (rows % mesh.size(mesh.ndim - 1) > 0)
    parameter = in_host_memory(mesh, placements, torch.empty(held, 3), rows)
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    moment = sharded_like(whole, parameter)
    assert moment.shape == parameter.shape
    assert moment.to_local().device.type == "cpu"  # type: ignore[attr-defined]
    assert torch.equal(moment.to_local(), whole[first_row : first_row + held])  # type: ignore[attr-defined]
    whole.zero_()
    assert moment.to_local().any(), "it is a copy"  # type: ignore[attr-defined]


def bytes_read(path: Path) -> int:
    """Bytes of a mapped file that this process touched, as far as the kernel maps them: 2 MiB at a time, at most."""
    total, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:  # the first line of a mapping
            wanted = line.endswith(str(path))
        elif wanted and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def fsdp_shard(whole: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh("meta", torch.arange(4), _init_backend=False)
    like = in_host_memory(mesh, (Shard(0),), torch.empty(len(whole) // 4, whole.shape[1]), len(whole))
    shard: torch.Tensor = sharded_like(whole, like).to_local()  # type: ignore[attr-defined]
    return shard


def tp_piece(whole: torch.Tensor) -> torch.Tensor:
    return Cut(0, len(whole)).take(whole, DeviceMesh("cpu", torch.arange(4))).clone()


def zero3_partition(whole: torch.Tensor) -> torch.Tensor:
    return own_numbers(whole, whole.numel() // 4, 1).clone()


@pytest.mark.parametrize("take", [fsdp_shard, tp_piece, zero3_partition])
@pytest.mark.usefixtures("second_of_four_ranks")
def test_a_rank_reads_only_its_piece_of_a_checkpoint(
    take: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    path, whole = tmp_path / "model.safetensors", torch.arange(2.0**24).reshape(4096, 4096)  # 64 MiB
    write_tensors(path, {"matrix": whole}, abandoned=threading.Event())
    files = TensorFiles(tmp_path, "model")
    piece = take(files["matrix"])
    read = bytes_read(path)
    assert torch.equal(piece.flatten(), whole[1024:2048].flatten())
    assert 2**24 <= read <= 2**24 + 2**22
