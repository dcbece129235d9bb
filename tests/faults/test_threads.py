"""Workers that are forked while another thread of the main process is in the middle of something."""

from __future__ import annotations

from faults.script import run_script


def test_a_fork_while_another_thread_has_its_first_batch(tmp_path):
    """What batches need is looked up once. A worker that is forked meanwhile has no thread to wait for."""
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
