"""Views that were made of a batch before torch moves or changes its storage keep showing the batch."""

from __future__ import annotations

import copy
import gc
import io
import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import ringloader
from faults.script import run_script
from parity.harness import PATHS, assert_path


class Numbered(Dataset):
    def __init__(self, elements, length=40):
        self.elements = elements
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.elements,), index + 1, dtype=torch.int32)


def share_in_module(tensor):
    module = torch.nn.Module()
    module.register_buffer("batch", tensor)
    module.share_memory()


def share_from_threads(tensor):
    storage = tensor.untyped_storage()
    threads = [threading.Thread(target=storage.share_memory_) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raise_in_between(tensor):
    with pytest.raises(TypeError):
        tensor.untyped_storage()._share_fd_cpu_("no such argument")
    tensor.share_memory_()


def copy_after(tensor):
    before = tensor.clone()
    tensor.share_memory_()
    copied = copy.deepcopy(tensor)
    assert torch.equal(copied, before) and not vars(copied.untyped_storage())
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), before)


MOVES = {
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "of its storage": lambda tensor: tensor.untyped_storage().share_memory_(),
    "of a part": lambda tensor: tensor.view(-1)[1:].share_memory_(),
    "of a module": share_in_module,
    "twice": lambda tensor: tensor.share_memory_().share_memory_(),
    "sent": lambda tensor: ForkingPickler.dumps(tensor),
    "several threads": share_from_threads,
    "an error first": raise_in_between,
    "copied after": copy_after,
    "set_": lambda tensor: tensor.set_(torch.zeros(3, dtype=torch.int32)),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(3, dtype=torch.int32)),
    "resize_ to none": lambda tensor: tensor.resize_(0),
}
# Changes that are refused, as torch's shared memory refuses them, of which its batches are made.
REFUSED = {
    "resize_ to more": lambda tensor: tensor.resize_(8 * tensor.numel()),
    "storage to none": lambda tensor: tensor.untyped_storage().resize_(0),
    "storage to more": lambda tensor: tensor.untyped_storage().resize_(64 * tensor.numel()),
    "lazy clone": lambda tensor: torch._lazy_clone(tensor),
}
VIEWS = (
    lambda tensor: tensor.numpy(),
    lambda tensor: memoryview(tensor.numpy()),
    lambda tensor: np.from_dlpack(tensor),
    lambda tensor: torch.from_dlpack(tensor),
    lambda tensor: tensor.numpy()[:, 1:],
)


def wrong_views(loader, change):
    """Reads what was made of the first batches once all later ones have come and gone."""
    iterator = iter(loader)
    kept = []
    for number in range(3):
        batch = next(iterator)
        views = [view(batch) for view in VIEWS]
        change(batch)
        kept += [(number, view) for view in views]
    del batch, views
    gc.collect()
    noise = [torch.full_like(later, -1) for later in iterator]
    assert len(noise) == 17
    wrong = []
    for number, view in kept:
        rows = np.asarray(view)
        if (
            rows[0].min() != 2 * number + 1
            or rows[0].max() != 2 * number + 1
            or rows[1].max() != 2 * number + 2
        ):
            wrong.append((number, rows))
    return wrong


@pytest.mark.parametrize("elements", [100, 30_000])
@pytest.mark.parametrize("move", MOVES)
def test_views_outlive_a_move(loader_class, elements, move):
    loader = loader_class(Numbered(elements), num_workers=1, batch_size=2)
    assert not wrong_views(loader, MOVES[move])


@pytest.mark.parametrize("elements", [100, 30_000])
@pytest.mark.parametrize("change", REFUSED)
def test_storages_that_do_not_change(loader_class, elements, change):
    batch = next(iter(loader_class(Numbered(elements), num_workers=1, batch_size=2)))
    view = batch.numpy()
    with pytest.raises(RuntimeError):
        REFUSED[change](batch)
    assert view[1].tolist() == [2] * elements
    assert batch.untyped_storage().nbytes() == 8 * elements


@pytest.mark.rings_only
@pytest.mark.parametrize("path", PATHS)
def test_shared_by_file_name(loader_name, tmp_path, path):
    """Batches of torch's loader, shared by descriptor, move too then, and their views crash."""
    body = f"""
        from parity.harness import taking
        from parity.test_views import Numbered, wrong_views
        with taking({path!r}):
            torch.multiprocessing.set_sharing_strategy("file_system")
            for elements in (100, 30_000):
                loader = DataLoader(Numbered(elements), num_workers=1, batch_size=2)
                assert not wrong_views(loader, lambda tensor: tensor.share_memory_())
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.rings_only
def test_the_memory_comes_back(loader_class):
    """The memory is kept for the storage's views only: what the user may hold is never used up."""
    loader = loader_class(Numbered(30_000, 200), num_workers=1, max_shared_bytes=4 << 20, prefetch_factor=2)
    iterator = iter(loader)
    assert_path(iterator, 1)
    for number, batch in enumerate(iterator, 1):
        view = batch.numpy()
        batch.share_memory_()
        assert int(view.max()) == number
    assert ringloader.report(iterator).counters["copied_out"] == 0


class KeepsViews:
    """A `collate_fn` that shares what it collates, and collates again."""

    def __call__(self, samples):
        first = default_collate(samples)
        view = first.numpy()
        before = view.copy()
        first.share_memory_()
        del first
        second = default_collate([sample + 1000 for sample in samples])
        return torch.tensor(
            [bool((view == before).all()), bool((second == torch.from_numpy(before) + 1000).all())]
        )


@pytest.mark.parametrize("elements", [100, 30_000])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_views_in_a_worker(loader_class, elements, method):
    loader = loader_class(
        Numbered(elements),
        num_workers=1,
        batch_size=4,
        collate_fn=KeepsViews(),
        multiprocessing_context=method,
    )
    # Stock torch's allocation is shared already, so nothing moves.
    assert [batch.tolist() for batch in loader] == [[True, True]] * 10
