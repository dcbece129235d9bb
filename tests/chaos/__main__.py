"""`python -m chaos`: the cases, one line each, and how many went how."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from chaos import judge
from chaos.all import CASES
from chaos.case import Case
from programs import client

LOADERS = ("ringloader", "torch")


def chosen(parts: list[str], fast: bool) -> list[Case]:
    found = [case for case in CASES.values() if not parts or any(part in case.name for part in parts)]
    return [case for case in found if case.fast or not fast]


def line(results: list[judge.Result]) -> str:
    name = results[0].case
    words = [f"{result.loader} {result.status:8} {result.figure:14}" for result in results]
    why = [f"\n    {result.loader}: {' '.join(result.why.split())}" for result in results if result.why]
    return f"{name:52} {'  '.join(words)}{''.join(why)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names; none: all")
    parser.add_argument("--loader", choices=(*LOADERS, "both"), default="ringloader")
    parser.add_argument("--against", choices=LOADERS, help="runs this loader too, beside it")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--fast", action="store_true", help="those of `make test` only")
    parser.add_argument("--list", action="store_true", help="says what must hold, and runs nothing")
    parser.add_argument("--verbose", action="store_true", help="what a case that fails wrote to stderr")
    parser.add_argument("--json", type=Path, help="writes the results to this file")
    options = parser.parse_args()
    # Users start them cold.
    client.is_cold = True
    cases = chosen(options.cases, options.fast)
    if not cases:
        parser.error(f"no case has any of {options.cases} in its name")
    if options.list:
        for case in cases:
            print(f"{case.name:52} {case.must_hold}")  # noqa: T201
        return 0
    wanted = set(LOADERS if options.loader == "both" else (options.loader,)) | {options.against} - {None}
    loaders = [loader for loader in LOADERS if loader in wanted]

    def both(case: Case) -> list[judge.Result]:
        return [judge.run(case, loader) for loader in loaders]

    results: list[judge.Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(both, cases):
            results += found
            print(line(found), flush=True)  # noqa: T201
            if options.verbose:
                for result in found:
                    if result.status not in ("ok", "skipped", "known"):
                        print(result.err)  # noqa: T201
    for loader in loaders:
        counts = Counter(result.status for result in results if result.loader == loader)
        words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        print(f"{loader}: {len(cases)} cases: {words}")  # noqa: T201
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    failed = [r for r in results if r.loader == loaders[0] and r.status not in ("ok", "skipped", "known")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
