"""``python -m ringloader``: runs a program with ringloader, measures a loader, or checks this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from typing import Any, NoReturn

import ringloader
from ringloader._features import rules
from ringloader._features.report import asked, at_exit
from ringloader._features.rules import Texts, texts
from ringloader._features.table import TABLE
from ringloader._log import write
from ringloader._patch import by_name, on_import, stateful

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
    if sys.argv[1:2] == ["bench"]:
        _bench(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m ringloader", description=_ABOUT)
    parser.add_argument("--version", action="store_true", help="prints the version of ringloader")
    commands = parser.add_subparsers(title="commands", metavar="run|bench|doctor")
    doctor = commands.add_parser(
        "doctor",
        help="prints what this machine, this Python and this torch mean for ringloader",
        description="Prints what a bug report needs. The exit status is 1 if something is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON, for programs")
    doctor.set_defaults(doctor=True)
    # For the help only: it has a parser of its own.
    commands.add_parser("bench", help="measures a loader with torch's DataLoader and with ringloader")
    command = commands.add_parser(
        "run",
        help="runs a program with ringloader installed",
        description=_HELP.format(not_="" if importlib.util.find_spec("ringloader_autoinstall") else " not"),
        usage="python -m ringloader run [options] (SCRIPT | -m MODULE) [arguments ...]",
        allow_abbrev=False,
    )
    described = texts(TABLE)
    for name, about in TABLE.items():
        offered = about.is_text and about.instead is None
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=by_name.value_of,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            # One that is not offered gets an error that says why.
            help=_help_of(described[name]) if offered else argparse.SUPPRESS,
        )
    for name in by_name.REMOVED:
        # Gets an error that says what takes its place.
        command.add_argument(
            f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, metavar="VALUE", help=argparse.SUPPRESS
        )
    command.add_argument(
        f"--{by_name.STATEFUL}",
        type=by_name.value_of,
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help="Replaces torchdata's loader by StatefulDataLoader. Values: True, False. Default: False.",
    )
    command.add_argument(
        "--report",
        action="store_true",
        help=f"at exit, prints a line for each loader on standard error, as {asked.VARIABLE}=1; with "
        "--stats True, which implies it, the figures of its last epoch too",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="a module, as with python -m")
    command.add_argument("program", help="file, folder, zip file or module")
    rest = command.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    # Of argparse's REMAINDER only the usage says that it may be empty.
    rest.required = False
    given = vars(parser.parse_args())
    if given.pop("version"):
        write(f"ringloader {getattr(ringloader, '__version__', '(not installed as a package)')}\n")
        return
    if not given:
        parser.print_help()
        return
    if given.pop("doctor", False):
        _print_diagnosis(given["json"])
        return
    program, arguments = given.pop("program"), given.pop("arguments")
    is_module = given.pop("is_module")
    is_asked = given.pop("report") or given.get("stats") is True
    if is_asked and os.environ.get(asked.VARIABLE, "0") in ("", "0"):
        os.environ[asked.VARIABLE] = asked.ONE
    is_given = bool(given)
    is_stateful = given.pop(by_name.STATEFUL, False)
    try:
        rules.boolean(by_name.STATEFUL, is_stateful)
        options = by_name.checked_words("ringloader run", given)
        if is_stateful:
            stateful.check("ringloader run")
    except (TypeError, ValueError, ModuleNotFoundError, RuntimeError) as error:
        command.error(str(error))
    if not is_module and not os.path.exists(program):  # noqa: PTH110
        command.error(f"can't open file {program!r}: no such file")
    if is_given or os.environ.get(on_import.VARIABLE, "0") in ("", "0"):
        os.environ[on_import.VARIABLE] = by_name.to_text(options, is_stateful)
    at_exit.expect_loaders()
    on_import.install_with_torch(os.environ[on_import.VARIABLE])
    if is_module:
        _run_module(program, arguments)
    else:
        _run_script(program, arguments)


def _help_of(about: Texts) -> str:
    """Returns a sentence, the values and the default of an option, in plain text."""
    text = f"{about.line} Values: {about.values}. Default: {about.without}."
    return text.replace("`", "").replace("%", "%%")


def _bench(words: list[str]) -> NoReturn:
    from ringloader._tools.bench import arguments

    # A wrong word is told before torch is imported.
    given = arguments.parse(words)
    from ringloader._tools.bench import command

    sys.exit(command.run(given))


def _print_diagnosis(as_json: bool) -> None:
    import dataclasses
    import json

    from ringloader._tools.doctor import doctor

    found = doctor()
    text = json.dumps(dataclasses.asdict(found), indent=2) if as_json else str(found)
    write(f"{text}\n")
    sys.exit(bool(found.problems))


class _ProgramsMain(types.ModuleType):
    """Finds objects of the program's classes, which come back from its children by the name above."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_MAIN], name)


def _run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a file, or a folder or zip file with a ``__main__.py``.

    Raises:
        OSError: When the file cannot be read.
        SystemExit: As the program; or when a folder has nothing to run.
    """
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        # `python -m` has put the current folder there. runpy puts a folder or zip file there itself.
        is_file = not (os.path.isdir(script) or zipfile.is_zipfile(script))  # noqa: PTH112
        sys.path[:1] = [os.path.dirname(os.path.realpath(script))] if is_file else []  # noqa: PTH120
    # Tracebacks have the full name, as under Python.
    _run(runpy.run_path, os.path.abspath(script), run_name=_MAIN)  # noqa: PTH100


def _run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module, or the ``__main__`` of a package.

    Raises:
        SystemExit: As the program; or when there is no such module.
    """
    sys.argv[:] = ["-m", *arguments]
    _run(runpy.run_module, name, run_name=_MAIN, alter_sys=True)


def _run(run: Any, program: str, **how: Any) -> None:
    sys.modules[_IN_CHILDREN] = _ProgramsMain(_IN_CHILDREN)
    try:
        run(program, **how)
    except ImportError as error:
        last: Any = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        if last.tb_frame.f_globals.get("__name__") != runpy.__name__:
            raise
        # The program has not begun: there is none.
        sys.exit(f"{sys.executable}: {error}")


if __name__ == "__main__":
    main()
