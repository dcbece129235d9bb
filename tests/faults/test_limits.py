"""Limits of a process and of a system: what works within them, and what errors name. docs/limits.md."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from faults.script import run_script
from ringloader._log import mib

pytestmark = pytest.mark.rings_only

# The main process's ends of one worker: its eventfd, socket and pidfd, and two pipes of multiprocessing's.
FDS_PER_WORKER = 5
# By start method: the process object of a worker from the spawn server has a pidfd of its own, since the
# server, which tells its end, may be killed.
MORE_FDS = {"fork": 0, "forkserver": 0, "spawn": 1}
# Of each loader: memory, watch, bell and its own pidfd; and what a start has open for a moment.
FDS_PER_LOADER = 4


BEGIN = """
import resource
import ringloader

def opened(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))

"""


def ended_well(body: str, folder: Path) -> str:
    ended = run_script("ringloader", BEGIN + textwrap.dedent(body), folder)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_descriptors_of_a_worker(method: str, tmp_path: Path) -> None:
    """None that the other side owns stays open."""
    out = ended_well(
        f"""
        class Opened(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return opened()

        def more(workers):
            loader = DataLoader(
                Opened(), num_workers=workers, multiprocessing_context="{method}", persistent_workers=True
            )
            before = opened()
            iterator = iter(loader)
            list(iterator)
            more = opened() - before
            print("theirs", max(opened(process.pid) for process in iterator._workers))
            return more, loader

        if __name__ == "__main__":
            # What multiprocessing starts once.
            more(1)
            few, one = more(2)
            many, other = more(6)
            print("few", few, "many", many)
        """,
        tmp_path,
    )
    found = re.search(r"few (\d+) many (\d+)", out)
    assert found
    few, many = map(int, found.groups())
    each = FDS_PER_WORKER + MORE_FDS[method]
    assert many - few == 4 * each
    assert few == FDS_PER_LOADER + 2 * each


@pytest.mark.limit(300)
@pytest.mark.parametrize(("method", "workers"), [("fork", 64), ("spawn", 6)])
def test_two_loaders_of_many_persistent_workers(method: str, workers: int, tmp_path: Path) -> None:
    """Of 64 each within the usual 1,024; of other methods fewer, within as much less."""
    limit = 1024 if workers == 64 else 2 * workers * (FDS_PER_WORKER + 1) + 40
    out = ended_well(
        f"""
        import warnings
        from torch.utils.data import TensorDataset

        if __name__ == "__main__":
            warnings.simplefilter("ignore")
            resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
            loaders = [
                DataLoader(
                    TensorDataset(torch.arange(256)), batch_size=2, num_workers={workers},
                    persistent_workers=True, multiprocessing_context="{method}",
                )
                for _ in range(2)
            ]
            for _ in range(2):
                for loader in loaders:
                    assert torch.cat([batch for batch, in loader]).tolist() == list(range(256))
                    assert ringloader.report(loader).path == "native"
            assert all(
                process.is_alive() for loader in loaders for process in loader._iterator._workers
            )
            print("opened", opened())
        """,
        tmp_path,
    )
    assert int(out.split()[-1]) <= 2 * (workers * FDS_PER_WORKER + FDS_PER_LOADER) + 20


def test_batches_of_many_tensors_with_few_descriptors(tmp_path: Path) -> None:
    """A batch takes none, however many tensors it has, and whether it is held; torch's takes one for each."""
    body = """
        class Many(torch.utils.data.Dataset):
            def __len__(self):
                return 40
            def __getitem__(self, index):
                # Whole, and too large for the slots: in memory of its own.
                size = 4_000_000 if index == 20 else 1000
                return [torch.full((size // 100,), index * 100 + tensor) for tensor in range(100)]

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        loader = DataLoader(Many(), num_workers=2, batch_size=None, max_shared_bytes=20 << 20)
        held = list(loader)
        for index, batch in enumerate(held):
            assert len(batch) == 100
            for tensor, found in enumerate(batch):
                assert bool((found == index * 100 + tensor).all())
        print("opened", opened())
    """
    assert int(ended_well(body, tmp_path).split()[-1]) < 40


@pytest.mark.parametrize("free", (0, 6, 9, 12, 18, 30))
def test_too_few_descriptors_is_an_error_that_names_them(free: int, tmp_path: Path) -> None:
    """And leaves nothing: with more of them the same loader works."""
    out = ended_well(
        f"""
        import gc, multiprocessing
        loader = DataLoader(torch.arange(8), num_workers=4, batch_size=None)
        assert list(loader) == list(range(8))
        gc.collect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = opened()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + {free}, hard))
        try:
            assert list(loader) == list(range(8))
            print("fits")
        except OSError as error:
            print("refused", error.errno, *getattr(error, "__notes__", []))
            del error
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        assert multiprocessing.active_children() == []
        assert list(loader) == list(range(8))
        """,
        tmp_path,
    )
    assert "fits" in out or "refused 24" in out, out
    if free < 12:
        assert "refused 24" in out and "ulimit -n" in out, out
    if free >= 30:
        assert "fits" in out, out


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("method", "rooms"),
    [
        ("fork", [10 << 30, 1 << 30, 400 << 20, 32 << 20]),
        pytest.param("spawn", [1 << 30], marks=pytest.mark.slow),
    ],
    ids=["fork", "spawn"],
)
def test_address_space(method: str, rooms: list[int], tmp_path: Path) -> None:
    """Windows and arenas shrink, half of it stays free; where nothing is left, the note names the limit."""
    out = ended_well(
        f"""
        from torch.utils.data import TensorDataset

        def taken():
            return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

        if __name__ == "__main__":
            loader = DataLoader(
                TensorDataset(torch.arange(32)), batch_size=4, num_workers=2,
                multiprocessing_context="{method}",
            )
            # All that is imported and started once.
            list(loader)
            loader.shutdown()
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            for room in {rooms}:
                limit = taken() + room
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
                before, iterator = taken(), iter(loader)
                segment = taken() - before
                found = torch.cat([batch for batch, in iterator]).tolist()
                assert found == list(range(32)), found
                report = ringloader.report(loader)
                print(report.path, room, segment, limit, report.reason, sep="|")
                del iterator
                resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        """,
        tmp_path,
    )
    rows = [line.split("|") for line in out.splitlines() if line.count("|") == 4]
    assert [row[0] for row in rows] == ["native", "native", "native", "torch"][: len(rooms)], out
    assert len(rows) == len(rooms)
    for path, room, segment, limit, reason in rows:
        if path == "native":
            assert int(segment) <= int(room) // 2 + (40 << 20), out
        else:
            assert f"RLIMIT_AS (ulimit -v) is {mib(int(limit))}" in reason


def test_file_size(tmp_path: Path) -> None:
    """Shared memory counts as a file."""
    out = ended_well(
        """
        for limit in (1 << 30, 1 << 20):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            loader = DataLoader(torch.arange(32), num_workers=2, batch_size=4)
            assert torch.cat(list(loader)).tolist() == list(range(32))
            report = ringloader.report(loader)
            print(report.path, report.reason)
        """,
        tmp_path,
    )
    first, second = out.splitlines()
    assert first.startswith("native"), out
    assert second.startswith("torch") and "RLIMIT_FSIZE (ulimit -f) is 1 MiB" in second, out


IN_FLIGHT = """
    import array, ctypes, errno, socket, struct, threading

    class Large(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return torch.full((3 << 20,), index, dtype=torch.uint8)

    # With their privileges a process is above the limit: give up all that this one has.
    header = struct.pack("Ii", 0x20080522, 0)
    assert ctypes.CDLL(None).capset(header, bytes(24)) == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with open("/dev/null") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 13))]
        sent = 0
        while sent < 5:
            try:
                ours.sendmsg([b"x"], rights)
                sent += 1
            except OSError as error:
                # Descriptors that this user's other processes have in flight count too, for a moment.
                assert error.errno == errno.ETOOMANYREFS
                time.sleep(0.01)
    loader = DataLoader(Large(), num_workers=1, max_shared_bytes=2 << 20)

    def take():
        for _ in range(5):
            theirs.recv(1)

    threading.Timer(7, take).start()
    begun = time.monotonic()
    for number, batch in enumerate(loader):
        assert bool((batch == number).all())
    assert number == 3
    assert ringloader.report(loader).path == "native"
    print(ringloader.report(loader), "seconds", round(time.monotonic() - begun))
"""


@pytest.mark.limit(120)
def test_descriptors_in_flight(tmp_path: Path) -> None:
    """The worker waits as long as others have the room, and says what for."""
    ended = run_script("ringloader", BEGIN + textwrap.dedent(IN_FLIGHT), tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert int(ended.out.split()[-1]) >= 7, "the limit was not reached"
    assert ended.err.count("worker 0 cannot send a large batch yet") == 1, ended.err
    assert "as RLIMIT_NOFILE allows (64)" in ended.err


FORBID = """
import ctypes, errno, platform

def forbid(numbers, error):
    "Has system calls refused from now on, here and in children, as a container's seccomp profile does."
    def step(code, jt, jf, k):
        return code.to_bytes(2, sys.byteorder) + bytes((jt, jf)) + k.to_bytes(4, sys.byteorder)
    load, equal, give = 0x20, 0x15, 0x06
    program = [step(load, 0, 0, 0)]
    for number in numbers:
        program += [step(equal, 0, 1, number), step(give, 0, 0, 0x00050000 | error)]
    program.append(step(give, 0, 0, 0x7FFF0000))
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
    held = b"".join(program)
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
    if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(len(program), held)), zero, zero) != 0:
        print("skip: no seccomp here")
        sys.exit(0)

CALLS = {"pidfd_open": 434, "memfd_create": {"x86_64": 319, "aarch64": 279}.get(platform.machine(), 319)}
"""


@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS"])
@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_seccomp_profile_without(call: str, refusal: str, tmp_path: Path) -> None:
    """Batches travel by torch's own transport, and the note says why."""
    body = f"""
        loader = DataLoader(torch.arange(32), num_workers=2, batch_size=4)
        assert torch.cat(list(loader)).tolist() == list(range(32))
        assert ringloader.report(loader).path == "native"
        loader.shutdown()
        forbid([CALLS["{call}"]], errno.{refusal})
        given = {{"num_workers": 2, "batch_size": 4}}
        for more in ({{}}, {{"restart_workers": 2}}):
            loader = DataLoader(torch.arange(32), **given, **more)
            assert torch.cat(list(loader)).tolist() == list(range(32))
            report = ringloader.report(loader)
            print(report.path, report.reason)
        assert "{call}" in ringloader.doctor().problems[0].meaning
    """
    out = ended_well(FORBID + textwrap.dedent(body), tmp_path)
    if "skip" in out:
        pytest.skip("no seccomp here")
    text = {"EPERM": "Operation not permitted", "ENOSYS": "Function not implemented"}[refusal]
    for line in out.splitlines():
        assert line.startswith("torch shared memory is not available"), out
        assert call in line and text in line, out
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS"])
def test_a_sandbox_that_refuses_to_tell_limits(refusal: str, tmp_path: Path) -> None:
    """Asking for limits is optional: batches come, and no memory is kept from one epoch to the next."""
    body = f"""
        import resource
        forbid([{{"x86_64": 302, "aarch64": 261}}.get(platform.machine(), 302), 97, 163], errno.{refusal})
        try:
            resource.getrlimit(resource.RLIMIT_NOFILE)
        except OSError:
            print("refused")
        for workers in (1, 2):
            loader = DataLoader(torch.arange(32), num_workers=workers, batch_size=4)
            for _ in range(3):
                assert torch.cat(list(loader)).tolist() == list(range(32))
            print(ringloader.report(loader).path)
    """
    out = ended_well(FORBID + textwrap.dedent(body), tmp_path)
    if "skip" in out:
        pytest.skip("no seccomp here")
    assert out.split() == ["refused", "native", "native"]


NAMESPACE = """
import ctypes

def mount(target, size):
    "A file system of that size in memory, which this program and its children alone have."
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(0x20000) != 0
        or libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) != 0
        or libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", ctypes.c_ulong(0), b"size=%d" % size) != 0
    ):
        print("skip: no file system can be mounted here")
        sys.exit(0)
"""

LOADERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((50_000,), index)

def load(method, **options):
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context=method, **options)
    for _ in range(2):
        assert [int(row[-1]) for batch in loader for row in batch] == list(range(64))
    return ringloader.report(loader).path
"""


@pytest.mark.limit(300)
@pytest.mark.parametrize("place", ["/dev/shm", pytest.param("disk", marks=pytest.mark.slow)])
def test_no_room_in_a_file_system(place: str, tmp_path: Path) -> None:
    """No batch needs it. Tensors of a dataset do, on their way to spawned workers: they are torch's."""
    body = f"""
        if __name__ == "__main__":
            full = {place!r}
            if full == "disk":
                full = {str(tmp_path / "full")!r}
                os.mkdir(full)
            mount(full, 65536)
            try:
                with open(full + "/all", "wb", buffering=0) as file:
                    while {place!r} == "disk":
                        file.write(bytes(4096))
            except OSError as error:
                assert error.errno == 28
            if {place!r} == "disk":
                os.environ["TMPDIR"] = full
                import tempfile
                tempfile.tempdir = None
                os.chdir(full)
            for method in ("fork", "spawn"):
                print(load(method))
            print(load("fork", persistent_workers=True))
    """
    out = ended_well(NAMESPACE + LOADERS + textwrap.dedent(body), tmp_path)
    if "skip" in out:
        pytest.skip("no file system can be mounted here")
    assert out.split() == ["native"] * 3


RESIDENT = """
def resident():
    "Bytes of the segments of this process."
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ringloader ("):
                found += os.stat(f"/proc/self/fd/{fd}").st_blocks * 512
        except OSError:
            pass
    return found

class Sizes(torch.utils.data.Dataset):
    "Samples of sizes drawn by a seed: small, large, and huge ones."
    def __init__(self, count, seed, most):
        draw = torch.Generator().manual_seed(seed)
        exponents = torch.rand(count, generator=draw) * torch.log2(torch.tensor(float(most)))
        self.sizes = (2 ** exponents).long().clamp(min=1).tolist()
    def __len__(self):
        return len(self.sizes)
    def __getitem__(self, index):
        return torch.full((self.sizes[index],), index, dtype=torch.int32)
"""

# Rings, arenas and headers of a worker, where they are touched.
BESIDE = 1 << 20


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("held", "in_order"),
    [
        pytest.param(0, True, marks=pytest.mark.slow),
        (60, True),
        pytest.param(60, False, marks=pytest.mark.slow),
    ],
)
def test_max_shared_bytes_is_kept(held: int, in_order: bool, tmp_path: Path) -> None:
    """Of batches of all sizes, up to more than a share, whether the user drops or hoards them."""
    most = 24 << 20
    body = f"""
        import random
        draw = random.Random(16)
        dataset = Sizes(150, 16, 5 << 20)
        loader = DataLoader(
            dataset, num_workers=2, batch_size=None, prefetch_factor=4, persistent_workers=True,
            max_shared_bytes={most}, in_order={in_order},
        )
        peak, kept, seen = 0, [], []
        for epoch in range(2):
            for batch in loader:
                index = int(batch[0])
                seen.append(index)
                assert len(batch) == dataset.sizes[index]
                kept.append((index, batch))
                peak = max(peak, resident())
                if len(kept) > {held}:
                    index, batch = kept.pop(draw.randrange(len(kept)))
                    assert bool((batch == index).all())
                del batch
        assert sorted(seen) == sorted(2 * list(range(150)))
        assert all(bool((batch == index).all()) for index, batch in kept)
        print("peak", peak)
    """
    out = ended_well(RESIDENT + textwrap.dedent(body), tmp_path)
    peak = int(out.split()[-1])
    assert most // 4 < peak <= most + 2 * BESIDE, "it is used, and kept"


def test_memory_is_given_back_after_a_spike(tmp_path: Path) -> None:
    """A worker that waits gives back 8 MiB of its free slots for each 100 ms."""
    body = """
        class Spike(torch.utils.data.Dataset):
            def __len__(self):
                return 100
            def __getitem__(self, index):
                return torch.full((1_000_000 if 20 <= index < 60 else 10,), index)

        loader = DataLoader(
            Spike(), num_workers=2, batch_size=None, prefetch_factor=4, max_shared_bytes=200 << 20,
            persistent_workers=True,
        )
        iterator, peak = iter(loader), 0
        for batch in iterator:
            peak = max(peak, resident())
        del batch
        series = [(0.0, peak)]
        began = time.monotonic()
        while series[-1][1] > 4 << 20 and time.monotonic() - began < 20:
            time.sleep(0.1)
            series.append((round(time.monotonic() - began, 1), resident()))
        print(series)
        print(peak, series[-1][1])
    """
    out = ended_well(RESIDENT + textwrap.dedent(body), tmp_path)
    peak, left = map(int, out.split()[-2:])
    assert peak > 40 << 20, out
    assert left <= 4 << 20, out


def test_the_address_space_of_a_kept_batch_goes_with_it(tmp_path: Path) -> None:
    """After the end of its iterator, the pages of all other slots go back, the address space only with it."""
    body = """
        os.environ["RINGLOADER_WARM"] = "0"

        class Large(torch.utils.data.Dataset):
            def __len__(self):
                return 24
            def __getitem__(self, index):
                return torch.full((1 << 20,), index, dtype=torch.int32)

        def mapped(name):
            "Kilobytes of the segments of this process: address space (Size), or pages in use (Rss)."
            found, inside = 0, False
            with open("/proc/self/smaps") as lines:
                for line in lines:
                    first, _, rest = line.partition(" ")
                    if "-" in first:
                        inside = "/memfd:ringloader (" in line
                    elif inside and first == name + ":":
                        found += int(rest.split()[0])
            return found

        loader = DataLoader(Large(), num_workers=2, batch_size=None, max_shared_bytes=128 << 20)
        kept, most = None, 0
        for batch in loader:
            assert int(batch.max()) == int(batch[0])
            most = max(most, mapped("Rss"))
            kept = batch if kept is None else kept
        del batch
        gc.collect()
        began = time.monotonic()
        while mapped("Rss") > 5 << 10 and time.monotonic() - began < 20:
            time.sleep(0.05)
        print(most, mapped("Size"), mapped("Rss"), int(kept.max()))
        del kept
        gc.collect()
        print(mapped("Size"))
    """
    out = ended_well(body, tmp_path)
    (most, space, pages, value), (left,) = (list(map(int, line.split())) for line in out.splitlines())
    assert value == 0
    assert most > 12 << 10, "several batches had pages"
    assert pages <= 5 << 10, "the pages of one batch, and what lies beside"
    assert space > 32 << 10, "the address space of all slots"
    assert left == 0
