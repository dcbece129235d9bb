"""Classes and functions of cells: spawned workers cannot find them, which is said before they start."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from programs import client

pytestmark = [pytest.mark.rings_only, pytest.mark.limit(300)]

TESTS = Path(__file__).resolve().parents[1]

# Each cell is run as a notebook runs it. What `told` gets comes to the test.
SHELL = """
    import json, sys, textwrap
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor")
    for cell in {cells!r}:
        shell.run_cell(textwrap.dedent(cell), store_history=False).raise_error()
"""

CELL = """
    import collections, json, multiprocessing, operator, sys
    import torch
    import torch.utils.data
    import ringloader
    from faults.failing_datasets import Numbers

    class Cell(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return index

    class Outer:
        class Inner(Cell):
            pass

    class ByValue(Cell):
        def __reduce__(self):
            return list, ([0, 1, 2, 3],)

    class Registered(Cell):
        pass

    multiprocessing.reduction.ForkingPickler.register(Registered, lambda one: (range, (4,)))

    Pair = collections.namedtuple("Pair", "first second")

    class Source(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    def same(samples):
        return samples

    def reset(dataset, info, seeds):
        pass

    def tell(dataset, method, loader=ringloader.DataLoader, **options):
        if "worker_pool" in options:
            options["worker_pool"] = ringloader.WorkerPool(1, method)
        elif method != "thread":
            options["multiprocessing_context"] = method
        else:
            options["worker_method"] = method
        before = multiprocessing.active_children()
        try:
            it = iter(loader(dataset, num_workers=1, batch_size=2, **options))
        except Exception as error:
            started = [one for one in multiprocessing.active_children() if one not in before]
            return [type(error).__name__, str(error), len(started)]
        return [batch if isinstance(batch, list) else batch.tolist() for batch in it]
"""


def run(arguments: list[str], folder: Path) -> Any:
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    # IPython warns of another environment than the one it runs in.
    others = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = client.run(
        arguments,
        timeout=100,
        env=others | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def in_notebook(folder: Path, *cells: str) -> Any:
    """What the last cell prints last, as JSON."""
    return run(["-c", textwrap.dedent(SHELL).format(cells=[CELL, *cells])], folder)


ALL = [[0, 1], [2, 3]]


def error(told: list[Any]) -> str:
    kind, text, started = told
    assert (kind, started) == ("RuntimeError", 0), text
    return text


@pytest.mark.parametrize("method", ["fork", "thread"])
def test_forked_workers_and_threads_have_the_cells_classes(tmp_path: Path, method: str) -> None:
    told = in_notebook(
        tmp_path,
        f"""
        print(json.dumps([tell(Cell(), "{method}"), tell(Outer.Inner(), "{method}", collate_fn=same)]))
        """,
    )
    assert told == [ALL, ALL]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_names_of_cells_are_said_before_workers_start(tmp_path: Path, method: str) -> None:
    told = in_notebook(
        tmp_path,
        f"""
        sys.modules["cloudpickle"] = None
        found = [
            tell(Cell(), "{method}"),
            tell(Outer.Inner(), "{method}", collate_fn=same, worker_init_fn=same),
            tell(torch.utils.data.Subset(Cell(), [0, 1]), "{method}"),
            tell([Pair(0, 1)] * 4, "{method}"),
            tell(Numbers(4), "{method}", worker_reset_fn=reset),
            tell(ringloader.Dispatch(Source()), "{method}"),
        ]
        # Handles of this strategy are for one process, so all is pickled for each.
        torch.multiprocessing.set_sharing_strategy("file_system")
        found.append(tell(torch.utils.data.StackDataset(torch.arange(4), Cell()), "{method}"))
        print(json.dumps(found))
        """,
    )
    names = ["Cell", "Outer.Inner", "Cell", "Pair", "reset", "Source", "Cell"]
    for one, name in zip(told, names, strict=True):
        assert error(one) == (
            f"workers that do not fork cannot find {name} of the main module, which they cannot run again (a "
            "notebook, an interactive session, python -c or python -m package). Put it into a module and "
            "import it (in a notebook: %%writefile data.py), or install cloudpickle (pip install "
            "cloudpickle), or pass multiprocessing_context='fork' or worker_method='thread', which "
            "send nothing"
        )


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_names_of_cells_travel_by_value_with_cloudpickle(tmp_path: Path, method: str) -> None:
    told = in_notebook(
        tmp_path,
        f"""
        # The server of spawned workers goes with its last loader.
        keeps_server = ringloader.DataLoader([0], num_workers=1, multiprocessing_context="{method}")
        found = [
            tell(Cell(), "{method}"),
            tell(Outer.Inner(), "{method}", collate_fn=same),
            tell(range(4), "{method}", worker_reset_fn=reset),
            tell(Cell(), "{method}", worker_pool=True),
            tell(ringloader.Dispatch(Source()), "{method}"),
        ]
        # Handles of this strategy are for one process, so all is pickled for each.
        torch.multiprocessing.set_sharing_strategy("file_system")
        both = torch.utils.data.StackDataset(torch.arange(4), Cell())
        print(json.dumps([*found, tell(both, "{method}", collate_fn=same)], default=int))
        """,
    )
    assert told[:5] == [ALL] * 5
    assert told[5] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_says_them_before_it_sends_work(tmp_path: Path, method: str) -> None:
    told = in_notebook(
        tmp_path,
        f"""
        sys.modules["cloudpickle"] = None
        print(json.dumps([
            tell(Cell(), "{method}", worker_pool=True)[:2],
            tell(Numbers(4), "{method}", worker_pool=True, collate_fn=same)[:2],
            tell(Numbers(4), "{method}", worker_pool=True, worker_reset_fn=reset)[:2],
            tell(range(4), "{method}", worker_pool=True),
        ]))
        """,
    )
    assert [kind for kind, _ in told[:3]] == ["RuntimeError"] * 3
    for (_, text), name in zip(told[:3], ["Cell", "same", "reset"], strict=True):
        assert text.startswith(f"workers that do not fork cannot find {name} of the main module")
    assert told[3] == ALL


FORKED = """
    pool = ringloader.WorkerPool(2, "fork")
    options = {"batch_size": 2, "worker_pool": pool}

    def values(loader):
        return [batch.tolist() for batch in loader]

    def pids():
        return {process.process.pid for process in pool._crew._processes}

    old = ringloader.DataLoader(Cell(), **options)
    plain = ringloader.DataLoader(torch.arange(4), **options)
    told, before = [values(old), values(plain)], pids()
"""
ANEW = """
    class Cell(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return 100 + index
"""
MORE = [[100, 101], [102, 103]]


def test_a_cell_that_is_run_again_with_a_pool_that_forks(tmp_path: Path) -> None:
    """Each loader has the class of its dataset, whichever processes have which class by that name."""
    told = in_notebook(
        tmp_path,
        FORKED,
        ANEW,
        """
        told += [values(plain), pids() == before]
        new = ringloader.DataLoader(Cell(), **options)
        for _ in range(2):
            told += [values(new), values(old)]
        told += [len(pids()), len(pids() & before)]
        print(json.dumps(told))
        """,
    )
    assert told == [ALL, ALL, ALL, True, MORE, ALL, MORE, ALL, 4, 2]


def test_a_class_of_a_later_cell_with_a_pool_that_forks(tmp_path: Path) -> None:
    told = in_notebook(
        tmp_path,
        FORKED,
        """
        class Later(Cell):
            pass

        def first(samples):
            return torch.tensor(samples[:1])
        """,
        """
        later = ringloader.DataLoader(Later(), collate_fn=first, **options)
        told += [values(later), values(old), values(later), len(pids()), len(pids() & before)]
        print(json.dumps(told))
        """,
    )
    assert told == [ALL, ALL, [[0], [2]], ALL, [[0], [2]], 4, 2]


def test_a_class_that_went_before_the_first_iterator_of_its_loader(tmp_path: Path) -> None:
    """By cloudpickle; without it, an error says so."""
    told = in_notebook(
        tmp_path,
        FORKED + "    loaders = [ringloader.DataLoader(Cell(), **options) for _ in range(2)]",
        ANEW,
        """
        told += [values(loaders.pop())]
        sys.modules["cloudpickle"] = None
        try:
            values(loaders.pop())
        except Exception as error:
            told += [type(error).__name__, str(error), error.__notes__]
        told += [values(old)]
        print(json.dumps(told))
        """,
    )
    assert told[2] == ALL
    assert told[3] == "PicklingError" and "it's not the same object as __main__.Cell" in told[4]
    # Python 3.14 says in notes of its own what it was serializing.
    (note,) = [note for note in told[5] if not note.startswith("when serializing")]
    assert "install cloudpickle" in note
    assert told[6] == ALL, "processes of before have the class"


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_what_workers_find_works_as_with_torch(tmp_path: Path, method: str) -> None:
    """Modules, what is pickled by value, and text that looks like the name of the main module."""
    (tmp_path / "data.py").write_text(textwrap.dedent(CELL))
    told = in_notebook(
        tmp_path,
        f"""
        import data
        text = ["__main__", "Cell", "c__main__\\nCell\\n", b"\\x8c\\x08__main__"]
        dataset = torch.utils.data.StackDataset(range(4), data.Cell(), ByValue(), Registered(), text)
        loaders = torch.utils.data.DataLoader, ringloader.DataLoader
        print(json.dumps([tell(dataset, "{method}", one, collate_fn=list) for one in loaders], default=repr))
        """,
    )
    theirs, ours = told
    assert ours == theirs
    assert [sample for batch in theirs for sample in batch] == [
        [0, 0, 0, 0, "__main__"],
        [1, 1, 1, 1, "Cell"],
        [2, 2, 2, 2, "c__main__\nCell\n"],
        [3, 3, 3, 3, "b'\\x8c\\x08__main__'"],
    ]


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_programs_without_a_notebook(tmp_path: Path, method: str) -> None:
    """``python -c``, and a package's ``__main__``."""
    body = (
        textwrap.dedent(CELL)
        + "sys.modules['cloudpickle'] = None\n"
        + f"print(json.dumps([tell(Cell(), '{method}'), tell(range(4), '{method}')]))\n"
    )
    lost, found = run(["-c", body], tmp_path)
    assert "cannot find Cell of the main module" in error(lost)
    assert found == ALL
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(body)
    lost, found = run(["-m", "package"], tmp_path)
    assert "cannot find Cell of the main module" in error(lost)
    assert found == ALL


MAIN_FILE = """
import json
import logging
from typing import NamedTuple

import torch
import ringloader

logging.getLogger("ringloader").setLevel(logging.ERROR)


class Sample(NamedTuple):
    number: int


class BadError(Exception):
    pass


class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = lambda number: number + 100

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise BadError
        return Sample(self.transform(index))


def replace(_index, error):
    return Sample(-1 if isinstance(error, BadError) else -2)


def tell(**options):
    loader = ringloader.DataLoader(Numbers(), 2, **options)
    found = [type(batch) is Sample and batch.number.tolist() for batch in loader]
    try:
        list(ringloader.DataLoader(Numbers(), **{**options, "on_error": "raise"}))
    except BadError:
        return found
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver", "fork"])
def test_with_cloudpickle_the_classes_of_a_main_file_are_its_own(tmp_path: Path, method: str) -> None:
    """What has a name in it goes by that, though another object goes by value."""
    (tmp_path / "program.py").write_text(
        MAIN_FILE
        + "if __name__ == '__main__':\n"
        + "    given = {'num_workers': 1, 'on_error': replace}\n"
        + f"    with ringloader.WorkerPool(1, '{method}') as pool:\n"
        + "        pooled = tell(worker_pool=pool, **given)\n"
        + f"    print(json.dumps([tell(multiprocessing_context='{method}', **given), pooled]))\n"
    )
    assert run(["program.py"], tmp_path) == [[[100, 101], [-1, 103]]] * 2
