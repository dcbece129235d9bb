"""Workers on a Ray cluster beside local ones: batches per second, and the main process's time for each.

``python -m benches.python.ray_workers``: the cluster is of this machine, so batches go over its loopback. The
first table has batches that cost nothing, the second ones that sleep for a quarter of a second. The first has
a bound, too: processes that make the same batches and send their bytes over sockets, and do nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import threading
import time
from typing import Any

import torch
import torch.utils.data

import ringloader

KINDS = ("local", "ray")
BARE = "sockets"
# Of a connection's buffers: no other size was faster here.
_BUFFER = 256 << 10


class Ready(torch.utils.data.Dataset[torch.Tensor]):
    """Batches of so many bytes, each after a sleep."""

    def __init__(self, count: int, size: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.batch = torch.zeros(size, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.batch.clone()


def _fit(connection: socket.socket) -> socket.socket:
    """Returns the connection, with what suits one within a machine."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER)
    return connection


def _send(dataset: Ready, count: int, address: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    with _fit(socket.create_connection(address)) as connection:
        for index in range(count):
            connection.sendall(dataset[index].numpy())


def _receive(connection: socket.socket, size: int, begin: threading.Barrier, before: int, count: int) -> None:
    into = memoryview(bytearray(size))
    for index in range(count):
        if index == before:
            begin.wait()
        assert connection.recv_into(into, size, socket.MSG_WAITALL) == size


def bare(dataset: Ready, workers: int) -> tuple[float, float]:
    """As ``measure``, of bare sockets: a process and a thread of this one for each connection."""
    count = dataset.count // workers
    before = count // 5
    context = multiprocessing.get_context("spawn")
    begin = threading.Barrier(workers + 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (dataset, count, server.getsockname())
        processes = [context.Process(target=_send, args=arguments) for _ in range(workers)]
        for process in processes:
            process.start()
        connections = [_fit(server.accept()[0]) for _ in range(workers)]
        arguments = (dataset.batch.nbytes, begin, before, count)
        threads = [threading.Thread(target=_receive, args=(one, *arguments)) for one in connections]
        for thread in threads:
            thread.start()
        begin.wait()
        began, processor = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.join()
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()
    batches = workers * (count - before)
    return batches / seconds, processor / batches


def measure(dataset: Ready, kind: str, workers: Any) -> tuple[float, float]:
    """Returns batches per second and the main process's seconds for each, but for the epoch's first fifth."""
    if kind == BARE:
        return bare(dataset, workers.num_workers)
    pool = workers if kind == "ray" else None
    loader = ringloader.DataLoader(
        dataset, batch_size=None, num_workers=workers.num_workers, worker_pool=pool
    )
    iterator = iter(loader)
    before = dataset.count // 5
    for _ in range(before):
        next(iterator)
    began, processor = time.perf_counter(), time.process_time()
    count = sum(1 for _ in iterator)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    assert ringloader.report(loader).path == ("ray" if kind == "ray" else "native")
    return count / seconds, processor / count


def table(title: str, cases: dict[str, Ready], kinds: tuple[str, ...], workers: Any, rounds: int) -> None:
    """Prints medians of ``rounds``."""
    others = [kind for kind in kinds if kind != "local"]
    print(
        f"\n| {title} | "
        + " | ".join(f"{kind}, per s | {kind}, main ms" for kind in kinds)
        + " | "
        + " | ".join(f"{kind} / local" for kind in others)
        + " |"
    )
    print("|---|" + "--:|" * (2 * len(kinds) + len(others)))
    for name, dataset in cases.items():
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                found[kind].append(measure(dataset, kind, workers))
        rates = {kind: statistics.median(rate for rate, _ in of) for kind, of in found.items()}
        mains = {kind: statistics.median(main for _, main in of) for kind, of in found.items()}
        cells = [f"{rates[kind]:,.1f} | {1000 * mains[kind]:.3f}" for kind in kinds]
        cells += [f"{rates[kind] / rates['local']:.2f}" for kind in others]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints both tables."""
    import ray

    import ringloader.ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=16, logging_level="error", log_to_driver=False)
    cases = {"1 KB": Ready(20_000, 1 << 10), "1 MB": Ready(1000, 1 << 20), "20 MB": Ready(150, 20 << 20)}
    with ringloader.ray.Workers(options.workers) as workers:
        table(f"{options.workers} workers, batches ready", cases, (*KINDS, BARE), workers, options.rounds)
    with ringloader.ray.Workers(4) as workers:
        table("4 workers, 20 MB of 0.25 s", {"20 MB": Ready(120, 20 << 20, 0.25)}, KINDS, workers, 1)


if __name__ == "__main__":
    main()
