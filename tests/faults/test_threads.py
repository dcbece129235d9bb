"""Workers that are forked while another thread of the main process is in the middle of something."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from faults.script import run_script
from ringloader import DataLoader
from ringloader._start import processes


def test_a_fork_while_another_thread_has_its_first_batch(tmp_path):
    """Batches look up what they need once. A worker that is forked meanwhile has no thread to wait for."""
    ended = run_script(
        "ringloader",
        """
        import threading
        from importlib.machinery import SourceFileLoader
        import ringloader

        looks, forked, main = threading.Event(), threading.Event(), os.getpid()
        execute = SourceFileLoader.exec_module

        def slowly(self, module):
            if module.__name__ == "ringloader._common.pickling" and os.getpid() == main:
                looks.set()
                forked.wait(1)
            execute(self, module)

        SourceFileLoader.exec_module = slowly
        one, two = (DataLoader(Numbers(2), num_workers=1, batch_size=None, timeout=10) for _ in range(2))
        thread = threading.Thread(target=list, args=(one,))
        thread.start()
        assert looks.wait(20)
        iterator = iter(two)
        forked.set()
        assert [int(batch[0]) for batch in iterator] == [0, 1]
        thread.join()
        print("done")
        """,
        tmp_path,
    )
    assert (ended.code, ended.out) == (0, "done\n"), ended.err


class Drawing(torch.utils.data.Sampler):
    """Draws while its iterator is made, and says when."""

    def __init__(self, log, may_end):
        self.log, self.may_end = log, may_end

    def __iter__(self):
        self.log.append("draws")
        self.may_end.wait(0.2)
        self.log.append("has drawn")
        return iter([0, 1])

    def __len__(self):
        return 2


@pytest.mark.rings_only
def test_no_worker_is_forked_while_another_thread_makes_an_iterator(monkeypatch):
    """torch draws in it without the interpreter lock, and a worker may inherit a generator's lock, held."""
    log, forked = [], threading.Event()
    fork = os.fork

    def noted():
        log.append("fork")
        if threading.current_thread() is not threading.main_thread():
            forked.set()
        return fork()

    monkeypatch.setattr(os, "fork", noted)
    begun = threading.Event()

    def other():
        begun.wait(10)
        list(DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"))

    class First(Drawing):
        def __iter__(self):
            begun.set()
            return super().__iter__()

    thread = threading.Thread(target=other)
    thread.start()
    loader = DataLoader([1, 2], sampler=First(log, forked), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 2
    thread.join()
    assert log.count("fork") == 2
    assert log.index("has drawn") == log.index("draws") + 1


@pytest.mark.rings_only
@pytest.mark.limit(120)
def test_a_sampler_that_waits_for_another_threads_loader_gets_it(monkeypatch):
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.2)
    found = []

    class Waits(torch.utils.data.Sampler):
        def __iter__(self):
            thread = threading.Thread(target=lambda: found.extend(DataLoader([3, 4], num_workers=1)))
            thread.start()
            thread.join()
            return iter([0, 1])

        def __len__(self):
            return 2

    assert len(list(DataLoader([1, 2], sampler=Waits(), num_workers=1))) == 2
    assert torch.cat(found).tolist() == [3, 4]
