"""The report at exit: by the command line and by the environment, of one process and of several."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from install.python import Python

pytestmark = pytest.mark.rings_only

NONE = "ringloader: no loader of ringloader's was iterated in this process\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("import sys; sys.exit(3)", 3), ("raise ValueError", 1), ("import os; os._exit(4)", 4)],
)
def test_each_end_but_os_exit_prints_it(fake_torch: Python, tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "program.py").write_text(f"import torch.utils.data.dataloader\n{end}\n")
    done = fake_torch.run("-m", "ringloader", "run", "--report", "program.py", cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.endswith(NONE) == (code != 4)


@pytest.mark.parametrize("value", ["0", "", "1", "all"])
def test_the_option_and_the_variable(fake_torch: Python, tmp_path: Path, value: str) -> None:
    (tmp_path / "program.py").write_text("import os; print(os.environ['RINGLOADER_REPORT'])")
    run = ["-m", "ringloader", "run"]
    done = fake_torch.run(*run, "--report", "program.py", cwd=tmp_path, RINGLOADER_REPORT=value)
    assert (done.stdout.strip(), done.stderr) == ("all" if value == "all" else "1", NONE)
    done = fake_torch.run(*run, "program.py", cwd=tmp_path, RINGLOADER_REPORT=value)
    assert done.stderr == (NONE if value in ("1", "all") else "")


def test_a_wrong_value_asks_for_nothing(fake_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    done = fake_torch.run("-m", "ringloader", "run", "program.py", cwd=tmp_path, RINGLOADER_REPORT="yes")
    assert done.returncode == 0
    assert done.stderr == "ringloader: RINGLOADER_REPORT='yes' has no effect: set it to 1, all or 0\n"


def test_a_file_that_is_closed_changes_no_end(fake_torch: Python, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.stderr.close()")
    done = fake_torch.run("-m", "ringloader", "run", "--report", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("environment", "who"),
    [
        ({"RANK": "0"}, "ringloader"),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "RINGLOADER_REPORT": "all"}, "ringloader [rank 1]"),
        ({"RANK": "none"}, "ringloader"),
    ],
)
def test_the_rank_of_the_environment(
    fake_torch: Python, tmp_path: Path, environment: dict[str, str], who: str | None
) -> None:
    (tmp_path / "program.py").touch()
    done = fake_torch.run("-m", "ringloader", "run", "--report", "program.py", cwd=tmp_path, **environment)
    assert done.stderr == ("" if who is None else NONE.replace("ringloader", who, 1))


# A framework that makes and keeps its loaders itself, and remakes the one that it gets.
FRAMEWORK = """
import torch, torch.utils.data.dataloader as theirs
from torch.utils.data import DataLoader

class Own(DataLoader):
    def _get_iterator(self):
        return theirs._SingleProcessDataLoaderIter(self)

class Trainer:
    def __init__(self, dataset, **how):
        self.__own = Own(dataset)
        self.__test = DataLoader(dataset)
        self.__train = DataLoader(dataset, batch_size=2, num_workers=2, **how)

    def fit(self):
        for loader in (self.__train, self.__train, self.__test, self.__own):
            for batch in loader:
                pass
"""
PROGRAM = """
import torch
from framework import Trainer

class Nested(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return list(torch.utils.data.DataLoader([index]))

if __name__ == "__main__":
    trainer = Trainer(
        Nested(),
        multiprocessing_context="METHOD",
    )
    trainer.fit()
"""
TIMES = r" in [\d.]+ s \([\d.,]+ a second\); waited [\d.]+ s; starts [\d.]+ s"
TORCHS = "torch.utils.data.dataloader.DataLoader"


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_framework_that_hides_its_loaders(real_torch: Python, tmp_path: Path, method: str) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "framework.py").write_text(FRAMEWORK)
    (tmp_path / "train.py").write_text(PROGRAM.replace("METHOD", method))
    done = real_torch.run(
        "-c",
        f"import sys; sys.path.append({str(package)!r}); sys.argv[1:] = ['run', '--report', 'train.py']; "
        "from ringloader import __main__; __main__.main()",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    loader = rf"ringloader: train\.py:17: {re.escape(TORCHS)} of Nested \(6 samples\)"
    expected = [
        f"{loader}: native; 6 batches{TIMES}",
        f"{loader}: single-process; 6 batches{TIMES}",
    ]
    loader = rf"ringloader: train\.py:10: {re.escape(TORCHS)} of list \(1 sample\)"
    nested = rf"{loader} \(12 loaders\): single-process; 12 batches{TIMES}"
    assert len(lines) == 3, done.stderr
    for line, pattern in zip(lines, [*expected, nested], strict=True):
        assert re.fullmatch(pattern, line), line


RANKS = """
import multiprocessing, sys
import torch
import torch.distributed
from ringloader import DataLoader

def train(rank, file):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for batch in DataLoader(torch.arange(8 + rank), num_workers=1, multiprocessing_context="fork"):
        pass
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, sys.argv[1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.parametrize("who", [pytest.param("1", marks=pytest.mark.slow), "all"])
def test_ranks_that_the_program_starts(real_torch: Python, tmp_path: Path, who: str) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    done = real_torch.run("train.py", tmp_path / "file", cwd=tmp_path, RINGLOADER_REPORT=who)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    *lines, last = sorted(done.stderr.splitlines(), key=lambda line: "no loader" in line)
    assert last.startswith(NONE.strip()), "the program's own process has none"
    prefixes = ["ringloader"] if who == "1" else ["ringloader [rank 0]", "ringloader [rank 1]"]
    assert [line.split(": ")[0] for line in sorted(lines)] == prefixes
    for rank, line in enumerate(sorted(lines)):
        loader = rf"train\.py:9: ringloader\.dataloader\.DataLoader of Tensor \({8 + rank} samples\)"
        about = f"{loader}: native; {8 + rank} batches{TIMES}"
        assert re.fullmatch(f"{re.escape(prefixes[rank])}: {about}", line), line


FIGURES = r"""ringloader: train\.py:4: {loader} \(2 loaders\): single-process; {all} batches{times}
ringloader:   the last epoch: 3 batches in [\d.]+ s \(path single-process, num_workers=0\): startup .*
ringloader:   main process: decode .*
ringloader:   worker +batches +idle .*
ringloader:        0 +3 .*
ringloader:   [a-z]+: .*
"""


def test_statistics_that_the_command_line_asks_for(real_torch: Python, tmp_path: Path) -> None:
    """Also of a loader that is gone."""
    program = """
import torch
def train():
    for batch in torch.utils.data.DataLoader(torch.arange(3)):
        pass
for _ in range(2):
    train()
"""
    (tmp_path / "train.py").write_text(program)
    done = real_torch.run("-m", "ringloader", "run", "--stats", "True", "train.py", cwd=tmp_path)
    expected = FIGURES.format(loader=re.escape(f"{TORCHS} of Tensor (3 samples)"), all=6, times=TIMES)
    assert re.fullmatch(expected, done.stderr), done.stderr


@pytest.mark.parametrize(("value", "said"), [("True", NONE), ("False", "")])
def test_statistics_are_printed_if_they_are_on(
    fake_torch: Python, tmp_path: Path, value: str, said: str
) -> None:
    (tmp_path / "train.py").write_text("import torch.utils.data.dataloader")
    done = fake_torch.run("-m", "ringloader", "run", "--stats", value, "train.py", cwd=tmp_path)
    assert done.stderr == said


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit(2)", "1 / 0"])
def test_a_program_that_imports_the_class(real_torch: Python, tmp_path: Path, end: str) -> None:
    program = "import sys, ringloader, torch\nloader = ringloader.DataLoader(torch.arange(3))\nlist(loader)\n"
    (tmp_path / "train.py").write_text(program + end)
    done = real_torch.run("train.py", cwd=tmp_path, RINGLOADER_REPORT="1")
    loader = r"ringloader: train\.py:3: ringloader\.dataloader\.DataLoader of Tensor \(3 samples\)"
    assert re.fullmatch(f"{loader}: single-process; 3 batches{TIMES}", done.stderr.splitlines()[-1]), (
        done.stderr
    )
    assert done.returncode == {"": 0, "1 / 0": 1}.get(end, 2)


@pytest.mark.slow
def test_a_loader_that_a_framework_has_replaced(real_torch: Python, tmp_path: Path) -> None:
    """The case in which a user changes the import, and the framework makes a loader of torch's."""
    program = """
import ringloader, torch
given = ringloader.DataLoader(torch.arange(3))
list(torch.utils.data.DataLoader(given.dataset))
"""
    (tmp_path / "train.py").write_text(program)
    done = real_torch.run("train.py", cwd=tmp_path, RINGLOADER_REPORT="1")
    hint = (
        "; a framework that makes its own loaders needs ringloader.install(), or python -m ringloader run\n"
    )
    assert done.stderr == NONE.rstrip() + hint
    # By the variable alone, with the package of the hook.
    done = real_torch.run("train.py", cwd=tmp_path, install="1", RINGLOADER_REPORT="1")
    assert f"train.py:4: {TORCHS} of Tensor (3 samples): single-process; 3 batches" in done.stderr


def test_without_the_variable_nothing_is_printed_or_wrapped(real_torch: Python, tmp_path: Path) -> None:
    program = """
import ringloader, torch
list(ringloader.DataLoader(torch.arange(3)))
print(torch.utils.data.DataLoader.__init__.__code__.co_filename == torch.utils.data.dataloader.__file__)
"""
    (tmp_path / "train.py").write_text(program)
    done = real_torch.run("train.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


INTERRUPTED = """
import os, signal, time
import torch, ringloader
list(ringloader.DataLoader(torch.arange(3), num_workers=WORKERS, stats=STATS))
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("run", "workers", "stats"),
    [
        pytest.param([], 0, False, marks=pytest.mark.slow, id="python"),
        pytest.param(["-m", "ringloader", "run"], 1, True, id="run"),
    ],
)
def test_a_program_that_an_interrupt_ends_dies_by_the_signal(
    real_torch: Python, tmp_path: Path, run: list[str], workers: int, stats: bool
) -> None:
    program = INTERRUPTED.replace("WORKERS", str(workers)).replace("STATS", str(stats))
    (tmp_path / "train.py").write_text(program)
    done = real_torch.run(*run, "train.py", cwd=tmp_path, RINGLOADER_REPORT="1")
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt\n" in done.stderr
    assert "3 batches" in done.stderr


FILTERS = """
import inspect, torch
init = torch.utils.data.DataLoader.__init__
given = {"batch_size": 2, "other": 3}
for names in (
    init.__code__.co_varnames,
    inspect.signature(init, follow_wrapped=False).parameters,
    inspect.getfullargspec(init).args,
):
    chosen = {name: value for name, value in given.items() if name in names}
    print(len(list(torch.utils.data.DataLoader(torch.arange(8), **chosen))), len(init.__defaults__) > 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_program_that_filters_arguments_by_the_constructor(
    real_torch: Python, tmp_path: Path, how: str
) -> None:
    (tmp_path / "train.py").write_text(FILTERS)
    if how == "option":
        done = real_torch.run("-m", "ringloader", "run", "--report", "train.py", cwd=tmp_path)
    else:
        done = real_torch.run("train.py", cwd=tmp_path, install="1", RINGLOADER_REPORT="1")
    assert done.stdout.splitlines() == ["4 True"] * 3, done.stderr
