"""Faults between this process and its server for spawn: no wait is endless, and nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import types
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

from faults.failing_datasets import Numbers
from faults.proc import command_line, is_running, wait_until
from faults.script import finish, run_script, source, start
from faults.test_spawn_server import SERVER, from_server, servers, spawned
from ringloader._start import spawn_client, spawn_keeper, spawn_server

pytestmark = [pytest.mark.limit(120), pytest.mark.rings_only, pytest.mark.slow]


def zombies():
    """Children that have ended and were not waited for."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(pid)
    return found


class Many(Numbers):
    """More descriptors than two messages take."""

    def __init__(self):
        super().__init__(2)
        self.tensors = [torch.full((1,), number) for number in range(600)]

    def __getitem__(self, index):
        return [int(tensor) for tensor in self.tensors] == list(range(600))


def test_more_descriptors_than_a_message_takes(loader_class):
    loader = spawned(loader_class, Many())
    assert list(loader) == [True, True]
    server = servers()
    assert from_server(loader)
    assert servers() == server


def test_a_server_that_lacks_descriptors_refuses(loader_class):
    loader = spawned(loader_class)
    assert from_server(loader)
    server = servers()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(*server, resource.RLIMIT_NOFILE, (8, most))
    assert not from_server(loader)
    resource.prlimit(*server, resource.RLIMIT_NOFILE, (most, most))
    assert from_server(loader)
    assert servers() == server


def test_a_system_that_lets_nobody_adopt(loader_class, monkeypatch):
    """Workers are spawned, and no server is started again and again."""
    loader = spawned(loader_class)
    monkeypatch.setattr(spawn_client, "_PR_SET_CHILD_SUBREAPER", 1 << 20)
    assert not from_server(loader)
    server = servers()
    assert len(server) == 1
    assert not from_server(loader)
    assert servers() == server


def test_a_server_that_was_stopped(loader_class, monkeypatch):
    monkeypatch.setattr(spawn_client, "_ANSWERS_WITHIN", 1.0)
    loader = spawned(loader_class)
    assert from_server(loader)
    first = servers()
    os.kill(*first, signal.SIGSTOP)
    assert from_server(loader)
    assert len(servers()) == 1 and servers() != first
    # While it imports.
    monkeypatch.setattr(spawn_client, "_IMPORTS_WITHIN", 1.0)
    monkeypatch.setattr(spawn_keeper, "keeper", spawn_keeper.Keeper())
    other = spawned(loader_class)
    os.kill(spawn_keeper.keeper._server._pid, signal.SIGSTOP)
    assert not from_server(other)
    assert spawn_keeper.keeper._server is None


def test_a_daemon_has_no_server(loader_class, monkeypatch):
    """A daemon may start no workers."""
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


def test_a_signal_handler_that_starts_workers(loader_class, monkeypatch):
    """While this thread asks the server."""
    receive = spawn_client.Server._receive
    found = []

    def interrupted(server):
        if not found:
            found.append(None)
            found.append(from_server(spawned(loader_class)))
        return receive(server)

    monkeypatch.setattr(spawn_client.Server, "_receive", interrupted)
    assert from_server(spawned(loader_class))
    assert found == [None, False]


def test_an_interrupt_while_a_worker_starts(loader_class, monkeypatch, capfd):
    receive = spawn_client.Server._receive
    for number in (1, 2):
        loader = spawned(loader_class)
        calls = []

        def interrupted(server, number=number, calls=calls):
            message = receive(server)
            calls.append(message)
            if len(calls) == number:
                raise KeyboardInterrupt
            return message

        monkeypatch.setattr(spawn_client.Server, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        monkeypatch.setattr(spawn_client.Server, "_receive", receive)
        assert servers() == set()
        worker = spawn_server.answered(calls[0])
        assert wait_until(lambda worker=worker: not is_running(worker), 20)
        assert number == 1 or zombies() == []
        assert capfd.readouterr().err == ""
        assert from_server(loader)


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
    assert not [line for line in lines if SERVER in line and f", {process.pid})" in line]


def test_the_server_holds_nobodys_streams(loader_class):
    loader = spawned(loader_class)
    assert from_server(loader)
    (server,) = servers()
    open_files = {entry.name: str(entry.readlink()) for entry in Path(f"/proc/{server}/fd").iterdir()}
    assert {open_files.pop(number) for number in "012"} == {"/dev/null"}
    # The channel, and the main process. Newer versions of libffi keep themselves open.
    others = [name for name in open_files.values() if "/libffi.so" not in name]
    assert len(others) == 2, open_files
    del loader
    gc.collect()


def _forget_devices(monkeypatch):
    for name in ("cuda", "xpu", "mps", "mtia"):
        monkeypatch.setattr(getattr(torch, name), "_is_in_bad_fork", lambda: False, raising=False)


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps", "mtia", "hpu", "privateuseone"])
@pytest.mark.parametrize("tells", ["_is_in_bad_fork", "is_initialized"])
def test_devices_must_be_usable_in_a_worker(monkeypatch, name, tells):
    # This process has some, and tests before may have asked the driver for its devices.
    monkeypatch.setattr(spawn_server, "_other_threads", list)
    _forget_devices(monkeypatch)
    here = os.getpid()
    if tells == "_is_in_bad_fork":
        ask = {tells: lambda: os.getpid() != here, "is_initialized": lambda: False}
    else:
        ask = {tells: lambda: True}
    assert spawn_server.missed_after_fork() is None
    monkeypatch.setattr(torch, name, types.SimpleNamespace(**ask), raising=False)
    assert spawn_server.missed_after_fork() == f"the device {name}"
    assert zombies() == []


def test_a_device_that_cannot_say_whether_it_is_usable(monkeypatch):
    _forget_devices(monkeypatch)

    def unavailable():
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch, "hpu", types.SimpleNamespace(_is_in_bad_fork=unavailable), raising=False)
    assert spawn_server.missed_after_fork() == "a device"


def test_threads_that_end_before_a_fork_are_not_missed():
    """Threads of numpy's pool are not missed; those of torch's, which a product of its starts, are."""
    body = """
        import numpy
        from ringloader._start import spawn_server
        numpy.ones((500, 500)) @ numpy.ones((500, 500))
        threads = len(os.listdir("/proc/self/task"))
        print(threads > 1 or os.cpu_count() == 1, spawn_server.missed_after_fork())
        torch.set_num_threads(3)
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        others = spawn_server.missed_after_fork()
        print(others is not None and others.startswith("threads (python, python"))
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "MKL_THREADING_LAYER": "GNU"}
    program = [sys.executable, "-W", "error", "-c", source("ringloader", body)]
    path = [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    said = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert (said.stderr, said.stdout) == ("", "True None\nTrue\n")


def test_a_server_that_is_killed_each_time(loader_class, monkeypatch, tmp_path, caplog):
    """Two in a row, and no third: not for another loader either."""
    caplog.set_level("INFO", "ringloader")
    tries = tmp_path / "tries"
    wrapper = tmp_path / "python"
    kill = f"echo >> {tries}; kill -9 $$"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *{SERVER}*) {kill};; esac\nexec {sys.executable} "$@"\n',
    )
    wrapper.chmod(0o755)
    executable = multiprocessing.spawn.get_executable()
    monkeypatch.setattr(spawn_keeper, "keeper", spawn_keeper.Keeper())
    multiprocessing.set_executable(str(wrapper))
    try:
        assert not from_server(spawned(loader_class))
        assert not from_server(spawned(loader_class))
    finally:
        multiprocessing.set_executable(executable)
    assert tries.read_text() == "\n\n"
    (said,) = [record.getMessage() for record in caplog.records]
    assert "2 servers in a row were lost" in said


def test_servers_that_are_lost_now_and_then(loader_class, monkeypatch):
    """A worker that came from one in between starts the count again."""
    monkeypatch.setattr(spawn_keeper, "keeper", spawn_keeper.Keeper())
    loader = spawned(loader_class)
    seen = set()
    for _ in range(3):
        assert from_server(loader)
        seen |= servers()
        # While it is idle, and when it is asked.
        os.kill(*servers(), signal.SIGSTOP if len(seen) == 2 else signal.SIGKILL)
        monkeypatch.setattr(spawn_client, "_ANSWERS_WITHIN", 1.0)
    assert from_server(loader)
    assert len(seen) == 3


@pytest.mark.parametrize("loader_name", ["torch", "ringloader"])
def test_many_descriptors(tmp_path, loader_name):
    """Descriptors of the server and of the workers are above 1,023, which `select` does not take."""
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
                    from ringloader._start import spawn_keeper
                    pids.add(spawn_keeper.keeper._server and spawn_keeper.keeper._server._pid)
                    assert all("{SERVER}" in command_line(worker.pid) for worker in iterator._workers)
                print([int(batch[0, 0]) for batch in iterator])
            assert not tell or (len(pids) == 1 and None not in pids), pids
    """
    ended = run_script(loader_name, body, tmp_path)
    assert (ended.code, ended.err, ended.out) == (0, "", "[0, 1, 2, 3]\n" * 2)
