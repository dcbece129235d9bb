"""Says at the end how many generated cases there were."""

from __future__ import annotations

from typing import Any

import torch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from parity.generated import judge

    if judge.ran:
        terminalreporter.section(f"generated cases beside torch {torch.__version__}")
        for path in sorted(judge.ran):
            counts = (judge.ran[path], judge.differed[path], judge.known[path])
            line = "{:6} ran {:6} differ {:6} differ as documented".format(*counts)
            terminalreporter.write_line(f"{path:8}{line}")
