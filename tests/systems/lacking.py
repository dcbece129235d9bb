"""Takes from ringloader's modules what Python lacks on macOS or Windows, at the start of Python.

Only modules of ringloader are refused: torch and the standard library of this Linux need the rest to run.
``RINGLOADER_TEST_SYSTEM`` names the system. It is copied into an environment, and needs no other module.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import multiprocessing.context
import os
import signal
import sys
import types
from typing import Any

VARIABLE = "RINGLOADER_TEST_SYSTEM"
SYSTEMS = ("darwin", "win32")

_OF_LINUX = {
    "os": "memfd_create MFD_* pidfd_open PIDFD_* eventfd* EFD_* sched_* pipe2 posix_fallocate posix_fadvise "
    "splice copy_file_range setns unshare waitid P_PIDFD getrandom",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_SEAL_* F_SETPIPE_SZ F_GETPIPE_SZ F_OFD_*",
    "signal": "SIGRT* SIGSTKFLT SIGPWR SIGPOLL SIGCLD sigtimedwait sigwaitinfo pidfd_send_signal",
    "select": "epoll EPOLL*",
    "mmap": "MAP_POPULATE MAP_STACK MAP_NORESERVE",
    "resource": "prlimit RLIMIT_OFILE RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RT* RLIMIT_SIGPENDING",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
_OF_POSIX = {
    "os": "fork* register_at_fork getuid geteuid getgid getegid getpgid setpgid setsid getpriority "
    "setpriority PRIO_* nice wait wait3 wait4 WNOHANG WNOWAIT WEXITED WIF* P_PID P_ALL pread* pwrite* "
    "sysconf* statvfs fstatvfs ST_* O_CLOEXEC O_DIRECTORY O_NOFOLLOW posix_* sendfile mkfifo killpg "
    "uname getloadavg fchmod fchown chown openpty initgroups",
    "signal": "SIG_BLOCK SIG_UNBLOCK SIG_SETMASK pthread_* setitimer getitimer ITIMER_* alarm pause sigwait "
    "sigpending siginterrupt SIGHUP SIGQUIT SIGTRAP SIGBUS SIGKILL SIGUSR* SIGPIPE SIGALRM SIGCHLD SIGCONT "
    "SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGX* SIGVTALRM SIGPROF SIGWINCH SIGIO SIGSYS SIGIOT",
    "select": "poll POLL*",
    "socket": "AF_UNIX send_fds recv_fds SCM_* CMSG_* AF_NETLINK",
    "mmap": "MAP_* PROT_* MADV_*",
    "faulthandler": "register unregister",
    "time": "clock_gettime* CLOCK_*",
    "sys": "abiflags getdlopenflags setdlopenflags",
    "multiprocessing.reduction": "DupFd sendfds recvfds ACKNOWLEDGE",
}
_MODULES_OF_POSIX = {
    *("fcntl", "resource", "grp", "pwd", "termios", "tty", "pty", "syslog", "posix", "curses", "readline"),
    *(f"multiprocessing.{name}" for name in ("popen_fork", "popen_forkserver", "popen_spawn_posix")),
    "multiprocessing.forkserver",
}
# Folders that are Linux's.
_FOLDERS = ("/proc", "/sys", "/dev/shm")
# Modules through which ringloader opens files.
_OPENERS = {"pathlib", "pathlib._local", "io", "os", "codecs", "tempfile", "glob"}


class _Lacking(types.ModuleType):
    """Stands in front of a module: what a system lacks is no attribute."""

    def __init__(self, module: types.ModuleType, lacks: str, instead: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        words = lacks.split()
        self.__dict__.update(
            _module=module,
            _names={word for word in words if not word.endswith("*")},
            _starts=tuple(word[:-1] for word in words if word.endswith("*")),
            _instead=instead,
        )

    def __getattr__(self, name: str) -> Any:
        if name in self._instead:
            return self._instead[name]
        if name in self._names or (self._starts and name.startswith(self._starts)):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._module) if hasattr(self, name)]


def take_away(system: str) -> None:
    """Refuses ringloader's modules what the Python of a system lacks, from now on."""
    lacks = dict(_OF_LINUX)
    missing: set[str] = set()
    instead: dict[str, dict[str, Any]] = {"sys": {"platform": system}}
    if system == "win32":
        both = _OF_LINUX, _OF_POSIX
        lacks = {name: " ".join(of.get(name, "") for of in both) for name in _OF_LINUX | _OF_POSIX}
        missing = _MODULES_OF_POSIX
        instead["os"] = {"name": "nt"}
        there = {getattr(signal, f"SIG{name}") for name in ("ABRT", "FPE", "ILL", "INT", "SEGV", "TERM")}
        instead["signal"] = {"valid_signals": lambda: there}
    in_front: dict[str, types.ModuleType] = {}
    for name in sorted({*lacks, *instead, "multiprocessing"} - missing, reverse=True):
        parts = [one for one in in_front if one.startswith(f"{name}.")]
        inner = {one.removeprefix(f"{name}."): in_front[one] for one in parts}
        module = importlib.import_module(name)
        in_front[name] = _Lacking(module, lacks.get(name, ""), instead.get(name, {}) | inner)
    _refuse_imports(missing, in_front)
    sys.addaudithook(_refuse_folders)
    _set_start_methods(["spawn"] if system == "win32" else ["spawn", "fork", "forkserver"])


def _is_ours(module: Any) -> bool:
    return module is not None and str(module).split(".")[0] == "ringloader"


def _refuse_imports(missing: set[str], in_front: dict[str, types.ModuleType]) -> None:
    before = builtins.__import__

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level or not _is_ours((globals or {}).get("__name__")):
            return before(name, globals, locals, fromlist, level)
        for wanted in (name, *(f"{name}.{one}" for one in fromlist or ())):
            if wanted in missing:
                raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)
        found = before(name, globals, locals, fromlist, level)
        return in_front.get(found.__name__, found)

    builtins.__import__ = import_


def _refuse_folders(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str):
        return
    if not arguments[0].startswith(_FOLDERS):
        return
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OPENERS:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and _is_ours(frame.f_globals.get("__name__")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _set_start_methods(names: list[str]) -> None:
    """Leaves these start methods to all code, the first one by default."""
    context: Any = multiprocessing.context
    for name in set(context._concrete_contexts) - set(names):
        del context._concrete_contexts[name]
    context._default_context._default_context = context._concrete_contexts[names[0]]
    context.DefaultContext.get_all_start_methods = lambda _: list(names)
    # `multiprocessing` hands out the old function, and torch copies it later.
    vars(multiprocessing)["get_all_start_methods"] = context._default_context.get_all_start_methods


def begin() -> None:
    """Takes away what the system lacks that the environment names, if it names one."""
    if os.environ.get(VARIABLE):
        take_away(os.environ[VARIABLE])
