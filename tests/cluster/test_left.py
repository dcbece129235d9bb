"""A program that leaves its cluster by `ray.shutdown()`, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.limit(300)

BEGIN = """
import atexit, sys
# After all other functions of the exit.
atexit.register(lambda: print("in a cluster:", ray.is_initialized()))
sys.path.insert(0, sys.argv[2])
# Before Ray, whose functions of the exit come first then.
import torch.utils.data
import ringloader, ray, ringloader.ray
from cluster.datasets import Told, numbers

def join():
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

join()
workers = ringloader.ray.Workers(1, num_cpus=0.1)
loader = ringloader.DataLoader(Told(40), batch_size=4, worker_pool=workers)
assert numbers(list(loader)) == list(range(40))
"""

REST = {
    # The pool goes at the exit, after Ray.
    "ends": "",
    "shuts down": """
ray.shutdown()
workers.shutdown()
assert not ray.is_initialized()
""",
    "drops": """
import gc
ray.shutdown()
del loader, workers
gc.collect()
assert not ray.is_initialized()
""",
    "goes on": """
ray.shutdown()
join()
assert numbers(list(loader)) == list(range(40))
workers.shutdown()
""",
    "leaves an iterator": """
iterator = iter(loader)
next(iterator)
ray.shutdown()
try:
    list(iterator)
except RuntimeError as error:
    assert "ray.shutdown() has left their cluster" in str(error), error
else:
    raise AssertionError("no error")
assert not ray.is_initialized()
join()
assert numbers(list(loader)) == list(range(40))
try:
    list(iterator)
except (RuntimeError, StopIteration):
    pass
workers.shutdown()
""",
}


@pytest.mark.parametrize("rest", REST.values(), ids=REST)
def test_no_other_cluster_is_started_for_one_that_was_left(cluster, rest):
    tests = str(Path(__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + rest, cluster.address, tests],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "in a cluster: False"
