"""One loader with ``num_workers="auto"`` that several threads iterate at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import ringloader
from ringloader import DataLoader
from scripted_number import MOST, Scripted, look_at_each_batch
from small_datasets import Numbers

pytestmark = pytest.mark.rings_only

_EPOCHS = 5


def iterate_in_threads(loader: Any, epochs: int) -> list[BaseException]:
    """Iterates a loader in three threads, two of which break off each epoch. Returns their errors."""
    errors: list[BaseException] = []

    def iterate(last: int | None) -> None:
        try:
            for _ in range(epochs):
                for number, batch in enumerate(loader):
                    assert batch[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
                    if number == last:
                        break
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=iterate, args=(last,)) for last in (None, 7, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def new_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each iterator a number that changes often, from another one on."""
    from ringloader._features.auto import auto_workers

    first = iter(range(1 << 20))
    monkeypatch.setattr(
        auto_workers, "controller_of", lambda *_: Scripted({3: 4, 10: 1, 20: 5}, 1 + next(first) % 3)
    )


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_each_iterator_has_its_own_number(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_each_batch(monkeypatch)
    new_scripts(monkeypatch)
    loader = DataLoader(Numbers(160, 3), batch_size=4, num_workers="auto", worker_method=method)
    assert iterate_in_threads(loader, _EPOCHS) == []
    assert 1 <= loader.num_workers <= MOST


@pytest.mark.parametrize("workers", [0, 3])
def test_an_installed_number_is_never_written_to_the_loader(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at_each_batch(monkeypatch)
    new_scripts(monkeypatch)
    written: list[tuple[str, Any]] = []

    class Watched(TorchLoader[Any]):
        def __setattr__(self, name: str, value: Any) -> None:
            written.append((name, value))
            super().__setattr__(name, value)

    loader = Watched(Numbers(160, 3), batch_size=4, num_workers=workers)
    own = vars(loader)["num_workers"], vars(loader)["prefetch_factor"]
    written.clear()
    stop = threading.Event()
    seen: set[Any] = set()

    def look() -> None:
        while not stop.is_set():
            seen.add((loader.num_workers, loader.prefetch_factor))

    watching = threading.Thread(target=look)
    watching.start()
    try:
        with ringloader.installed(num_workers="auto"):
            assert iterate_in_threads(loader, 4) == []
    finally:
        stop.set()
        watching.join()
    assert seen == {own}
    assert not [name for name, _ in written if name in ("num_workers", "prefetch_factor")]
