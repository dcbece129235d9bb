"""``python -m ringloader``: runs a program with ringloader, measures a loader, or checks this machine."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from typing import Any

import ringloader
from ringloader._features.report import at_exit
from ringloader._features.rules import Texts, texts
from ringloader._features.table import TABLE
from ringloader._log import write
from ringloader._patch import by_name, on_import, stateful
from ringloader._tools import bench

# Not the docstring, which `python -OO` leaves out.
_ABOUT = "runs a program with ringloader, measures a loader, or checks this machine."
_HELP = """\
Runs a program as python does, with every torch DataLoader over ringloader, also in forked children. A process
that starts a Python of its own (spawn, forkserver, subprocess, torchrun) needs the package
ringloader-autoinstall, which is{not_} installed here; see docs/without-changing-code.md.
"""

_MAIN = "__main__"
# The name of the main module in children that run it again. MIRRORS multiprocessing __init__.py.
_IN_CHILDREN = "__mp_main__"


def main() -> None:
    """Parses the command line and runs what it names."""
    parser = argparse.ArgumentParser(prog="python -m ringloader", description=_ABOUT)
    parser.add_argument("--version", action="store_true", help="prints the version of ringloader")
    commands = parser.add_subparsers(title="commands", metavar="run|bench|doctor")
    doctor = commands.add_parser(
        "doctor",
        help="prints what this machine, this Python and this torch mean for ringloader",
        description="Prints what a bug report needs. The exit status is 1 if something is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    doctor.set_defaults(command=_diagnose)
    measuring = commands.add_parser(
        "bench",
        help="measures a loader with torch's DataLoader and with ringloader",
        description=bench.DESCRIPTION,
    )
    bench.add_arguments(measuring)
    measuring.set_defaults(command=_bench)
    running = commands.add_parser(
        "run",
        help="runs a program with ringloader installed",
        description=_HELP.format(not_="" if importlib.util.find_spec("ringloader_autoinstall") else " not"),
        usage="python -m ringloader run [options] (SCRIPT | -m MODULE) [arguments ...]",
        allow_abbrev=False,
    )
    _add_arguments(running)
    running.set_defaults(command=functools.partial(_run, running))
    given = parser.parse_args()
    if given.version:
        write(f"ringloader {getattr(ringloader, '__version__', '(not installed as a package)')}\n")
    elif "command" in given:
        given.command(given)
    else:
        parser.print_help()


def _add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``run``."""
    # Options that are not offered get an error that says why.
    helps = dict.fromkeys((*TABLE, *by_name.REMOVED), argparse.SUPPRESS)
    described = texts(TABLE)
    for name, about in TABLE.items():
        if about.is_text and about.instead is None:
            helps[name] = _help_of(described[name])
    helps[by_name.STATEFUL] = (
        "Replaces torchdata's loader by StatefulDataLoader. Values: True, False. Default: False."
    )
    for name, text in helps.items():
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=text)
    command.add_argument(
        "--report",
        action="store_true",
        help=f"at exit, prints a line for each loader on standard error, as {at_exit.VARIABLE}=1; with "
        "--stats True, which implies it, the figures of its last epoch too",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="a module, as with python -m")
    command.add_argument("program", help="file, folder, zip file or module")
    rest = command.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    # Of argparse's REMAINDER only the usage says that it may be empty.
    rest.required = False


def _help_of(about: Texts) -> str:
    """Returns a sentence, the values and the default of an option, in plain text."""
    text = f"{about.line} Values: {about.values}. Default: {about.without}."
    return text.replace("`", "").replace("%", "%%")


def _bench(given: argparse.Namespace) -> None:
    from ringloader._tools import measure

    sys.exit(bench.run(given, measure.run))


def _diagnose(given: argparse.Namespace) -> None:
    import dataclasses
    import json

    from ringloader._tools.doctor import doctor

    found = doctor()
    write(f"{json.dumps(dataclasses.asdict(found), indent=2) if given.json else found}\n")
    sys.exit(bool(found.problems))


def _run(command: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Runs a program with ringloader installed."""
    options = vars(given)
    names = [name for name in (*TABLE, *by_name.REMOVED, by_name.STATEFUL) if name in options]
    text = ",".join(f"{name}={options[name]}" for name in names) or "1"
    try:
        checked, is_stateful = by_name.from_text(text)
        if is_stateful:
            stateful.check("ringloader run")
    except (TypeError, ValueError, ModuleNotFoundError, RuntimeError) as error:
        command.error(str(error))
    if not given.is_module and not os.path.exists(given.program):  # noqa: PTH110
        command.error(f"can't open file {given.program!r}: no such file")
    if (given.report or checked.stats) and os.environ.get(at_exit.VARIABLE, "0") in ("", "0"):
        os.environ[at_exit.VARIABLE] = at_exit.ONE
    if names or os.environ.get(on_import.VARIABLE, "0") in ("", "0"):
        os.environ[on_import.VARIABLE] = text
    at_exit.expect_loaders()
    on_import.install_with_torch(os.environ[on_import.VARIABLE])
    sys.modules[_IN_CHILDREN] = _ProgramsMain(_IN_CHILDREN)
    if given.is_module:
        sys.argv[:] = ["-m", *given.arguments]
        runpy.run_module(given.program, run_name=_MAIN, alter_sys=True)
        return
    sys.argv[:] = [given.program, *given.arguments]
    if not sys.flags.safe_path:
        # `python -m` has put the current folder there. runpy puts a folder or zip file there itself.
        is_file = not (os.path.isdir(given.program) or zipfile.is_zipfile(given.program))  # noqa: PTH112
        sys.path[:1] = [os.path.dirname(os.path.realpath(given.program))] if is_file else []  # noqa: PTH120
    # Tracebacks have the full name, as under Python.
    runpy.run_path(os.path.abspath(given.program), run_name=_MAIN)  # noqa: PTH100


class _ProgramsMain(types.ModuleType):
    """Finds objects of the program's classes, which come back from its children by the name above."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_MAIN], name)


if __name__ == "__main__":
    main()
