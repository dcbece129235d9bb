"""A batch that was made and cannot be had here: its error comes in its turn, and the others come."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import struct

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from faults.proc import wait_until
from parity import harness
from parity.datasets import identity
from small_datasets import Made, SharedStream

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(120)]

LENGTH = 9
# Larger than half of a worker's share, so that a batch comes in memory of its own, as a descriptor.
ELEMENTS = 3 << 18
MAX_SHARED_BYTES = 8 << 20
WORKERS = 2


@pytest.fixture(params=harness.PATHS, autouse=True)
def path(request):
    with harness.taking(request.param):
        yield request.param


class Large(Dataset):
    """At one index it raises, if there is one."""

    def __init__(self, raises=None):
        self.raises = raises

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == self.raises:
            raise OSError(index)
        return torch.full((ELEMENTS,), index)


def no_descriptors():
    """Lets this process open no file; returns how to undo it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def steps(iterator, starve=None):
    """Returns what each `next` gives, to the end: a batch's number, or an error. One has no descriptors."""
    found = []
    while len(found) < 3 * LENGTH:
        undo = no_descriptors() if len(found) == starve else lambda: None
        try:
            found.append(int(next(iterator)[0]))
        except StopIteration:
            return found
        except OSError as error:
            # Else it keeps the iterator, and torch waits for the workers of one that is collected.
            found.append(error.with_traceback(None))
        finally:
            undo()
    raise AssertionError(found)


def wait_for_batches(iterator, count):
    assert wait_until(lambda: iterator._transport.engine.committed() >= count, 20)


def made(loader_class, dataset, **arguments):
    if loader_class is not torch.utils.data.DataLoader:
        arguments["max_shared_bytes"] = MAX_SHARED_BYTES
    return loader_class(dataset, batch_size=None, collate_fn=identity, **arguments)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "iterable"])
@pytest.mark.parametrize("persistent", [True, False])
def test_no_descriptor_is_left(loader_class, in_order, is_stream, persistent):
    """The error is raised at that place, as an error of the dataset is with torch."""
    arguments = {"in_order": in_order, "persistent_workers": persistent, "num_workers": WORKERS}
    loader = made(loader_class, SharedStream(Large()) if is_stream else Large(), **arguments)
    iterator = iter(loader)
    harness.assert_path(iterator, WORKERS)
    wait_for_batches(iterator, WORKERS)
    found = steps(iterator, 0)
    errors = [step for step in found if isinstance(step, OSError)]
    assert errors and all(error.errno == 24 for error in errors)
    assert len(found) == LENGTH
    if in_order:
        assert isinstance(found[0], OSError)
        assert all(isinstance(step, OSError) or step == number for number, step in enumerate(found))
    if not is_stream and in_order and len(errors) == 1:
        theirs = steps(iter(made(torch.utils.data.DataLoader, Large(0), **arguments)))
        assert [str(type(step)) for step in found] == [str(type(step)) for step in theirs]
        assert found[1:] == theirs[1:]
    del iterator
    for _ in range(2):
        again = steps(iter(loader))
        assert sorted(again) == list(range(LENGTH)) and (not in_order or again == sorted(again))


def test_no_descriptor_is_left_for_the_whole_epoch(loader_class):
    loader = made(loader_class, Large(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    undo = no_descriptors()
    try:
        found = steps(iterator)
    finally:
        undo()
    assert len(found) == LENGTH and all(isinstance(step, OSError) for step in found)
    del found
    assert steps(iter(loader)) == list(range(LENGTH))


def named(index):
    return {f"sample-{index}-of-many": torch.full((3000,), index)}


class Segment:
    """The shared memory of an iterator's workers, as a peer could write to it."""

    def __init__(self, iterator):
        self._fd = iterator._transport.engine.segment

    def _parts(self):
        begin, length = 0, os.fstat(self._fd).st_size
        while begin < length:
            try:
                begin = os.lseek(self._fd, begin, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(self._fd, begin, os.SEEK_HOLE)
            yield begin, os.pread(self._fd, end - begin, begin)
            begin = end

    def write(self, offset, content):
        page = offset - offset % mmap.PAGESIZE
        with mmap.mmap(self._fd, 2 * mmap.PAGESIZE, offset=page) as mapped:
            mapped[offset - page : offset - page + len(content)] = content

    def find(self, text):
        return [begin + data.find(text) for begin, data in self._parts() if text in data]

    def results(self):
        """Returns where the descriptors of batches lie, by task."""
        found = {}
        for begin, data in self._parts():
            for at in range(0, len(data) - 63, 8):
                words = struct.unpack_from("<8Q", data, at)
                if words[1] == 1 and words[5] > 0 and words[7] == fold(words[:7]):
                    found[words[0]] = begin + at
        return found


def fold(words):
    """MIRRORS rust/core/src/transport/message.rs::fold."""
    odd, all_bits = 0x9E3779B97F4A7C15, (1 << 64) - 1
    total = odd
    for word in words:
        total = (total ^ word) * odd & all_bits
        total = (total << 29 | total >> 35) & all_bits
    return total


def names(iterator):
    """Numbers of the batches, and the types of the errors between them."""
    found = []
    while len(found) < 3 * LENGTH:
        try:
            (name,) = next(iterator)
            found.append(int(name.split("-")[1]))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))
            # Else it keeps the iterator.
            error.__traceback__ = None
    raise AssertionError(found)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_table_that_is_corrupt(loader_class, in_order):
    loader = loader_class(
        Made(named, LENGTH),
        batch_size=None,
        collate_fn=identity,
        num_workers=1,
        in_order=in_order,
        persistent_workers=True,
    )
    iterator = iter(loader)
    segment = Segment(iterator)
    wait_for_batches(iterator, 2)
    (place,) = segment.find(b"sample-1-of-many")
    # No text in UTF-8.
    segment.write(place, b"\xff\xff")
    assert names(iterator) == [0, RuntimeError, *range(2, LENGTH)]
    del iterator
    assert names(iter(loader)) == list(range(LENGTH))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_descriptor_that_is_corrupt(loader_class, in_order):
    """Nobody can tell whose it is, nor what comes after: all calls say so, and none waits."""
    loader = loader_class(
        Made(named, LENGTH), batch_size=None, collate_fn=identity, num_workers=1, in_order=in_order
    )
    iterator = iter(loader)
    segment = Segment(iterator)
    wait_for_batches(iterator, 2)
    segment.write(segment.results()[1], b"\xff" * 8)
    assert list(next(iterator)) == ["sample-0-of-many"]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="corrupt") as told:
            next(iterator)
        told.value.__traceback__ = None
        del told
    del iterator
    gc.collect()


class Interrupts:
    """Ctrl-C, while the main process makes this object."""

    def __reduce__(self):
        return interrupt, ()


def interrupt():
    raise KeyboardInterrupt


def arrives_interrupted(index):
    return Interrupts() if index == 1 else index


@pytest.mark.parametrize("in_order", [True, False])
def test_an_interrupt_while_a_batch_arrives(loader_class, in_order):
    """The interrupt is raised at once; a caller that goes on is told what was lost, and gets the rest."""
    loader = loader_class(
        Made(arrives_interrupted, 4),
        batch_size=None,
        collate_fn=identity,
        num_workers=1,
        in_order=in_order,
        persistent_workers=True,
    )
    for _ in range(2):
        iterator = iter(loader)
        found = []
        while len(found) < 10:
            try:
                found.append(next(iterator))
            except StopIteration:
                break
            except BaseException as error:
                found.append(str(error) or type(error))
                error.__traceback__ = None
        lost = "a batch was lost when KeyboardInterrupt interrupted its arrival"
        assert found == [0, KeyboardInterrupt, lost, 2, 3]


def test_an_error_leaves_no_cycle(loader_class):
    """In which the iterator would hang until garbage is collected."""
    gc.disable()
    try:
        iterator = iter(made(loader_class, Large(), num_workers=1))
        process = iterator._workers[0]
        found = steps(iterator, 1)
        assert isinstance(found[1], OSError)
        del found, iterator
        assert not process.is_alive()
    finally:
        gc.enable()
