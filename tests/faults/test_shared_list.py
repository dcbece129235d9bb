"""``SharedList`` when something goes wrong: while it is built, in a reader, and with the system's limits."""

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import struct
import time
from pathlib import Path

import pytest

from faults import script
from ringloader import SharedList
from ringloader._native import SharedItems, available_memory

pytestmark = pytest.mark.rings_only


def held():
    """Descriptors and mappings of lists, in this process."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            names.append(f"{entry.readlink()} {entry.stat().st_ino}")
    names += Path("/proc/self/maps").read_text().splitlines()
    return [name for name in names if "ringloader-items" in name]


def test_an_interrupt_ends_the_building():
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    assert held() == []
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with pytest.raises(Interrupt):
            # No Python code of ours or of the iterator's, and no end.
            SharedList(itertools.repeat("x"))
        assert time.monotonic() - begin < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert held() == []


def test_an_error_in_mid_stream_leaves_nothing():
    def items():
        yield from (bytes(1000) for _ in range(3000))
        raise KeyError("the source")

    with pytest.raises(KeyError, match="the source"):
        SharedList(items())
    with pytest.raises(
        pickle.PicklingError, match="item 3000 of the list, of type function, cannot be pickled"
    ):
        SharedList(itertools.chain((bytes(1000) for _ in range(3000)), [lambda: 0]))
    assert held() == []


@pytest.mark.parametrize("size", [10, 3000])
def test_a_child_that_is_forked_while_it_is_built_cannot_go_on(size):
    numbers = range(3000)
    ours, theirs = os.pipe()
    child = None

    def items():
        nonlocal child
        for number in numbers:
            if number == 1500:
                child = os.fork()
            # The child writes other bytes than its parent.
            yield bytes([number % 251 if child else 255]) * size

    try:
        found = SharedList(items())
    except RuntimeError as error:
        if child == 0:
            os.write(theirs, str(error).encode())
            os._exit(7)
        raise
    except BaseException:
        if child == 0:
            os._exit(1)
        raise
    if child == 0:
        os._exit(2)
    assert os.waitpid(child, 0)[1] >> 8 == 7
    assert f"process {os.getpid()} builds this list" in os.read(ours, 4096).decode()
    assert [item[0] for item in found] == [255 if n < 1500 else n % 251 for n in numbers]
    assert all(item == item[:1] * size for item in found)
    os.close(ours)
    os.close(theirs)


def read_for_ever(items, pipe):
    pipe.send("reads")
    while True:
        for number, item in enumerate(items):
            assert item["number"] == number


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_reader_that_is_killed_takes_nothing_with_it(method):
    items = SharedList({"number": number} for number in range(10_000))
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=read_for_ever, args=(items, theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == "reads"
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [item["number"] for item in items] == list(range(10_000))
    assert any(str(os.fstat(items.fileno()).st_ino) in name for name in held())
    del items
    assert held() == []


def test_a_descriptor_that_other_code_has_closed():
    items = SharedList(["one", "two"])
    number = items.fileno()
    kept = os.dup(number)
    os.close(number)
    assert list(items) == ["one", "two"] and pickle.loads(pickle.dumps(items)) == items
    with pytest.raises(OSError, match="was closed") as closed:
        multiprocessing.get_context("spawn").Process(target=list, args=(items,)).start()
    assert closed.value.errno == errno.EBADF
    # Another file has the number now, as large and sealed.
    other = SharedList(["one", "TWO"])
    os.dup2(other.fileno(), number)
    with pytest.raises(OSError, match="another file's by now"):
        items.fileno()
    os.dup2(kept, number)
    assert items.fileno() == number
    os.close(kept)


def test_too_few_descriptors(tmp_path):
    ended = script.run_script(
        "ringloader",
        """
        import resource
        from ringloader import SharedList
        SharedList([1])
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(2)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            SharedList([1])
        except OSError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        print(list(SharedList([1])))
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["[Errno 24] memfd_create: Too many open files (os error 24)", "[1]"]


@pytest.mark.parametrize("item", ["bytes(300 << 20)", "'x' * (300 << 20)", "bytearray(300 << 20)"])
def test_an_item_for_which_there_is_no_address_space_is_a_memory_error(item, tmp_path):
    ended = script.run_script(
        "ringloader",
        f"""
        import resource
        from ringloader import SharedList
        SharedList([bytearray(1)])
        item = {item}
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), hard))
        try:
            SharedList([1, item])
        except (MemoryError, multiprocessing.context.ProcessError) as error:
            print("MemoryError", error)
        except Exception as error:
            print(type(error.__cause__).__name__, error)
        print(list(SharedList([1])))
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.err
    assert ended.out.startswith("MemoryError") and ended.out.endswith("[1]\n"), ended.out


def test_offsets_beyond_32_bits():
    # Sparse: what is never written takes no memory.
    end = 40 << 30
    fd = os.memfd_create("ringloader-items", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    text = b"\x05\x03far"
    # An item, a hole, an item, and no keys.
    starts = [0, 2, end - 5, end, end]
    for at, data in ((0, b"\x03\x0a"), (end - 5, text)):
        os.pwrite(fd, data, at)
    os.pwrite(fd, struct.pack("<6Q", *starts, 4), end)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    items = SharedList(SharedItems.attach(fd, 0, 1, 3))
    os.close(fd)
    assert items.nbytes > 40 << 30 and len(items) == 3
    assert (items[0], items[2], items[-1], items[::-2][0]) == (5, "far", "far", "far")


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.skipif(available_memory() < 15 << 30, reason="takes 5 GiB of memory")
def test_a_stream_of_more_than_4_gib():
    size, count = 64 << 20, 66

    def items():
        for number in range(count):
            yield bytes([number]) * size

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = SharedList(items())
    assert found.nbytes > 33 << 27
    # The item, its copy in the buffer, and what the interpreter keeps: kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    for number in (0, 63, 64, count - 1):
        assert found[number] == bytes([number]) * size
