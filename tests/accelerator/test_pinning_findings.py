"""Findings of reviews of pinning: modes of the caller's thread, classes that pin themselves, interrupts."""

from __future__ import annotations

import signal
import threading
import typing

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from accelerator import pretend
from accelerator.pinned import IS_NAMED, PIN
from faults.failing_datasets import Pauses
from faults.proc import wait_until
from parity.datasets import identity
from ringloader import DataLoader

pytestmark = pytest.mark.skipif(IS_NAMED, reason="torch's own thread pins")


class ToMeta(TorchFunctionMode):
    """Has every new tensor made where there is no memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs or function is torch.empty_like:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@pytest.mark.parametrize("option", [PIN, {"device": pretend.NAME}], ids=["pinned", "moved"])
@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("mode", [FakeTensorMode, ToMeta])
def test_modes_have_no_say(mode, size, option):
    loader = DataLoader(
        [torch.full((size,), float(number)) for number in range(6)], num_workers=1, batch_size=None, **option
    )
    iterator = iter(loader)
    next(iterator)
    with mode():
        batches = [next(iterator) for _ in range(3)]
    for number, batch in enumerate([*batches, *iterator], 1):
        assert type(batch) is torch.Tensor
        assert batch.device.type == (pretend.NAME if "device" in option else "cpu")
        assert torch.equal(batch.cpu(), torch.full((size,), float(number)))


class PinsItself(typing.NamedTuple):
    one: torch.Tensor
    two: torch.Tensor

    def pin_memory(self):
        return ("pinned by itself", self.one.pin_memory())

    def to(self, device, non_blocking=False):
        return ("moved by itself", self.one.to(device, non_blocking=non_blocking))


def test_a_named_tuple_may_pin_itself(loader_class):
    batches = [PinsItself(torch.ones(3), torch.ones(2))] * 6
    loader = loader_class(batches, batch_size=None, collate_fn=identity, num_workers=1, **PIN)
    assert [batch[0] for batch in loader] == ["pinned by itself"] * 6


@pytest.mark.rings_only
@pytest.mark.parametrize("workers", [0, 1])
def test_a_named_tuple_may_move_itself(workers):
    batches = [PinsItself(torch.ones(3), torch.ones(2))] * 6
    loader = DataLoader(batches, batch_size=None, collate_fn=identity, num_workers=workers, device="auto")
    assert [batch[0] for batch in loader] == ["moved by itself"] * 6


def test_keys_are_not_pinned(loader_class):
    batches = [{torch.ones(3): torch.ones(2)} for _ in range(6)]
    loader = loader_class(batches, batch_size=None, collate_fn=identity, num_workers=1, **PIN)
    found = [(key.is_pinned(), value.is_pinned()) for batch in loader for key, value in batch.items()]
    assert found == [(False, True)] * 6


class Interrupt(BaseException):
    """As `KeyboardInterrupt`: what a batch raises is an `Exception`."""


@pytest.mark.rings_only
@pytest.mark.parametrize("option", [PIN, {"device": pretend.NAME}], ids=["pinned", "moved"])
@pytest.mark.parametrize("size", [10, 200_000])
def test_interrupts_lose_nothing(option, size):
    """Signals whose handler raises, at any moment of `next`, but for the sampler's."""
    count = 4000 if size < 100 else 400
    dataset = [torch.full((size,), float(number)) for number in range(count)] if size < 100 else None
    if dataset is None:
        shared = torch.zeros(size)
        dataset = [shared] * count
    loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=2, **option)
    iterator = iter(loader)
    armed = False

    def interrupt(_signum, frame):
        # An interrupt after the batch has left the scheduler is the caller's own loss, as with any iterator.
        if not armed or frame.f_code.co_filename == __file__ or frame.f_code.co_name == "_next_index":
            return
        if frame.f_code.co_name != "__next__" or _is_at_work(iterator._scheduler):
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)
    got, interrupts = [], 0
    try:
        while True:
            armed = True
            try:
                batch = next(iterator)
            except Interrupt:
                interrupts += 1
                continue
            except StopIteration:
                break
            finally:
                armed = False
            got.append(batch)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert size < 100 or interrupts > 0
    assert len(got) == count
    if size < 100:
        assert [int(batch[0]) for batch in got] == list(range(count))


def _is_at_work(scheduler):
    try:
        scheduler.positions()
    except RuntimeError:
        return True
    return False


@pytest.mark.rings_only
@pytest.mark.parametrize("option", [PIN, {"device": pretend.NAME}], ids=["pinned", "moved"])
def test_a_thread_that_waits_is_told_of_a_shutdown(option, tmp_path):
    """Soon, while a worker is still busy, and not with the batch that this one makes."""
    if IS_NAMED and option is PIN:
        pytest.skip("torch's own loader runs")
    dataset = Pauses(8, 1, tmp_path)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, **option)
    iterator = iter(loader)
    assert int(next(iterator)[0]) == 0
    got = []

    def take():
        try:
            got.append(int(next(iterator)[0]))
        except Exception as error:
            got.append(str(error))

    waiting = threading.Thread(target=take)
    waiting.start()
    assert wait_until(dataset.told.exists, 20)
    ending = threading.Thread(target=loader.shutdown)
    ending.start()
    waiting.join(1)
    is_waiting = waiting.is_alive()
    dataset.released.touch()
    waiting.join(20)
    ending.join(20)
    assert len(got) == 1 and "ended by DataLoader.shutdown" in str(got[0])
    assert not is_waiting
