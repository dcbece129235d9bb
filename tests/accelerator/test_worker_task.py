"""``worker_task="sample"`` with pinned memory and devices: every byte, whichever workers made the batch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from accelerator import pretend
from accelerator.moved import DEVICE
from accelerator.pinned import IS_NAMED, PIN
from ringloader import DataLoader

pytestmark = [
    pytest.mark.rings_only,
    pytest.mark.skipif(IS_NAMED, reason="this torch pins for another device by its own thread only"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

N, BATCH = 24, 6
# Small tensors are packed, larger ones are copied alone.
SIZES = [3, 20_000]
WAYS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 3},
    "threads": {"num_workers": 3, "worker_method": "thread"},
}


@pytest.fixture(params=["pinned", "moved", "moved late"])
def options(request):
    if request.param == "pinned":
        yield PIN
        return
    with pretend.delayed(5_000 if request.param == "moved late" else 0):
        yield {"device": DEVICE}
    assert not pretend.violations()


class Rows(Dataset[Any]):
    """Rows of random numbers, that take long enough for batches to be cut; one may kill its worker."""

    def __init__(self, size: int, died: Path | None = None) -> None:
        self.size, self.died = size, died

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        if self.died is not None and index % 10 == 3 and not (self.died / str(index)).exists():
            (self.died / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        row = torch.arange(self.size, dtype=torch.float64).mul_(index + 1)
        return {"row": row, "number": index}


def collated(samples: list[Any]) -> Any:
    return {
        "row": torch.stack([sample["row"] for sample in samples]),
        "number": torch.tensor([sample["number"] for sample in samples]),
    }


def assert_whole(loader: DataLoader[Any], size: int, options: dict[str, Any]) -> None:
    # All batches are held, so that none may have the memory of another.
    batches = list(loader)
    assert len(batches) == N // BATCH
    for number, batch in enumerate(batches):
        first = number * BATCH
        for tensor in batch.values():
            assert tensor.device == DEVICE if "device" in options else tensor.is_pinned()
        assert batch["number"].tolist() == list(range(first, first + BATCH))
        expected = torch.stack([Rows(size)[index]["row"] for index in range(first, first + BATCH)])
        assert torch.equal(batch["row"].cpu(), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collate_fn", [None, collated], ids=["default", "function"])
def test_batches_are_there_whole(collate_fn, size, way, options):
    loader = DataLoader(
        Rows(size),
        BATCH,
        collate_fn=collate_fn,
        worker_task="sample",
        persistent_workers=True,
        **WAYS[way],
        **options,
    )
    with loader:
        for _ in range(2):
            assert_whole(loader, size, options)


@pytest.mark.parametrize("size", SIZES)
def test_batches_are_there_whole_after_deaths(size, tmp_path, options):
    dataset = Rows(size, tmp_path)
    loader = DataLoader(dataset, BATCH, worker_task="sample", num_workers=3, restart_workers=5, **options)
    assert_whole(loader, size, options)
    assert len(list(tmp_path.iterdir())) == 3
