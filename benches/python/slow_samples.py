"""Datasets whose samples wait, plainly and as coroutines, and a bare client of the same server."""

from __future__ import annotations

import asyncio
import http.client
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

PAUSE = 0.02
IN_FLIGHT = 64


def even(_index: int) -> float:
    """Returns the seconds that each sample takes: 20 ms."""
    return PAUSE


def uneven(index: int) -> float:
    """Returns the seconds that a sample takes: 1 ms, and one in 50 takes 60 ms."""
    return 0.06 if random.Random(index).random() < 0.02 else 0.001


class Sleeping(Dataset[int]):
    """Samples that sleep."""

    def __init__(self, count: int, seconds: Callable[[int], float] = even) -> None:
        self._count = count
        # The benchmark does not pay for the draws.
        self._seconds = [seconds(index) for index in range(count)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds[index])
        return index


class Awaiting(Sleeping):
    """The same, as coroutines."""

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(self._seconds[index])
        return index


class Counting(Awaiting):
    """The same. A sample is the most samples that were under way at once."""

    under_way = most = 0

    async def __getitem__(self, index: int) -> int:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self._seconds[index])
        self.under_way -= 1
        return self.most


class Ready(Dataset[int]):
    """Samples that are there at once."""

    def __len__(self) -> int:
        return 64_000

    def __getitem__(self, index: int) -> Any:
        return index


class ReadyCoroutines(Ready):
    """The same, as coroutines."""

    async def __getitem__(self, index: int) -> int:
        return index


class Bodies(Dataset[torch.Tensor]):
    """Bodies of answers, one request after another."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._count = count
        self._session: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if self._session is None:
            self._session = http.client.HTTPConnection(self._address.removeprefix("http://"))
        self._session.request("GET", f"/{index}")
        return torch.frombuffer(bytearray(self._session.getresponse().read()), dtype=torch.uint8)


class BodiesAtOnce(Bodies):
    """The same, as coroutines."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.get(f"{self._address}/{index}") as answer:
            return torch.frombuffer(bytearray(await answer.read()), dtype=torch.uint8)

    async def aclose(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()


async def ask(address: str, count: int) -> None:
    """Reads bodies with 64 requests in flight, and keeps nothing."""
    import aiohttp

    numbers = iter(range(count))

    async def line(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            async with session.get(f"{address}/{number}") as answer:
                await answer.read()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as lines:
        for _ in range(IN_FLIGHT):
            lines.create_task(line(session))
