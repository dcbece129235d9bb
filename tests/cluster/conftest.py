"""A simulated cluster of several nodes on this machine, and workers of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.proc import wait_without_children

ray = pytest.importorskip("ray", reason="Ray is not installed")
from ray.cluster_utils import Cluster  # noqa: E402

import ringloader.ray  # noqa: E402

# CPUs that the head has, where the test is, and each other node. Ray starts as many processes with the node.
HEAD_CPUS, NODE_CPUS = 6, 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "cluster":
            # A cluster takes seconds to start.
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.rings_only)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster whose head is this machine, for all tests: it takes seconds to start."""
    # Workers find modules as on any machine: by what is installed there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS})
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()
    left = wait_without_children(20)
    for pid in left:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
    assert not left, f"processes outlive the cluster: {left}"


@pytest.fixture(autouse=True)
def _no_process_left() -> None:
    """The cluster's processes are this one's children: the cluster says at its end what is left."""


@pytest.fixture(scope="package")
def workers(cluster: Cluster) -> Iterator[ringloader.ray.Workers]:
    """Workers that most tests share: an actor takes seconds to start."""
    assert cluster.address
    with ringloader.ray.Workers(3, num_cpus=0.5) as made:
        yield made


def with_settings(workers: ringloader.ray.Workers, **settings: Any) -> ringloader.ray.Workers:
    """Returns the same actors as workers with other arguments."""
    # A pool has no copies.
    made = object.__new__(type(workers))
    vars(made).update(vars(workers))
    for name, value in settings.items():
        assert hasattr(made, f"_{name}"), name
        setattr(made, f"_{name}", value)
    return made


def actors() -> list[Any]:
    """Processes of actors of ringloader that run in the cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith("ray::Worker") for part in process.cmdline()):
                found.append(process)
    return found


def wait_for(holds: Any, seconds: float = 30.0) -> None:
    """Waits until a condition holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it does not come to hold"
        time.sleep(0.05)
