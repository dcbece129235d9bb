"""Lines of the log begin with the package's name, and sizes are in MiB."""

import logging
import subprocess
import sys

import pytest

from ringloader import _log

pytestmark = pytest.mark.rings_only


def test_the_name_comes_first_and_once(caplog):
    another = logging.StreamHandler()
    _log.logger.addHandler(another)
    try:
        _log.logger.warning("%d of %s", 3, "100 %")
        logging.getLogger("ringloader").warning("100 %")
    finally:
        _log.logger.removeHandler(another)
    assert caplog.messages == ["ringloader: 3 of 100 %", "ringloader: 100 %"]


def test_without_any_set_up_the_line_says_who_speaks():
    program = "from ringloader._torch import select_path; select_path.log_once('said')"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150
    )
    assert (ran.stdout, ran.stderr) == ("", "ringloader: said\n")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1 << 20, "1 MiB"),
        (20_000, "0.0191 MiB"),
        (3 << 19, "1.5 MiB"),
        (123_456_789, "118 MiB"),
        (5 << 40, "5242880 MiB"),
    ],
)
def test_sizes(nbytes, text):
    assert _log.mib(nbytes) == text
