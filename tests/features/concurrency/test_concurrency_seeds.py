"""``worker_concurrency``: the generators, and the ``get_worker_info()``, of samples that are made at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import ringloader
from ringloader import DataLoader

pytestmark = pytest.mark.rings_only

KINDS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "three processes": {"num_workers": 3},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "here": {},
}


def drawn() -> list[float]:
    info: Any = get_worker_info()
    rng = info.rng
    return [
        rng.random_generator.random(),
        float(torch.rand((), generator=rng.torch_generator)),
        rng.numpy_generator.random(),
    ]


class Drawing(Dataset[Any]):
    """A sample draws before and after a pause, in which others draw."""

    def __len__(self) -> int:
        return 24

    async def __getitem__(self, index: int) -> Any:
        first = drawn()
        await asyncio.sleep(0.001 * (index % 5))
        return torch.tensor([first, drawn(), await asyncio.to_thread(drawn)])


class PlainDrawing(Drawing):
    """The same with a plain method."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        first = drawn()
        time.sleep(0.001 * (index % 5))
        return torch.tensor([first, drawn(), drawn()])


def samples(dataset: Any, **given: Any) -> torch.Tensor:
    torch.manual_seed(1)
    loader = DataLoader(dataset, batch_size=4, seeding="sample", seed=5, **given)
    return torch.stack([torch.cat(list(loader)) for _ in range(2)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [Drawing, PlainDrawing])
@pytest.mark.parametrize("concurrency", [2, 16])
def test_a_sample_has_its_own_generators_however_it_is_made(cls: Any, kind: str, concurrency: int) -> None:
    expected = samples(PlainDrawing(), num_workers=1, worker_concurrency=4)
    assert len(set(expected.flatten().tolist())) == expected.numel()
    found = samples(cls(), worker_concurrency=concurrency, **KINDS[kind])
    assert torch.equal(found, expected)


def test_they_are_those_of_a_thread_that_makes_one_sample_after_another() -> None:
    one = samples(PlainDrawing(), num_workers=2, worker_method="thread")
    assert torch.equal(one, samples(PlainDrawing(), num_workers=2, worker_concurrency=8))


def test_a_shared_batch_and_a_resumed_epoch_have_the_same() -> None:
    expected = samples(PlainDrawing(), num_workers=1, worker_concurrency=4)
    found = samples(Drawing(), num_workers=2, worker_concurrency=4, worker_task="sample")
    assert torch.equal(found, expected)
    given = {"batch_size": 4, "seeding": "sample", "seed": 5, "num_workers": 2, "worker_concurrency": 8}
    torch.manual_seed(1)
    before: Any = ringloader.StatefulDataLoader(Drawing(), **given)
    iterator = iter(before)
    first = [next(iterator) for _ in range(3)]
    state = before.state_dict()
    after: Any = ringloader.StatefulDataLoader(Drawing(), **{**given, "num_workers": 1})
    after.load_state_dict(state)
    assert torch.equal(torch.cat([*first, *after]), expected[0])


class Infos(Dataset[Any]):
    """A sample is its worker's number, and how many there are, as the function says that looks."""

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, _index: int) -> Any:
        return [_info(), await asyncio.to_thread(_info)]


class PlainInfos(Infos):
    """The same with a plain method."""

    def __getitem__(self, _index: int) -> Any:  # type: ignore[override]
        return [_info()]


def _info() -> tuple[int, int, int]:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, Infos)
    return info.id, info.num_workers, int(info.rng is not None)


@pytest.mark.parametrize("cls", [Infos, PlainInfos])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_has_the_info_of_its_worker(cls: Any, kind: str) -> None:
    loader = DataLoader(cls(), batch_size=1, worker_concurrency=4, collate_fn=list, **KINDS[kind])
    number = KINDS[kind].get("num_workers", 1)
    found = [info for batch in loader for sample in batch for info in sample]
    assert set(found) == {(worker, number, 1) for worker in range(number)}
    assert get_worker_info() is None


def test_torchs_function_asks_for_them() -> None:
    thread_safe_generator = getattr(torch.random, "thread_safe_generator", None)
    if thread_safe_generator is None:
        pytest.skip("this torch has none")
    loader = DataLoader(Safe(), batch_size=4, worker_concurrency=4, num_workers=1, seeding="sample", seed=5)
    other = DataLoader(Safe(), batch_size=4, worker_concurrency=8, seeding="sample", seed=5)
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(other)))


class Safe(Dataset[Any]):
    """A sample is drawn from the generator that torch gives."""

    def __len__(self) -> int:
        return 8

    async def __getitem__(self, _index: int) -> torch.Tensor:
        generator = torch.random.thread_safe_generator()
        assert generator is not None
        return torch.rand(3, generator=generator)


def test_a_collate_fn_draws_the_same_numbers_of_the_process_and_of_the_worker() -> None:
    def numbers(**given: Any) -> list[Any]:
        loader = DataLoader(
            Drawing(),
            batch_size=4,
            seeding="sample",
            seed=5,
            collate_fn=_collate,
            worker_concurrency=8,
            **given,
        )
        return list(loader)

    assert numbers(num_workers=1) == numbers(num_workers=2)


def _collate(_batch: Any) -> list[float]:
    return [*drawn(), float(torch.rand(()))]


class OfProcess(Drawing):
    """A sample draws from a generator of the process."""

    async def __getitem__(self, _index: int) -> torch.Tensor:
        return torch.rand(1)


def test_the_log_says_that_samples_draw_from_the_process(caplog: pytest.LogCaptureFixture) -> None:
    given = {"batch_size": 4, "seeding": "sample", "worker_concurrency": 4}
    assert len(list(DataLoader(Drawing(), **given))) == 6
    assert caplog.messages == []
    assert len(list(DataLoader(OfProcess(), **given))) == 6
    assert [text for text in caplog.messages if "draw from get_worker_info().rng" in text] == caplog.messages
    assert len(caplog.messages) == 1
