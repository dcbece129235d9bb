"""The source of a scheduler's indices: a native stream over what torch draws, or Python's next."""

import gc
import weakref

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from ringloader import _native
from ringloader._sources import samplers


class Callbacks:
    """Answers to the scheduler, as an iterator gives them for reading indices."""

    def __init__(self, indices=()):
        self._indices = iter(indices)

    def _next_index(self):
        return next(self._indices)


@pytest.fixture
def read():
    """Reads one index through a scheduler, as it arrives at a worker; None at the end."""
    engine = _native.Engine(1, 8, 64 << 20)
    port = _native.Port.inherit(engine, 0)
    schedulers = {}

    def read(source, callbacks):
        if source not in schedulers:
            arguments = (engine, source, 1, 8, _native.Order.IN_ORDER, False, 0.0)
            schedulers[source] = _native.Scheduler(*arguments)
        schedulers[source].put_index(callbacks)
        received = port.ahead()
        return None if received is None else received[0][1]

    yield read
    engine.close()


class Opened:
    """Opens what it is given, in turn: a stream, None, or an error."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def open(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def sequential(n):
    return _native.Stream(iter([range(n)]), _native.BatchRule(2, False))


def test_python_is_asked_for_each_index(read):
    source = _native.IndexSource.python()
    callbacks = Callbacks([3, [1, 2], "name"])
    assert [read(source, callbacks) for _ in range(4)] == [3, [1, 2], "name", None]


def test_the_stream_is_opened_once_and_at_the_first_request(read):
    made = Opened(sequential(3))
    source = _native.IndexSource.native(made)
    assert len(made.outcomes) == 1
    assert [read(source, Callbacks()) for _ in range(3)] == [[0, 1], [2], None]


def test_what_opening_raises_is_raised_and_it_is_opened_again(read):
    source = _native.IndexSource.native(Opened(TypeError("no len"), sequential(1)))
    with pytest.raises(TypeError, match="no len"):
        read(source, Callbacks())
    assert read(source, Callbacks()) == [0]


def test_a_sampler_that_torch_refuses_is_left_to_python(read):
    source = _native.IndexSource.native(Opened(None))
    callbacks = Callbacks([[7], [8]])
    assert [read(source, callbacks) for _ in range(3)] == [[7], [8], None]


def test_a_changed_batch_size_is_seen_before_each_batch(read):
    sampler = BatchSampler(SequentialSampler(range(9)), 2, False)
    source = samplers.index_source(sampler)
    assert read(source, Callbacks()) == [0, 1]
    sampler.batch_size = 4
    assert read(source, Callbacks()) == [2, 3, 4, 5]


def test_a_new_epoch_has_a_source_of_its_own():
    engine = _native.Engine(1, 8, 64 << 20)
    port = _native.Port.inherit(engine, 0)
    sources = [_native.IndexSource.native(Opened(sequential(n))) for n in (4, 1)]
    scheduler = _native.Scheduler(engine, sources[0], 1, 8, _native.Order.IN_ORDER, False, 0.0)
    scheduler.put_index(Callbacks())
    scheduler.reset(sources[1])
    scheduler.put_index(Callbacks())
    assert [port.ahead()[0][1] for _ in range(2)] == [[0, 1], [0]]
    assert scheduler.positions().sent == 1
    engine.close()


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_source_in_a_cycle_is_collected(is_scheduled):
    """A sampler may refer to its loader, which refers to its iterator."""
    engine = _native.Engine(1, 8, 64 << 20)
    sampler = BatchSampler(SequentialSampler(range(9)), 2, False)
    source = samplers.index_source(sampler)
    kept = (engine, source, 1, 8, _native.Order.IN_ORDER, False, 0.0)
    if is_scheduled:
        sampler.cycle = _native.Scheduler(*kept)
        sampler.cycle.put_index(Callbacks())
    else:
        sampler.cycle = source
    gone = weakref.ref(sampler)
    del sampler, source, kept
    gc.collect()
    assert gone() is None
    engine.close()
