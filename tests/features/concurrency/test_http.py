"""Samples from an HTTP server of this machine, by aiohttp and by fsspec: bodies, errors, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from benches.python.http_server import server
from benches.python.slow_samples import BodiesAtOnce
from torch.utils.data import Dataset

from faults.proc import is_running, wait_until
from programs import client
from ringloader import DataLoader

aiohttp = pytest.importorskip("aiohttp")
pytestmark = pytest.mark.rings_only

SIZE = 300


class Files(Dataset[Any]):
    """The same bodies, by a file system of fsspec."""

    def __init__(self, address: str, count: int) -> None:
        self.address = address
        self.count = count
        self.fs: Any = None

    def __len__(self) -> int:
        return self.count

    async def __getitem__(self, index: int) -> torch.Tensor:
        if self.fs is None:
            fsspec = pytest.importorskip("fsspec")
            self.fs = fsspec.filesystem("http", asynchronous=True, skip_instance_cache=True)
        body = await self.fs._cat_file(f"{self.address}/{index}")
        return torch.frombuffer(bytearray(body), dtype=torch.uint8)

    async def aclose(self) -> None:
        if self.fs is not None:
            await (await self.fs.set_session()).close()


@pytest.mark.parametrize("kind", [BodiesAtOnce, Files])
def test_bodies_come_in_order_and_many_at_once(kind: Any) -> None:
    with server(0.2, SIZE) as address:
        loader: Any = DataLoader(
            kind(address, 160), batch_size=8, num_workers=2, prefetch_factor=8, worker_concurrency=32
        )
        for _ in range(2):
            begun = time.perf_counter()
            bodies = torch.cat(list(loader))
            seconds = time.perf_counter() - begun
            assert bodies.shape == (160, SIZE)
            assert torch.equal(bodies, torch.arange(160, dtype=torch.uint8)[:, None].expand(160, SIZE))
            # One after another, two workers take sixteen seconds.
            assert seconds < 10


class Broken(BodiesAtOnce):
    """Some bodies are asked for where no server is."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        if index % 10 == 3:
            async with aiohttp.ClientSession() as session, session.get("http://127.0.0.1:9/"):
                pass
        return await super().__getitem__(index)


def test_an_error_of_the_client_is_the_error_of_its_batch() -> None:
    with server(0.01, SIZE) as address:
        loader: Any = DataLoader(Broken(address, 20), batch_size=5, num_workers=2, worker_concurrency=8)
        iterator = iter(loader)
        for first in (0, 10):
            with pytest.raises(
                RuntimeError, match="Caught ClientConnectorError in DataLoader worker process"
            ):
                next(iterator)
            assert next(iterator)[:, 0].tolist() == list(range(first + 5, first + 10))
        with pytest.raises(StopIteration):
            next(iterator)


PROGRAM = """
import os, signal, sys, time, warnings
from benches.python.http_server import server
from benches.python.slow_samples import BodiesAtOnce
from ringloader import DataLoader

warnings.simplefilter("default", ResourceWarning)
end = sys.argv[1]
with server(0.02, 300) as address:
    loader = DataLoader(
        BodiesAtOnce(address, 400),
        batch_size=8,
        num_workers=2,
        worker_concurrency=16,
        persistent_workers=end != "epoch",
    )
    iterator = iter(loader)
    next(iterator)
    if end == "whole":
        assert sum(1 for _ in iterator) == 49
        assert sum(1 for _ in loader) == 50
    elif end == "again":
        iterator = iter(loader)
        next(iterator)
    elif end == "shutdown":
        loader.shutdown()
    elif end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    elif end == "killed":
        print(*(worker.pid for worker in iterator._workers), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    del iterator
    loader.shutdown()
    assert time.monotonic() - begun < 5
"""


@pytest.mark.parametrize("end", ["whole", "epoch", "again", "shutdown", "interrupt", "killed"])
def test_nothing_is_left_and_nothing_complains(end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = client.start(
        ["-c", PROGRAM, end], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    printed, complaints = program.communicate(timeout=150)
    if end == "killed":
        assert program.returncode == -signal.SIGKILL
        workers = list(map(int, printed.split()))
        assert len(workers) == 2
        assert wait_until(lambda: not any(map(is_running, workers)), 5)
    elif end == "interrupt":
        assert complaints.splitlines()[-1:] == ["KeyboardInterrupt"]
    else:
        assert program.returncode == 0, complaints
    for words in ("Unclosed", "was destroyed", "never awaited", "never retrieved", "ResourceWarning"):
        assert words not in complaints, complaints
    assert end == "interrupt" or complaints == ""
