"""Errors for a worker that ends: torch's words, for all ways to end."""

from __future__ import annotations

import pytest

from faults.script import run_script

# torch raises from a signal handler, in whatever code runs then, so in a program of its own.
BODY = """
    ways = [getattr(signal, f"SIG{name}") for name in
            ("KILL", "SEGV", "BUS", "ABRT", "FPE", "ILL", "TERM", "HUP", "INT", "USR1", "ALRM")]
    for how in [*ways, "3", "0", "SystemExit", "KeyboardInterrupt"]:
        got = []
        try:
            for batch in DataLoader(Kills(how), num_workers=1):
                got.append(int(batch[0, 0]))
        except RuntimeError as error:
            cause = str(error.__cause__ or "").split("(pid")[-1].lstrip(" 0123456789)")
            print(how, got, str(error).replace(str(error).split("(s) ")[1].split(")")[0], "?"), "<-", cause)
            error.__traceback__ = None
            error.__cause__ = error.__context__ = None
        gc.collect()
"""


@pytest.mark.rings_only
@pytest.mark.limit(300)
def test_a_workers_end_is_told_in_torchs_words(loader_name, tmp_path):
    told = {}
    for name in ("torch", loader_name):
        ended = run_script(name, BODY, tmp_path)
        assert ended.code == 0, ended.err
        told[name] = ended.out.splitlines()
    assert told[loader_name] == told["torch"]
    assert len(told["torch"]) == 15
    assert sum("killed by signal" in line for line in told["torch"]) == 10, told
