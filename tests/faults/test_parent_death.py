"""The main process is killed: its workers end within a second, whatever they do at that moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from faults.proc import descendants, is_running, wait_until
from faults.script import run_script, start
from ringloader import DataLoader, _native

pytestmark = pytest.mark.rings_only

# For the system and the tests beside this one. Half a second is the workers' own.
ENOUGH_S = 10.0

BUSY = {
    "sleeps": "time.sleep(60)",
    "computes": "any(iter(int, 1))",
    "is in C, with the interpreter's lock": "ctypes.PyDLL(None).pause()",
    "blocks signals": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); time.sleep(60)",
    "catches everything": "hold_on()",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}

BODY = """
    import ctypes, threading
    from pathlib import Path
    from torch.utils.data import Dataset, IterableDataset
    from ringloader import Dispatch, WorkerPool

    def hold_on():
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass

    def note():
        Path({folder!r}, f"busy.{{os.getpid()}}").touch()

    class Busy(Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, index):
            if index >= 4:
                note()
                {busy}
            return torch.zeros(3)

    class Source:
        def __iter__(self):
            yield from range(8)
            note()
            {busy}

    def run():
        global loader, batches
        method = {method!r}
        if method == "pool":
            loader = DataLoader(Busy(), batch_size=1, worker_pool=WorkerPool(2))
        elif method == "dispatch":
            loader = DataLoader(Dispatch(Source()), batch_size=1, num_workers=2)
        else:
            loader = DataLoader(Busy(), batch_size=1, num_workers=2, multiprocessing_context=method)
        batches = iter(loader)
        for _ in range(4):
            next(batches)

    if __name__ == "__main__":
        # What it takes the system long to give back.
        large = os.memfd_create("large")
        os.posix_fallocate(large, 0, {large} + 1)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print("ready", flush=True)
        time.sleep(60)
"""


def busy_ones(folder: Path) -> list[int]:
    return [int(mark.suffix[1:]) for mark in folder.glob("busy.*")]


def ends_within(folder: Path, method: str, busy: str, expected: int, large: int = 0) -> None:
    body = BODY.format(folder=str(folder), method=method, busy=busy, large=large)
    program = start("ringloader", body, folder)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert wait_until(lambda: len(busy_ones(folder)) == expected, 20)
    # The thread that started them has ended, and they live.
    time.sleep(0.3)
    workers = descendants(program.pid)
    assert set(busy_ones(folder)) <= workers and all(map(is_running, busy_ones(folder)))
    program.kill()
    program.communicate()
    gone = wait_until(lambda: not any(map(is_running, workers)), ENOUGH_S)
    left = [pid for pid in workers if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert gone, f"{left} outlive their parent"


@pytest.mark.parametrize("busy", BUSY)
def test_workers_that_are_busy(tmp_path: Path, busy: str) -> None:
    ends_within(tmp_path, "fork", BUSY[busy], 2)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "pool"])
@pytest.mark.parametrize(
    "busy",
    [
        "sleeps",
        pytest.param("is stopped", marks=pytest.mark.slow),
        pytest.param("computes", marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_start_them(tmp_path: Path, method: str, busy: str) -> None:
    ends_within(tmp_path, method, BUSY[busy], 2)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver", "spawn"])
def test_a_main_process_that_ends_slowly(tmp_path: Path, method: str) -> None:
    large = 3 << 30
    if _native.available_memory() < 2 * large:
        pytest.skip("there is too little memory")
    ends_within(tmp_path, method, BUSY["sleeps"], 2, large)


def test_a_dispatching_process(tmp_path: Path) -> None:
    ends_within(tmp_path, "dispatch", BUSY["computes"], 1)


def test_which_signal_a_worker_handles() -> None:
    def handled() -> set[int]:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "SigCgt" in line]
        return {number for number in range(1, 65) if int(line.split()[1], 16) >> (number - 1) & 1}

    class Handled(Dataset[set[int]]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> set[int]:
            return handled()

    (found,) = DataLoader(Handled(), batch_size=None, num_workers=1, collate_fn=lambda sample: sample)
    ours = {number for number in found - handled() if number == signal.SIGCONT or number >= signal.SIGRTMIN}
    assert ours == {signal.SIGCONT}


def test_a_worker_has_time_to_end_in_its_own_way(tmp_path: Path) -> None:
    body = f"""
        from multiprocessing.util import Finalize
        from pathlib import Path
        from torch.utils.data import Dataset

        class Tidies(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                mark = Path({str(tmp_path)!r}, f"tidied.{{index}}")
                # As multiprocessing ends a process.
                Finalize(None, lambda: (time.sleep(0.1), mark.touch()), exitpriority=1)
                return index

        batches = iter(DataLoader(Tidies(), batch_size=1, num_workers=2))
        next(batches), next(batches)
        print("ready", flush=True)
        time.sleep(60)
    """
    program = start("ringloader", body, tmp_path)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.kill()
    program.communicate()
    assert wait_until(lambda: len(list(tmp_path.glob("tidied.*"))) == 2, ENOUGH_S)


def test_a_sleep_in_a_worker_is_as_long_as_it_was_where_the_thread_that_forked_ends(tmp_path: Path) -> None:
    body = """
        import threading
        from torch.utils.data import Dataset

        class Sleeps(Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                begun = time.monotonic()
                time.sleep(1)
                return time.monotonic() - begun

        def run():
            global batches
            batches = iter(DataLoader(Sleeps(), batch_size=1, num_workers=2))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print([1 <= float(slept) < 20 for slept in batches], flush=True)
    """
    program = start("ringloader", body, tmp_path)
    out, err = program.communicate(timeout=40)
    assert out == "[True, True]\n", err


def test_the_end_of_the_thread_that_forked_runs_no_handler_of_the_program(tmp_path: Path) -> None:
    body = """
        import threading

        seen = []
        signal.signal(signal.SIGCONT, lambda *_: seen.append(os.getpid()))

        class Seen(Numbers):
            def __getitem__(self, index):
                time.sleep(0.2)
                return list(seen)

        def run():
            global batches
            batches = iter(DataLoader(Seen(5), batch_size=None, num_workers=1, collate_fn=list))
            # By then the worker has begun.
            next(batches)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print(list(batches), seen, flush=True)
    """
    ended = run_script("ringloader", body, tmp_path)
    assert ended.out == "[[], [], [], []] []\n", ended.err


def test_no_worker_writes_to_its_parents_wake_up_descriptor(tmp_path: Path) -> None:
    """Such a descriptor is asyncio's, which would run handlers of the main process for a worker's signals."""
    body = f"""
        from ringloader import WorkerPool

        class Signalled(Numbers):
            def __getitem__(self, index):
                os.kill(os.getpid(), signal.SIGUSR1)
                # One that a worker sets is its own, and none of the pool's next iterator.
                return signal.set_wakeup_fd(own)

        def begin(worker):
            signal.set_wakeup_fd(own)

        theirs, ours = os.pipe()
        os.set_blocking(ours, False)
        os.set_blocking(theirs, False)
        own = os.open({str(tmp_path / "written")!r}, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(ours)
        with WorkerPool(1) as pool:
            for more in ({{}}, {{"worker_pool": pool}}, {{"worker_pool": pool}}, {{"worker_init_fn": begin}}):
                found = list(DataLoader(Signalled(2), batch_size=None, num_workers=1, collate_fn=int, **more))
                print(found == [own if "worker_init_fn" in more else -1, own])
        assert signal.set_wakeup_fd(-1) == ours
        try:
            print(os.read(theirs, 100))
        except BlockingIOError:
            print("nothing")
    """
    ended = run_script("ringloader", body, tmp_path)
    assert ended.out.split() == ["True"] * 4 + ["nothing"], ended.err
    assert len((tmp_path / "written").read_bytes()) == 5
