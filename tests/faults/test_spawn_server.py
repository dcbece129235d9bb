"""Spawned workers come from a server, which is left nowhere; where it cannot be had, they are spawned."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import sys
import textwrap
import threading
import time
from multiprocessing import connection, context, popen_spawn_posix
from pathlib import Path

import numpy as np
import pytest

from faults.failing_datasets import Numbers
from faults.proc import Snapshot, command_line, descendants, is_running, wait_until
from faults.script import finish, run_script, start
from parity.datasets import identity
from ringloader._features import spawn_server
from ringloader._transport.processes import ProcessTransport
from small_datasets import Made

pytestmark = pytest.mark.limit(300)

SERVER = spawn_server.__name__


def servers():
    """Returns the process ids of this process's servers that are running."""
    return {server._forkserver_pid for server in list(spawn_server._servers)} & descendants()


@pytest.fixture(autouse=True)
def _begin_anew(monkeypatch):
    """Without what other tests have left."""
    monkeypatch.setattr(spawn_server, "_failures", [])
    gc.collect()


def is_from_server(process):
    return SERVER in command_line(process.pid)


def spawned(loader_class, dataset=None, method="spawn"):
    return loader_class(
        Numbers(4) if dataset is None else dataset,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=identity,
    )


def from_server(loader):
    """Tells whether the workers of an epoch come from the server."""
    iterator = iter(loader)
    assert len(list(map(str, iterator))) == len(loader)
    process = iterator._workers[0]
    assert process.exitcode == 0
    del iterator
    iterator = iter(loader)
    found = is_from_server(iterator._workers[0])
    assert isinstance(iterator._workers[0], context.SpawnProcess)
    return found


@pytest.mark.rings_only
def test_the_server_goes_with_its_last_loader(loader_class):
    multiprocessing.resource_tracker.ensure_running()
    before = Snapshot.take()
    one = spawned(loader_class)
    assert len(servers()) == 1, "it starts with the first loader"
    other = spawned(loader_class)
    assert from_server(one)
    server = servers()
    del one
    gc.collect()
    assert from_server(other)
    assert servers() == server
    iterator = iter(other)
    del other
    gc.collect()
    assert servers() == server, "it knows how the worker will end"
    assert len(list(iterator)) == 4
    iterator._workers[0].join(20)
    assert iterator._workers[0].exitcode == 0
    assert servers() == set(), "also where the iterator is kept"
    del iterator
    before.assert_nothing_left()


@pytest.mark.rings_only
def test_a_server_that_was_killed_is_replaced(loader_class):
    loader = spawned(loader_class)
    assert from_server(loader)
    first = servers()
    os.kill(*first, signal.SIGKILL)
    assert wait_until(lambda: not servers(), 20)
    assert from_server(loader)
    assert len(servers()) == 1 and servers() != first


class Sleeps(Numbers):
    def __getitem__(self, index):
        if index:
            time.sleep(60)
        return index


@pytest.mark.rings_only
def test_workers_outlive_a_server_that_was_killed(loader_class, monkeypatch):
    """They are known to live, and end with their iterator, which knows their ends too."""
    loader = spawned(loader_class, Sleeps(2))
    assert from_server(spawned(loader_class))
    monkeypatch.setattr(ProcessTransport, "_join_seconds", 0.5)
    (server,) = servers()
    iterator = iter(loader)
    assert next(iterator) == 0
    (worker,) = iterator._workers
    os.kill(server, signal.SIGKILL)
    assert wait_until(lambda: not is_running(server), 20)
    assert worker.is_alive() and worker.exitcode is None
    assert not connection.wait([worker.sentinel], 0.1)
    begun = time.monotonic()
    del iterator
    gc.collect()
    assert 0.4 < time.monotonic() - begun < 30, "a sample takes a minute"
    assert not is_running(worker.pid) and not worker.is_alive()


SENT_TO_GROUP = """
    # In workers too, which run the main module.
    sent = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGRTMAX]
    for number in sent:
        signal.signal(number, lambda *_: None)

    if __name__ == "__main__":
        from faults.proc import is_running
        from ringloader._features import spawn_server
        def loader(data=Numbers):
            return DataLoader(data(8), num_workers=1, multiprocessing_context="spawn")
        kept = loader()
        (server,) = [one._forkserver_pid for one in spawn_server._servers]
        # torch's handler ends a worker by this one.
        os.killpg(0, sent[0])
        iterator = iter(kept)
        assert len(next(iterator)) == 1
        for number in sent[1:]:
            os.killpg(0, number)
            time.sleep(0.05)
        (worker,) = iterator._workers
        print(worker.is_alive(), len(list(iterator)), len(list(loader())))
        print([one._forkserver_pid for one in spawn_server._servers] == [server], is_running(server))
        # No worker has what the server has blocked.
        print({text for (text,) in loader(Blocked)})
        iterator = iter(loader())
        iterator._workers[0].terminate()
        iterator._workers[0].join()
        print(iterator._workers[0].exitcode)
"""


@pytest.mark.rings_only
def test_what_is_sent_to_the_programs_group_leaves_the_server(tmp_path):
    blocked = """
    class Blocked(Numbers):
        def __getitem__(self, index):
            return ",".join(str(int(number)) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    ended = run_script("ringloader", textwrap.dedent(blocked) + textwrap.dedent(SENT_TO_GROUP), tmp_path)
    # multiprocessing's resource tracker says that it was ended.
    assert (ended.code, "Traceback" in ended.err) == (0, False)
    assert ended.out.splitlines() == ["True 7 8", "True True", "{''}", "-15"]


@pytest.mark.slow
@pytest.mark.rings_only
def test_a_server_that_is_killed_while_it_imports(loader_class, caplog):
    """The workers are spawned, and no other server is tried."""
    caplog.set_level("INFO", "ringloader")
    loader = spawned(loader_class)
    (server,) = servers()
    os.kill(server, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (server, signal.SIGKILL)).start()
    assert not from_server(loader)
    assert not from_server(spawned(loader_class))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("ringloader: workers are spawned one by one: ")


@pytest.mark.rings_only
def test_the_last_loader_goes_while_the_server_imports(loader_class):
    loader = spawned(loader_class)
    (server,) = servers()
    # It imports for ever.
    os.kill(server, signal.SIGSTOP)
    del loader
    gc.collect()
    assert not is_running(server)


@pytest.mark.rings_only
def test_workers_do_not_import_torch(loader_class):
    """An import takes more than a second of the processor."""
    loader = spawned(loader_class, Spent())
    assert from_server(loader)
    assert all(seconds < 0.5 for seconds in loader)


class Spent(Numbers):
    def __init__(self):
        super().__init__(2)

    def __getitem__(self, index):
        return time.process_time()


def place(_index):
    return os.environ.get("RINGLOADER_TEST"), os.umask(0o22), resource.getrlimit(resource.RLIMIT_CORE)


class Cores(Numbers):
    def __getitem__(self, index):
        return os.sched_getaffinity(0)


@pytest.mark.slow
@pytest.mark.rings_only
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_worker_runs_where_its_parent_may(loader_class):
    loader = spawned(loader_class, Cores(1))
    every = os.sched_getaffinity(0)
    assert next(iter(loader)) == every
    try:
        os.sched_setaffinity(0, {min(every)})
        assert next(iter(loader)) == {min(every)}
    finally:
        os.sched_setaffinity(0, every)


@pytest.mark.slow
@pytest.mark.rings_only
def test_what_a_spawned_worker_inherits(loader_class, monkeypatch):
    """A change of what children begin with makes another server."""
    loader = spawned(loader_class, Made(place, 2))
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    assert next(iter(loader)) == (None, 0o22, limit)
    first = servers()
    monkeypatch.setenv("RINGLOADER_TEST", "1")
    assert next(iter(loader)) == ("1", 0o22, limit)
    second = servers()
    assert first != second
    before = os.umask(0o77)
    try:
        assert next(iter(loader)) == ("1", 0o77, limit)
    finally:
        os.umask(before)
    assert next(iter(loader)) == ("1", 0o22, limit)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limit[1]))
    try:
        assert next(iter(loader)) == ("1", 0o22, (0, limit[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limit)
    assert len(servers()) == 1


@pytest.mark.rings_only
def test_output_goes_where_the_parents_goes(loader_class, tmp_path):
    loader = spawned(loader_class, Prints())
    kept = os.dup(1)
    try:
        for name in ("one", "two"):
            sys.stdout.flush()
            with (tmp_path / name).open("w") as file:
                os.dup2(file.fileno(), 1)
            list(loader)
            assert (tmp_path / name).read_text() == "made\nmade\n"
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class Prints(Numbers):
    def __init__(self):
        super().__init__(2)

    def __getitem__(self, index):
        sys.stdout.write("made\n")
        return index


@pytest.mark.slow
@pytest.mark.rings_only
def test_another_executable_makes_another_server(loader_class, tmp_path):
    loader = spawned(loader_class)
    assert from_server(loader)
    first = servers()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\ntouch "$0.ran"\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(wrapper))
    try:
        assert from_server(loader)
        assert wrapper.with_name("python.ran").exists()
        assert servers() != first
        multiprocessing.set_executable("/no/such")
        with pytest.raises((RuntimeError, OSError)):
            list(loader)
    finally:
        multiprocessing.set_executable(executable)


@pytest.mark.slow
@pytest.mark.rings_only
def test_another_priority_makes_another_server(tmp_path):
    body = """
        class Nice(Numbers):
            def __getitem__(self, index):
                return os.getpriority(os.PRIO_PROCESS, 0)
        if __name__ == "__main__":
            loader = DataLoader(Nice(1), num_workers=1, batch_size=None, multiprocessing_context="spawn")
            found = [*loader]
            os.nice(3)
            print([*found, *loader])
    """
    ended = run_script("ringloader", body, tmp_path)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert (ended.err, ended.out) == ("", f"{[nice, nice + 3]}\n")


class OwnProcess(context.SpawnProcess):
    pass


class OwnContext(context.SpawnContext):
    Process = OwnProcess


class OwnPopen(popen_spawn_posix.Popen):
    pass


@pytest.mark.slow
@pytest.mark.rings_only
@pytest.mark.parametrize("case", ["switch", "process", "popen", "executable"])
def test_where_workers_are_spawned(loader_class, monkeypatch, tmp_path, case):
    method = "spawn"
    if case == "switch":
        monkeypatch.setenv(spawn_server.SWITCH, "0")
    elif case == "process":
        method = OwnContext()
    elif case == "popen":
        monkeypatch.setattr(context.SpawnProcess, "_Popen", staticmethod(lambda process: OwnPopen(process)))
    else:
        # Runs Python, but not the server.
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\ncase "$*" in *{SERVER}*) exit 1;; esac\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        executable = multiprocessing.spawn.get_executable()
        multiprocessing.set_executable(str(wrapper))
    try:
        assert not from_server(spawned(loader_class, method=method))
    finally:
        if case == "executable":
            multiprocessing.set_executable(executable)


@pytest.mark.rings_only
def test_the_default_context(tmp_path):
    body = """
        import multiprocessing
        from faults.proc import command_line
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn", force=True)
            iterator = iter(DataLoader(Numbers(4), num_workers=1))
            worker = iterator._workers[0]
            print(type(worker).__name__, "_features.spawn_server" in command_line(worker.pid))
            print(len(list(iterator)))
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.err, ended.out.split()) == (0, "", ["Process", "True", "4"])


STARTS = {
    "native thread": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "libc.pthread_create(ctypes.byref(ctypes.c_void_p()), None, libc.pause, None)\n"
    ),
    # A device that was initialised here, and says so in a forked child.
    "device": (
        "import os, torch, types\nhere = os.getpid()\n"
        "ours = types.ModuleType('ours')\n"
        "ours._is_in_bad_fork = lambda: os.getpid() != here\nours.manual_seed_all = lambda seed: None\n"
        "torch._register_device_module('privateuseone', ours)\n"
    ),
}


@pytest.mark.slow
@pytest.mark.rings_only
@pytest.mark.cold("each has an interpreter with its own start")
@pytest.mark.parametrize("starts", STARTS)
def test_what_a_backend_of_torchs_starts(tmp_path, monkeypatch, starts):
    """It would be missing in what is forked, so nothing is."""
    body = "".join(f"    {line}\n" for line in STARTS[starts].splitlines())
    (tmp_path / "our_backend.py").write_text(f"def load():\n{body}")
    about = tmp_path / "our_backend-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: our_backend\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nours = our_backend:load\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    # Without numpy's pool.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    body = """
        from faults.proc import command_line
        class Started(Numbers):
            def __getitem__(self, index):
                bad = getattr(getattr(torch, "privateuseone", None), "_is_in_bad_fork", None)
                # The other one is torch's queue's, with torch.
                return len(os.listdir("/proc/self/task")) > 1 or bad is not None, bad and bad()
        if __name__ == "__main__":
            loader = DataLoader(
                Started(2), num_workers=1, batch_size=None, collate_fn=tuple, multiprocessing_context="spawn"
            )
            iterator = iter(loader)
            print("_features.spawn_server" in command_line(iterator._workers[0].pid), list(iterator))
    """
    said = []
    for name in ("torch", "ringloader"):
        ended = run_script(name, body, tmp_path)
        # Python 3.15 warns of a main module that it has started itself.
        errors = [line for line in ended.err.splitlines() if "Module globals is missing" not in line]
        assert (ended.code, errors) == (0, [])
        said.append(ended.out)
    assert said[0].startswith("False ") and said[1] == said[0]


PARENT = """
    def main():
        loader = DataLoader(Numbers(10**6), num_workers=2, multiprocessing_context="spawn")
        iterator = iter(loader)
        next(iterator)
        if {forks} and os.fork() == 0:
            time.sleep(600)
        print("ready", flush=True)
        time.sleep(600)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.rings_only
@pytest.mark.parametrize("forks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_main_process_is_killed(tmp_path, forks):
    """Server and workers end, also where a forked child of the main process lives on."""
    process = start("ringloader", PARENT.format(forks=forks), tmp_path)
    try:
        assert process.stdout.readline() == "ready\n"
        below = {pid: command_line(pid) for pid in descendants(process.pid)}
        ours = {pid for pid, line in below.items() if SERVER in line}
        assert len(ours) == 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
        assert wait_until(lambda: not any(map(is_running, ours)), 20)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        finish(process, 20)


@pytest.mark.rings_only
def test_an_interrupt_is_for_the_main_process(tmp_path):
    """SIGINT for the whole group, as from a terminal, while the server waits."""
    body = """
        if __name__ == "__main__":
            loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
            assert len(list(loader)) == 4
            try:
                print("ready", flush=True)
                # A signal just before a sleep waits for its end: Python looks for signals between calls.
                while True:
                    time.sleep(0.05)
            except KeyboardInterrupt:
                print(len(list(loader)))
    """
    process = start("ringloader", body, tmp_path)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(process, 50)
    assert (ended.code, ended.out, ended.err) == (0, "4\n", "")


@pytest.mark.rings_only
@pytest.mark.parametrize(
    "after", [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.8, marks=pytest.mark.slow)]
)
def test_an_interrupt_while_the_server_starts(tmp_path, after):
    """It is the main process's alone. The server imports for two seconds, and would print where it was."""
    body = f"""
        from ringloader._features import spawn_server
        if __name__ == "__main__":
            loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
            (server,) = [one._forkserver_pid for one in spawn_server._servers]
            try:
                time.sleep({after})
                os.killpg(0, signal.SIGINT)
                time.sleep(600)
            except KeyboardInterrupt:
                print(len(list(loader)), [one._forkserver_pid for one in spawn_server._servers] == [server])
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "4 True\n", "")


@pytest.mark.rings_only
def test_an_interrupt_within_the_start_of_the_server_is_not_lost(tmp_path):
    body = """
        from multiprocessing import util
        spawnv = util.spawnv_passfds
        def interrupted(*args):
            os.kill(os.getpid(), signal.SIGINT)
            return spawnv(*args)
        if __name__ == "__main__":
            multiprocessing.resource_tracker.ensure_running()
            util.spawnv_passfds = interrupted
            try:
                DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn")
            except KeyboardInterrupt:
                util.spawnv_passfds = spawnv
                print(len(list(DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn"))))
            print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, "4\nset()\n", "")


@pytest.mark.rings_only
def test_forked_children_leave_the_server_alone(loader_class):
    loader = spawned(loader_class)
    assert from_server(loader)
    forked = loader_class(Numbers(4), batch_size=None, num_workers=1, multiprocessing_context="fork")
    (alive,) = [server._forkserver_alive_fd for server in list(spawn_server._servers)]
    child = os.fork()
    if child == 0:
        kept = Path(f"/proc/self/fd/{alive}").exists() or bool(spawn_server._servers)
        del loader
        gc.collect()
        os._exit(kept)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.allclose([float(batch[0]) for batch in forked], range(4))
    server = servers()
    assert len(server) == 1
    assert from_server(loader)
    assert servers() == server


@pytest.mark.rings_only
def test_the_server_finds_modules_where_the_program_does(tmp_path):
    """Not where a new interpreter would: Python before 3.12.4 leaves that out."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "numpy.py").write_text("raise RuntimeError('found')\n")
    body = f"""
        if __name__ == "__main__":
            os.chdir({str(tmp_path / "inside")!r})
            iterator = iter(DataLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn"))
            from faults.proc import command_line
            print({SERVER!r} in command_line(iterator._workers[0].pid), len(list(iterator)))
    """
    ended = run_script("ringloader", body, tmp_path)
    assert (ended.code, ended.err, ended.out) == (0, "", "True 4\n")
