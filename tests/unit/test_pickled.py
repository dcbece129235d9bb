"""An interrupt at each bytecode of a pickle for all workers leaves no memory and no descriptor."""

from __future__ import annotations

import gc
import weakref
from multiprocessing import context

import numpy as np
import pytest

from faults.interrupts import InterruptError, Interrupting
from faults.proc import descriptors
from ringloader._start import fallback, pickled, shared_reductions

FILES = {module.__file__ for module in (pickled, shared_reductions, fallback, weakref)}


def opened(before):
    """Returns the descriptors that are new."""
    gc.collect()
    return {fd: target for fd, target in descriptors().items() if fd not in before}


@pytest.mark.rings_only
def test_an_interrupt_at_each_bytecode_leaves_nothing():
    thing = {"array": np.ones(1 << 16), "list": list(range(10))}
    pickled.for_all(thing).close()
    with Interrupting(FILES) as counting:
        pickled.for_all(thing).close()
    before = descriptors()
    for number in range(counting.seen):
        with pytest.raises(InterruptError), Interrupting(FILES, number):
            pickled.for_all(thing).close()
        # An interrupt just before it is put back leaves it, in multiprocessing's own starts as well.
        context.set_spawning_popen(None)
        assert opened(before) == {}, number
    assert counting.seen > 100
