"""Nothing stays installed behind a test; and the interpreters that tests start."""

from collections.abc import Iterator

import pytest
import torch.utils.data

import ringloader
from install.python import Python, make_python
from ringloader._torch import hook


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    before = torch.utils.data.DataLoader._get_iterator
    yield
    left = hook.current(), torch.utils.data.DataLoader._get_iterator
    ringloader.uninstall()
    torch.utils.data.DataLoader._get_iterator = before
    assert left == (None, before)


@pytest.fixture(scope="session")
def fake_torch(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Python with ringloader, the environment's hook, and a torch that is imported in no time."""
    return make_python(tmp_path_factory.mktemp("fake") / "venv")


@pytest.fixture(scope="session")
def without_hook(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Python with ringloader and the fake torch, without the package of the hook."""
    return make_python(tmp_path_factory.mktemp("bare") / "venv", hook=False)


@pytest.fixture(scope="session")
def real_torch(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Python with ringloader, the environment's hook, and torch."""
    return make_python(tmp_path_factory.mktemp("real") / "venv", real_torch=True)
