"""``python -m ringloader``: runs a program with ringloader installed, or says what is here."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from ringloader._options import naming
from ringloader._options.table import TABLE
from ringloader._patch import on_import, run

_HELP = """\
Runs a program as python does, and every torch DataLoader in it over ringloader. Forked children are
reached too. Processes that start a Python of their own (spawn, forkserver, subprocess, torchrun) are reached
where the package ringloader-autoinstall is installed, which here it is{not_}; see
docs/without-changing-code.md.
"""


def main() -> None:
    """Parses the command line and runs what it names."""
    parser = argparse.ArgumentParser(prog="python -m ringloader", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(title="commands", metavar="run|doctor")
    commands.add_parser(
        "doctor",
        help="prints what this machine, this Python and this torch mean for ringloader",
        description="Prints what a bug report needs. The exit status is 1 if something is wrong.",
    ).set_defaults(doctor=True)
    command = commands.add_parser(
        "run",
        help="runs a program with ringloader installed",
        description=_HELP.format(not_="" if importlib.util.find_spec("ringloader_autoinstall") else " not"),
        usage="python -m ringloader run [options] (SCRIPT | -m MODULE) [arguments ...]",
        allow_abbrev=False,
    )
    for name in TABLE:
        command.add_argument(
            f"--{name.replace('_', '-')}",
            type=naming.value_of,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help="as the argument of ringloader.DataLoader",
        )
    command.add_argument("-m", dest="is_module", action="store_true", help="a module, as with python -m")
    command.add_argument("program", help="file, folder, zip file or module")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    given = vars(parser.parse_args())
    if not given:
        parser.print_help()
        return
    if given.pop("doctor", False):
        _print_diagnosis()
        return
    program, arguments = given.pop("program"), given.pop("arguments")
    is_module = given.pop("is_module")
    try:
        options = naming.checked("ringloader run", given)
    except (TypeError, ValueError) as error:
        command.error(str(error))
    if not is_module and not os.path.exists(program):  # noqa: PTH110
        command.error(f"can't open file {program!r}: no such file")
    if given or os.environ.get(on_import.VARIABLE, "0") in ("", "0"):
        os.environ[on_import.VARIABLE] = naming.to_text(options)
    on_import.install_with_torch(os.environ[on_import.VARIABLE])
    if is_module:
        run.run_module(program, arguments)
    else:
        run.run_script(program, arguments)


def _print_diagnosis() -> None:
    from ringloader._doctor.doctor import doctor

    found = doctor()
    sys.stdout.write(f"{found}\n")
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
