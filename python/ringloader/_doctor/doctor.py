"""``doctor()``: all that a bug report needs."""

from __future__ import annotations

from ringloader._doctor import software, system
from ringloader._doctor.diagnosis import Diagnosis


def doctor(*, rate: bool = True) -> Diagnosis:
    """Checks this machine, this Python and this torch for anything that would stop or slow down a loader.

    Looks at versions, at reasons that keep loaders off the native path, and at the limits on processes,
    descriptors and memory, and runs a test loader beside torch's. ``python -m ringloader doctor`` prints the
    same. Changes nothing, and draws no random numbers of this process.

    Args:
        rate: True to run the test loader, which starts worker processes and takes a few seconds.

    Returns:
        The findings. Their ``str`` belongs into a bug report.
    """
    findings = [*software.findings(), *system.findings()]
    if rate:
        from ringloader._doctor import rate as test_loader

        findings.append(test_loader.finding())
    return Diagnosis(tuple(findings))
