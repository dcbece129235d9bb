"""In a control group whose limit is reached: file cache makes room, as it does for torch's loader."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import script
from faults.proc import wait_until

MEBI = 1 << 20
LIMIT = 320 * MEBI
CACHE = 290 * MEBI

# Each hierarchy with the name of its limit and the key of its active cache. The root of what is mounted is
# the container's own group, where there is one.
HIERARCHIES = (
    (Path("/sys/fs/cgroup"), "memory.max", "active_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "total_active_file"),
)


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """A control group with a limit, and the key of its active cache."""
    for root, limit, key in HIERARCHIES:
        made = root / f"ringloader-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(LIMIT))
        except OSError:
            made.rmdir()
            continue
        yield made, key
        assert wait_until(lambda made=made: _removed(made), 10)
        return
    pytest.skip("no memory control group can be made here")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.slow
@pytest.mark.limit(300)
def test_active_cache_makes_room(loader_name, group, tmp_path):
    at, key = group
    data = tmp_path / "data"
    with data.open("wb") as file:
        for _ in range(CACHE // MEBI):
            file.write(os.urandom(MEBI))
        file.flush()
        os.fsync(file.fileno())
        # The next reader is charged for it.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ended = script.start(
        loader_name,
        f"""
        from pathlib import Path
        Path({str(at / "cgroup.procs")!r}).write_text(str(os.getpid()))

        def cached():
            words = Path({str(at / "memory.stat")!r}).read_text().split()
            return int(words[words.index({key!r}) + 1])

        # Where 30 MB are free. Of 4 MB, where a share must be more than two; and of 40.
        for elements in (500_000, 5_000_000):
            for _ in range(4):
                with open({str(data)!r}, "rb", buffering=0) as file:
                    while file.read(1 << 20):
                        pass
            print("cached", cached())
            loader = DataLoader(Numbers(8, elements), num_workers=2, batch_size=None, prefetch_factor=1)
            iterator = iter(loader)
            for index, batch in enumerate(iterator):
                assert bool((batch == index).all())
            if not DataLoader.__module__.startswith("torch."):
                import ringloader
                print("oversize", elements, ringloader.report(iterator).counters["oversize"])
            del loader, iterator, batch
        print("ended well")
        """,
        tmp_path,
    )
    out, err = ended.communicate()
    cached = int(out.split()[1])
    if cached < LIMIT // 2:
        pytest.skip(f"only {cached} bytes of the file stay in the cache of {LIMIT}")
    assert ended.returncode == 0, out + err
    assert "ended well" in out
    if loader_name != "torch":
        assert "oversize 500000 0" in out, out


@pytest.mark.rings_only
def test_what_the_group_cannot_hold_is_an_error_with_figures(group, tmp_path):
    at, _ = group
    ended = script.run_script(
        "ringloader",
        f"""
        import itertools
        from pathlib import Path
        from ringloader import SharedList
        Path({str(at / "cgroup.procs")!r}).write_text(str(os.getpid()))
        for item in (bytes(1000), bytes(30 << 20), 1):
            try:
                SharedList(itertools.repeat(item))
            except MemoryError as error:
                print(error)
        print(len(SharedList([bytes(1000)] * 100_000)))
        import numpy
        from ringloader import SharedArray
        for build in (
            lambda: SharedArray.from_rows(itertools.repeat(numpy.zeros(1000))),
            lambda: SharedArray(numpy.zeros(1 << 26)),
        ):
            try:
                build()
            except MemoryError as error:
                print(error)
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.err
    *errors, fits, rows, copied = ended.out.splitlines()
    for error in (rows, copied):
        assert re.match(r"an array in shared memory has \d+ bytes and needs \d+ more", error)
    assert len(errors) == 3 and fits == "100000"
    for error in errors:
        assert re.match(r"a list in shared memory has \d+ bytes and needs \d+ more, and \d+ to spare", error)
        assert f"{at}/memory." in error, error


@pytest.mark.rings_only
@pytest.mark.limit(300)
@pytest.mark.parametrize("max_shared_bytes", [4 << 30, 16 << 20], ids=["slots", "copies"])
def test_batches_that_are_held_until_the_limit_end_in_an_error_with_figures(
    group, max_shared_bytes, tmp_path
):
    """And in no kill, whether they lie in slots or, beyond ``max_shared_bytes``, in copies."""
    at, _ = group
    ended = script.run_script(
        "ringloader",
        f"""
        from pathlib import Path
        Path({str(at / "cgroup.procs")!r}).write_text(str(os.getpid()))

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, index):
                return torch.full((1 << 18,), float(index))

        loader = DataLoader(Rows(), num_workers=2, batch_size=4, max_shared_bytes={max_shared_bytes})
        held = []
        try:
            for batch in loader:
                held.append(batch)
        except MemoryError as error:
            print(str(error).splitlines()[-1])
        for index, batch in enumerate(held):
            assert batch[:, -1].tolist() == [float(4 * index + row) for row in range(4)]
        print(len(held))
        del held, batch, loader
        # What was held is there for others.
        again = DataLoader(torch.arange(8), num_workers=2, batch_size=1)
        assert [int(batch[0]) for batch in again] == list(range(8))
        """,
        tmp_path,
    )
    assert ended.code == 0, ended.out + ended.err
    error, held = ended.out.splitlines()
    assert re.search(r"a batch needs \d+ more bytes of memory, but only \d+ are available", error), ended.out
    assert f"{at}/memory." in error
    assert LIMIT // 2 < int(held) * (4 << 20) < LIMIT
