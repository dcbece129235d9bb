"""Memory that the program has locked, which the system does not take back."""

from __future__ import annotations

import ctypes
import logging
import os
import resource

import pytest
import torch
from torch.utils.data import default_collate

from faults.failing_datasets import Numbers
from parity.harness import assert_path

PAGE = resource.getpagesize()
MEBI = 1 << 20


def lock(tensor: torch.Tensor) -> None:
    """Locks the pages in which a tensor lies, in this process."""
    start = tensor.data_ptr() // PAGE * PAGE
    nbytes = tensor.data_ptr() + tensor.nbytes - start
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(start), ctypes.c_size_t(nbytes)) != 0:
        raise OSError(ctypes.get_errno(), "mlock")


@pytest.fixture
def _may_lock() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() != 0 and limit != resource.RLIM_INFINITY and limit < 8 * MEBI:
        pytest.skip(f"only {limit} bytes may be locked")


def collate_and_lock(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = default_collate(samples)
    lock(batch)
    return batch


class Sizes(Numbers):
    """Of 8 to 56 KiB, the larger ones later."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(((1 + index * 7 % 11 + index // 20) << 12,), index)


@pytest.mark.usefixtures("_may_lock")
@pytest.mark.parametrize("in_order", [True, False])
def test_workers_lock_what_they_collate(loader_class, loader_name, in_order):
    """Slots that cannot be given back are no room for others, and no error."""
    share = MEBI
    options = {} if loader_name == "torch" else {"max_shared_bytes": share}
    loader = loader_class(
        Sizes(60), batch_size=2, shuffle=False, num_workers=1, collate_fn=collate_and_lock, prefetch_factor=4,
        drop_last=True, in_order=in_order, sampler=[index // 2 for index in range(120)], **options,
    )  # fmt: skip
    iterator = iter(loader)
    segment = -1
    if loader_name != "torch":
        assert_path(iterator, 1)
        segment = iterator._transport.engine.segment
    seen = 0
    kept = []
    for index, batch in enumerate(iterator):
        assert bool((batch == index).all())
        seen += 1
        kept = [*kept[-1:], batch]
        if segment >= 0:
            # Beside the share: control structures and indices.
            assert os.fstat(segment).st_blocks * 512 <= share + MEBI // 8
    assert seen == 60


@pytest.mark.rings_only
@pytest.mark.usefixtures("_may_lock")
@pytest.mark.parametrize("warm", ["0", "1"])
def test_what_cannot_be_given_back_is_said_once(loader_class, warm, caplog, monkeypatch):
    monkeypatch.setenv("RINGLOADER_WARM", warm)
    loader = loader_class(Numbers(12, 50_000), num_workers=2)
    with caplog.at_level(logging.WARNING, "ringloader"):
        seen = []
        for batch in loader:
            lock(batch)
            seen.append(int(batch[0, -1]))
            assert not caplog.records
        del batch, loader
    assert seen == list(range(12))
    assert len(caplog.records) == 1, caplog.text
    assert "could not be given back" in caplog.text
