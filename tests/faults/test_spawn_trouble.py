"""What goes wrong between this process and its server for spawn: nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import signal
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest
import torch

from faults.failing_datasets import Numbers
from faults.proc import command_line, descendants, wait_until
from faults.script import finish, run_script, start
from faults.test_spawn_server import SERVER, from_server, servers, spawned
from ringloader._features import spawn_server

pytestmark = [pytest.mark.limit(300), pytest.mark.rings_only, pytest.mark.slow]


class Many(Numbers):
    """More descriptors than a message takes."""

    def __init__(self):
        super().__init__(2)
        self.tensors = [torch.full((1,), number) for number in range(600)]

    def __getitem__(self, index):
        return [int(tensor) for tensor in self.tensors] == list(range(600))


def test_more_descriptors_than_a_message_takes(loader_class, monkeypatch):
    """Such a worker is spawned, and all that start later."""
    monkeypatch.setattr(spawn_server, "_failures", [])
    loader = spawned(loader_class, Many())
    assert not from_server(loader)
    assert list(loader) == [True, True]
    assert not from_server(spawned(loader_class))


def test_a_daemon_has_no_server(loader_class, monkeypatch):
    """It may start no workers."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    _loader = spawned(loader_class)
    assert servers() == set()


class Interruptible(Numbers):
    def __getitem__(self, index):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_can_be_interrupted(loader_class):
    """The server cannot."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert list(spawned(loader_class, Interruptible(1))) == [True]
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_sentinel_of_a_worker(loader_class):
    loader = spawned(loader_class)
    iterator = iter(loader)
    (worker,) = iterator._workers
    assert SERVER in command_line(worker.pid)
    next(iterator)
    assert not connection.wait([worker.sentinel], 0.2), "it is ready while the worker runs"
    assert len(list(iterator)) == 3
    assert connection.wait([worker.sentinel], 20)


def test_an_interrupt_while_a_worker_starts(loader_class, monkeypatch):
    loader = spawned(loader_class)
    assert from_server(loader)
    server, before = servers(), descendants()
    read = forkserver.read_signed

    def interrupted(fd):
        read(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    monkeypatch.setattr(forkserver, "read_signed", read)
    gc.collect()
    assert wait_until(lambda: descendants() <= before, 20)
    assert from_server(loader)
    assert servers() == server


def test_children_that_nobody_waits_for(tmp_path):
    """`SIGCHLD` is ignored: the system takes them away."""
    body = """
        from faults.proc import descendants
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
            del loader
            gc.collect()
            print(descendants())
            loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
            print(len(list(loader)))
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "set()\n4\n", "")


def test_the_program_ends_while_the_server_imports(tmp_path):
    body = """
        if __name__ == "__main__":
            loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
    """
    process = start("ringloader", body, tmp_path)
    ended = finish(process, 50)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    lines = [command_line(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not [line for line in lines if SERVER in line and str(tmp_path) in line]


@pytest.mark.parametrize("loader_name", ["torch", "ringloader"])
def test_many_descriptors(tmp_path, loader_name):
    """Those of the server and of the workers are above 1,023, which `select` does not take."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 4096:
        pytest.skip("no more descriptors are allowed")
    body = f"""
        import resource
        from faults.proc import command_line
        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, {most}))
            kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
            loader = DataLoader(Numbers(4), num_workers=2, multiprocessing_context="spawn")
            tell, pids = {loader_name == "ringloader"}, set()
            for _ in range(2):
                iterator = iter(loader)
                if tell:
                    from ringloader._features import spawn_server
                    pids.update(server._forkserver_pid for server in spawn_server._servers)
                    assert all("{SERVER}" in command_line(worker.pid) for worker in iterator._workers)
                print([int(batch[0, 0]) for batch in iterator])
            assert not tell or (len(pids) == 1 and None not in pids), pids
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.err, ended.out) == (0, "", "[0, 1, 2, 3]\n" * 2)
