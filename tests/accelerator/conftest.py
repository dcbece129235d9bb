"""The pretend accelerator is that of a whole process: so these tests run in processes that have it.

`test_each_file.py` starts one for each file of tests. With `--pretend` this process is such a one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from accelerator import build, hardware, pretend

STARTS_OTHERS = "test_each_file.py"
ABOUT_THE_PRETEND_ONE = "test_pretend.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pretend",
        action="store_true",
        help="make the pretend accelerator that of this process, and run its tests here",
    )
    parser.addoption(
        "--hardware",
        action="store_true",
        help="run the pretend accelerator's tests here, on the accelerator that torch finds",
    )
    parser.addoption("--pinned", action="store_true", help="loaders have pin_memory=True by default")


def _is_here(config: pytest.Config) -> bool:
    # pytest does not know the options if no argument names this folder.
    return any(config.getoption(option, default=False) for option in ("--pretend", "--hardware"))


def pytest_configure(config: pytest.Config) -> None:
    if _is_here(config):
        # In torch 2.6, by its pinning thread, for each tensor.
        config.addinivalue_line("filterwarnings", "ignore:The argument 'device' of Tensor")
    if config.getoption("--hardware", default=False):
        try:
            hardware.put_in_place()
        except hardware.NoAcceleratorError as error:
            raise pytest.UsageError(f"--hardware: {error}") from None
    elif _is_here(config):
        try:
            pretend.load()
        except build.CannotBuildError as error:
            raise pytest.UsageError(f"--pretend: {error}") from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    if collection_path.name == ABOUT_THE_PRETEND_ONE and config.getoption("--hardware", default=False):
        return True
    return (collection_path.name == STARTS_OTHERS) == _is_here(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    # Files that an argument names are not ignored.
    if file_path.name.startswith("test_") and file_path.name != STARTS_OTHERS and not _is_here(parent.config):
        raise pytest.UsageError("tests of the accelerator need it: python -m pytest --pretend ...")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--pinned", default=False):
        _pin_by_default()


def _pin_by_default() -> None:
    init: Any = torch.utils.data.DataLoader.__init__
    parameters = inspect.signature(init).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    defaults = list(init.__defaults__)
    defaults[positional.index("pin_memory") - len(positional)] = True
    init.__defaults__ = tuple(defaults)


@pytest.fixture(autouse=True)
def _as_new(request: pytest.FixtureRequest, _no_process_left: None) -> Iterator[None]:
    """Each test begins with a device that does all at once and that has nothing to do."""
    if not _is_here(request.config):
        yield
        return
    pretend.reset()
    yield
    pretend.reset()
