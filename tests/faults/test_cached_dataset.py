"""``CachedDataset`` in a file, and where processes die: never wrong data, nobody waits, nothing is left."""

import fcntl
import functools
import multiprocessing
import os
import random
import signal
import struct
import sys
import textwrap
import time

import pytest
import torch
from torch.utils.data import Dataset

import ringloader
from faults.script import run_script
from faults.test_limits import NAMESPACE
from ringloader import CachedDataset
from small_datasets import Made

pytestmark = pytest.mark.rings_only

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _without_threads_of_torch():
    """A forked child has none, and would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rows(Dataset):
    """Samples of several sizes, whose bytes say which they are; counts how often each was made."""

    def __init__(self, length):
        self.length = length
        self.asked = torch.zeros(max(length, 1), dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked[index] += 1
        return expected(index)


def expected(index):
    size = (1, 10, 700, 3000, 40_000)[index % 5]
    return torch.arange(index, index + size, dtype=torch.int32), f"sample {index}", index


def check(sample, index):
    image, name, number = sample
    theirs = expected(index)
    assert torch.equal(image, theirs[0]) and (name, number) == theirs[1:]


def check_all(cached):
    for index in range(len(cached)):
        check(cached[index], index)


def test_the_next_run_finds_the_file_again(tmp_path):
    path = tmp_path / "cache"
    check_all(CachedDataset(Rows(10), path=path, version="été 1"))
    again = Rows(10)
    check_all(CachedDataset(again, path=str(path), version="été 1"))
    assert again.asked.sum() == 0
    bound = CachedDataset(again, 5, path=os.fsencode(path), version="été 1")
    check_all(bound)
    assert bound.stats()["max_bytes"] == 5 and bound.stats()["items"] == 10


def test_another_dataset_is_refused_with_both(tmp_path):
    path = tmp_path / "cache"
    CachedDataset(Rows(10), path=path, version="one")
    for dataset, version in ((Rows(10), "two"), (Rows(9), "one"), (Rows(10), "")):
        with pytest.raises(ValueError) as raised:
            CachedDataset(dataset, path=path, version=version)
        text = str(raised.value)
        assert repr(str(path)) in text and '"one"' in text and f'"{version}"' in text
        assert "of length 10" in text and f"of length {len(dataset)}" in text


def test_a_signal_ends_the_wait_for_a_file_that_another_process_makes(tmp_path):
    """The lock of another open file excludes as another process's does."""
    handled = []

    def interrupt(signum, _frame):
        handled.append(signum)
        if len(handled) == 2:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 2**63 - 2, 1, 0)
    try:
        with (tmp_path / "cache").open("w+b") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            with pytest.raises(KeyboardInterrupt):
                CachedDataset(Rows(10), path=tmp_path / "cache")
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled == [signal.SIGALRM] * 2, "a handler that returns is no reason to give up"
    check_all(CachedDataset(Rows(10), path=tmp_path / "cache"))


def test_a_file_that_cannot_be_used_is_an_error_at_once(tmp_path):
    dataset = Rows(10)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"something else, which stays" * 100)
    newer = tmp_path / "newer"
    CachedDataset(dataset, path=newer)
    with newer.open("r+b") as file:
        file.seek(8)
        file.write(bytes([99]))
    os.mkfifo(tmp_path / "fifo")
    for name, text in [
        ("foreign", "no file of cached samples"),
        ("newer", "format 99"),
        ("fifo", "no regular file"),
    ]:
        with pytest.raises(ValueError, match=text) as raised:
            CachedDataset(dataset, path=tmp_path / name)
        assert repr(str(tmp_path / name)) in str(raised.value)
    assert foreign.read_bytes() == b"something else, which stays" * 100
    missing = tmp_path / "missing" / "cache"
    for path, error in [(missing, FileNotFoundError), (tmp_path, IsADirectoryError)]:
        with pytest.raises(error) as raised:
            CachedDataset(dataset, path=path)
        assert raised.value.filename == str(path)
    # An empty file is a new one, as that of `tempfile`.
    (tmp_path / "empty").touch()
    check_all(CachedDataset(dataset, path=tmp_path / "empty"))


def test_no_right_to_write_is_an_error_at_once(tmp_path):
    # Not in pytest's folder: each pytest that starts takes the rights of others from it again.
    program = """
        import pathlib, tempfile
        import ringloader
        folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(folder.name) / "cache"
        path.touch(mode=0o444)
        path.parent.chmod(0o755)
        # Another user may have no right to read the package: all of it is imported before.
        ringloader.CachedDataset([1, 2], path=path.with_name("own"))
        if os.getuid() == 0:
            os.seteuid(65534)
        try:
            ringloader.CachedDataset([1, 2], path=path)
        except PermissionError as error:
            print(error.filename == str(path))
        if os.getuid() == 0:
            os.seteuid(0)
        """
    ended = run_script("ringloader", program, tmp_path)
    assert ended.out == "True\n", ended.err


def _open(path, dataset, barrier, results):
    barrier.wait(20)
    try:
        check_all(CachedDataset(dataset, path=path, version="same"))
        results.put(None)
    except BaseException as error:
        results.put(repr(error))


def test_ranks_that_open_a_new_path_at_once_share_it(tmp_path):
    dataset = Rows(40)
    for attempt in range(5):
        barrier, results = fork.Barrier(3), fork.SimpleQueue()
        arguments = tmp_path / str(attempt), dataset, barrier, results
        ranks = [fork.Process(target=_open, args=arguments) for _ in range(3)]
        for rank in ranks:
            rank.start()
        assert [results.get() for _ in ranks] == [None] * 3
        for rank in ranks:
            rank.join()
        assert CachedDataset(dataset, path=tmp_path / str(attempt), version="same").stats()["items"] == 40


def test_a_flipped_bit_or_a_missing_end_is_made_again(tmp_path):
    path = tmp_path / "cache"
    check_all(CachedDataset(Rows(30), path=path))
    whole = path.read_bytes()
    chance = random.Random(1)
    records = 8192
    for _ in range(60):
        damaged = bytearray(whole)
        kind = chance.randrange(4)
        if kind == 0:
            # Anywhere among the records.
            damaged[chance.randrange(records, len(whole))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            # A word of the table: another sample's place, a wild one, or nothing.
            at = 4096 + 8 * chance.randrange(30)
            other = whole[4096:4104]
            damaged[at : at + 8] = chance.choice(
                [other, os.urandom(8), bytes(8), b"\xff" * 8, (1 << 62).to_bytes(8, "little")]
            )
        elif kind == 2:
            # Words of the header that say nothing.
            at = 64 + 8 * chance.randrange(3)
            damaged[at : at + 8] = chance.choice([os.urandom(8), bytes(8), b"\xff" * 8])
        else:
            damaged = damaged[: chance.randrange(records, len(whole))]
        path.write_bytes(damaged)
        dataset = Rows(30)
        cached = CachedDataset(dataset, path=path)
        for _ in range(2):
            check_all(cached)
        if kind in (0, 1):
            assert dataset.asked.sum() <= 2
        del cached


def _cut_off(path, length):
    dataset = Rows(30)
    cached = CachedDataset(dataset, path=path)
    check_all(cached)
    os.truncate(path, length)
    for _ in range(2):
        check_all(cached)
    assert dataset.asked.max() <= 2
    # What was made again is kept, for the next run too.
    check_all(CachedDataset(dataset, path=path))
    assert dataset.asked.max() <= 2 and cached.stats()["items"] == 30


@pytest.mark.parametrize("length", [0, 20, 4095, 4096, 4200, 8192, 50_000, 1 << 30])
def test_a_file_that_is_cut_off_in_use_is_made_again(tmp_path, length):
    """Its pages are not mapped, so no access is a SIGBUS."""
    child = fork.Process(target=_cut_off, args=(tmp_path / "cache", length))
    child.start()
    child.join()
    assert child.exitcode == 0


def _truncate_again_and_again(path, stop):
    chance = random.Random(3)
    while not stop.wait(0.002):
        os.truncate(path, chance.choice([0, 4096, chance.randrange(200_000)]))


def test_a_file_that_is_cut_off_again_and_again_gives_right_samples(tmp_path):
    cached = CachedDataset(Rows(30), path=tmp_path / "cache")
    stop = fork.Event()
    cutting = fork.Process(target=_truncate_again_and_again, args=(tmp_path / "cache", stop))
    readers = [fork.Process(target=_visit, args=(cached, [*range(30)] * 40)) for _ in range(2)]
    for process in (cutting, *readers):
        process.start()
    for reader in readers:
        reader.join()
    stop.set()
    cutting.join()
    assert [process.exitcode for process in (cutting, *readers)] == [0, 0, 0]
    check_all(cached)
    cached.clear()
    for _ in range(2):
        check_all(CachedDataset(Rows(30), path=tmp_path / "cache"))


def test_a_full_disk_is_a_full_cache(tmp_path):
    program = f"""
        import resource, ringloader
        from faults.test_cached_dataset import Rows, check_all
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        dataset = Rows(30)
        cached = ringloader.CachedDataset(dataset, path={str(tmp_path / "cache")!r})
        for _ in range(2):
            check_all(cached)
        stats = cached.stats()
        print(stats["full"], 0 < stats["items"] < 30, dataset.asked.eq(1).sum().item() == stats["items"])
        cached.clear()
        check_all(cached)
        many = ringloader.CachedDataset(range(10**4), path={str(tmp_path / "many")!r})
        assert all(many[index] == index for index in range(0, 10**4, 10))
        print(many.stats()["items"], many.stats()["full"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            ringloader.CachedDataset(dataset, path={str(tmp_path / "header")!r})
        except OSError as error:
            print(error.filename, os.path.getsize(error.filename))
        """
    ended = run_script("ringloader", program, tmp_path)
    assert ended.out == f"True True True\n1000 False\n{tmp_path / 'header'} 0\n", ended.err


def numbered(index):
    return torch.tensor([index])


@pytest.mark.parametrize("has_path", [False, True])
def test_a_long_dataset_takes_little_until_samples_are_kept(tmp_path, has_path):
    chance, length = random.Random(3), 10**8
    indices = [0, length - 1, *chance.sample(range(1, 10**6), 3000)]
    cached = CachedDataset(Made(numbered, length), path=tmp_path / "cache" if has_path else None)
    file = cached._samples.filenos()[-1]
    assert os.fstat(file).st_blocks * 512 <= 16384
    for _ in range(2):
        assert all(cached[index].item() == index for index in indices)
    stats = cached.stats()
    assert stats["items"] == len(indices) and stats["misses"] == len(indices)
    words = 8 * 10**6 + (64 << 10)
    assert os.fstat(file).st_blocks * 512 <= stats["bytes"] + words and stats["bytes"] < 400 * len(indices)
    cached.clear()
    assert os.fstat(file).st_blocks * 512 <= (16384 if has_path else words)
    bound = CachedDataset(Made(numbered, length), 100_000)
    assert all(bound[index].item() == index for index in indices)
    stats = bound.stats()
    assert stats["full"] and stats["bytes"] <= 100_000 and stats["items"] > 300
    assert CachedDataset(Made(numbered, length), 4000)[5].item() == 5


def _keep(cached, seed):
    """Keeps samples, some of which others keep at the same moment."""
    chance = random.Random(seed)
    for _ in range(3):
        indices = list(range(len(cached)))
        chance.shuffle(indices)
        assert all(cached[index].item() == index for index in indices)


@pytest.mark.parametrize("has_path", [False, True])
def test_processes_that_keep_samples_at_once_keep_each_once(tmp_path, has_path):
    cached = CachedDataset(Made(numbered, 4096), path=tmp_path / "cache" if has_path else None)
    processes = [fork.Process(target=_keep, args=(cached, seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert cached.stats()["items"] == 4096


_HEADER_BITS = 8 * 4096


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 20))]
)
def test_a_flipped_bit_of_the_header_is_found(tmp_path, first):
    """The file is refused with its name, or the bit says nothing."""
    path = tmp_path / "cache"
    check_all(CachedDataset(Rows(7), path=path, version="one"))
    whole = path.read_bytes()
    outcomes = {"refused": 0, "as it was": 0}
    # Each bit that says something, and some of the others.
    bits = [*range(first, 8 * 40, 20), *range(8 * 1024 + first, 8 * 1027, 20)]
    bits += range(8 * 40 + first, _HEADER_BITS, 20 * 50)
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        dataset = Rows(7)
        try:
            cached = CachedDataset(dataset, path=path, version="one")
        except ValueError as error:
            assert str(path) in str(error) and bit // 64 in (0, 1, 2, 3, 4, 128), (bit, error)
            outcomes["refused"] += 1
            continue
        outcomes["as it was"] += 1
        check_all(cached)
        assert cached.stats()["items"] == 7 and dataset.asked.sum() == 0, bit
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("bound", [None, 2 << 20])
def test_a_small_file_system_keeps_what_it_has_room_for(tmp_path, bound):
    program = NAMESPACE + textwrap.dedent(f"""
        import ringloader
        from faults.test_cached_dataset import Rows, check_all
        mount({str(tmp_path)!r}, 3 << 20)
        dataset = Rows(100)
        cached = ringloader.CachedDataset(dataset, {bound}, path={str(tmp_path / "cache")!r})
        check_all(cached)
        stats = cached.stats()
        assert 1 << 20 < stats["max_bytes"] <= 2 << 20, stats
        assert 1 << 19 < stats["bytes"] <= 2 << 20, stats
        assert stats["items"] > 20 and stats["full"], stats
        check_all(cached)
        """)
    (tmp_path.parent / "program").mkdir(exist_ok=True)
    ended = run_script("ringloader", program, tmp_path.parent / "program")
    if "skip" in ended.out:
        pytest.skip(ended.out)
    assert ended.code == 0, ended.err


class Pickled:
    """Is pickled and unpickled by code of Python's."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Pickled, (self.value,)


class Values(Rows):
    def __getitem__(self, index):
        self.asked[index] += 1
        return Pickled(index)


class StopError(Exception):
    """As a notebook's stop button, or a timeout by a signal, raises it between any two instructions."""


def interrupted(call, after):
    """Raises an error after so many instructions of ``call``, and of what it calls. False: it ends before."""
    left = after

    def trace(frame, event, _argument):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise StopError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except StopError:
        return True
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize("has_path", [False, True])
def test_an_interrupt_anywhere_loses_no_sample(tmp_path, has_path):
    dataset = Values(400)
    cached = CachedDataset(dataset, path=tmp_path / "cache" if has_path else None)
    read = CachedDataset(dataset)
    read[0]
    making = reading = 0
    while interrupted(functools.partial(cached.__getitem__, making), making):
        making += 1
    while interrupted(lambda: read[0], reading):
        reading += 1
        assert read._kept(0).value == 0
    assert making > 50 and reading > 20
    # Another process can keep each of them, and this one too.
    child = fork.Process(target=lambda: [cached[index] for index in range(0, making, 2)])
    child.start()
    child.join()
    assert child.exitcode == 0
    assert all(cached[index].value == index for index in range(making))
    assert cached.stats()["items"] == making + 1
    asked = dataset.asked.clone()
    assert all(cached[index].value == index for index in range(making))
    assert torch.equal(dataset.asked, asked)


class Mortal(Rows):
    """Its first call for some samples kills the process."""

    def __init__(self, length, deadly):
        super().__init__(length)
        self.deadly = deadly

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index in self.deadly and self.asked[index] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


def test_a_worker_that_dies_while_it_makes_a_sample_blocks_nobody(tmp_path):
    for path in (None, tmp_path / "cache"):
        dataset = Mortal(40, {3, 17, 18})
        cached = CachedDataset(dataset, path=path)
        loader = ringloader.DataLoader(cached, 2, num_workers=2, collate_fn=list, restart_workers=5)
        assert [label for batch in loader for *_, label in batch] == list(range(40))
        # A batch that died is made again as a whole; what was kept of it is read.
        assert dataset.asked.tolist() == [2 if index in dataset.deadly else 1 for index in range(40)]
        assert cached.stats()["items"] == 40
        check_all(cached)


def _storm(cached, seed, clears):
    chance = random.Random(seed)
    while True:
        index = chance.randrange(len(cached))
        check(cached[index], index)
        if clears and chance.random() < 0.01:
            cached.clear()


@pytest.mark.parametrize("has_path", [False, True])
@pytest.mark.parametrize("bound", [None, 200_000])
def test_storms_of_kills_leave_every_kept_sample_right(tmp_path, has_path, bound):
    dataset = Rows(50)
    cached = CachedDataset(dataset, bound, path=tmp_path / "cache" if has_path else None)
    chance = random.Random(7)
    until = time.monotonic() + 1.5
    workers = {}
    kills = 0
    try:
        while time.monotonic() < until or kills < 5:
            while len(workers) < 3:
                worker = fork.Process(target=_storm, args=(cached, chance.random(), kills % 2 == 0))
                worker.start()
                workers[worker.pid] = worker
            time.sleep(chance.random() * 0.04)
            worker = workers.pop(chance.choice(list(workers)))
            assert worker.exitcode is None, "a worker found a sample wrong, or raised"
            worker.kill()
            worker.join()
            kills += 1
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()
    for _ in range(2):
        check_all(cached)
    stats = cached.stats()
    assert bound is None or stats["bytes"] <= bound
    if bound is None:
        asked = dataset.asked.clone()
        check_all(cached)
        assert torch.equal(dataset.asked, asked) and stats["items"] == 50


def _visit(cached, indices):
    for index in indices:
        check(cached[index], index)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))]
)
def test_any_dataset_bound_number_of_processes_and_path(tmp_path, seed):
    """Every byte of every sample is compared; each is made no more often than it must be."""
    chance = random.Random(seed)
    length = chance.choice([1, 2, 7, 40, 90])
    whole = sum(4 * len(expected(index)[0]) + 700 for index in range(length))
    bound = chance.choice([None, None, 0, whole // 2, whole])
    path = chance.choice([None, tmp_path / "cache"])
    dataset = Rows(length)
    cached = CachedDataset(dataset, bound, path=path, version=str(seed))
    for _ in range(chance.choice([1, 2, 4])):
        if path and chance.random() < 0.3:
            cached = CachedDataset(dataset, bound, path=path, version=str(seed))
        if chance.random() < 0.2:
            cached.clear()
        made = dataset.asked.clone()
        kept = torch.tensor([cached._samples.get(index, None) is not None for index in range(length)])
        processes = []
        # Each process has indices of its own, in any order, and some that all have.
        shared = chance.sample(range(length), min(length, 3))
        count = chance.choice([1, 2, 3])
        for rank in range(count):
            indices = [*range(rank, length, count), *shared, *range(rank, length, count)]
            chance.shuffle(indices)
            processes.append(fork.Process(target=_visit, args=(cached, indices)))
            processes[-1].start()
        killed = chance.choice(processes) if chance.random() < 0.4 else None
        if killed:
            time.sleep(chance.random() * 0.01)
            killed.kill()
        for process in processes:
            process.join(30)
            # No queue between them: whoever is killed while it has the lock of one keeps it.
            assert process.exitcode == 0 or (process is killed and process.exitcode == -signal.SIGKILL)
        if bound is None:
            # Once if it was not kept, and once more after a death; at each visit while another makes it.
            most = torch.full((length,), 1)
            most[shared] = count + 2
            most = (most + (killed is not None)) * ~kept
            assert (dataset.asked - made <= most).all(), (dataset.asked - made).tolist()
    _ = [check(cached[index], index) for index in range(length)]
    before = dataset.asked.clone()
    check_all(cached)
    again = (dataset.asked - before).sum().item()
    stats = cached.stats()
    assert again == length - stats["items"]
    if bound is None:
        assert stats["items"] == length and not stats["full"]
    else:
        assert stats["bytes"] <= bound
