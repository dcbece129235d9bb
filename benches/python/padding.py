"""Ragged samples: ``ringloader.batchify.Pad`` beside what is used with torch's loader.

Writes build/bench-padding.md and build/bench-padding.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from .datasets import Graph, Graphs
from .files import BUILD
from .loaders import LOADERS
from .measure import timed_loader
from .processes import ProcessFailedError, call_in_process
from .report import head, machine, ratio_cell, write
from .verify import fingerprint
from .workloads import ENDLESS, NUM_WORKERS, PREFETCH_FACTOR

BATCH_SIZE = 64
VERIFIED_BATCHES = 16
# Texts that are gone through again and again.
TEXTS = 1 << 12
SHORTEST, LONGEST = 32, 512


class Texts(Dataset[Any]):
    """Lists of 32 to 512 tokens: Python's, or int64 tensors over one memory, as of a file of tokens.

    ``form`` "equal": all of a batch are as long as its longest text, so that a batch has the same bytes as
    when it is padded.
    """

    def __init__(self, form: str) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(SHORTEST, LONGEST + 1, (TEXTS,), generator=generator)
        texts = [torch.randint(1, 30_000, (int(length),), generator=generator) for length in lengths]
        if form == "equal":
            padded = [
                pad_sequence(texts[first : first + BATCH_SIZE], batch_first=True)
                for first in range(0, TEXTS, BATCH_SIZE)
            ]
            texts = [text for batch in padded for text in batch]
        self.texts: list[Any] = list(torch.cat(texts).split([len(text) for text in texts]))
        if form == "lists":
            self.texts = [text.tolist() for text in texts]
        elif form == "dicts":
            self.texts = [{"input_ids": text.tolist()} for text in texts]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self.texts[index % TEXTS]


def _pad_tensors(texts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(texts, batch_first=True)


def _pad_lists(texts: list[list[int]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(text) for text in texts], batch_first=True)


def _pad_dicts(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {"input_ids": _pad_lists([sample["input_ids"] for sample in samples])}


def _pad_graphs(graphs: list[Graph]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    features, edges, names = zip(*graphs, strict=True)
    padded = pad_sequence([one.t() for one in edges], batch_first=True).transpose(1, 2)
    return pad_sequence(list(features), batch_first=True), padded.contiguous(), list(names)


def _transformers_pad() -> Callable[[Any], Any]:
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})), pad_token="[PAD]"
    )
    tokenizer.model_input_names = ["input_ids"]
    # Else it says of every batch that tokenizing is quicker elsewhere.
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    collator = DataCollatorWithPadding(tokenizer)
    return lambda samples: dict(collator(samples))


def _pad() -> Callable[[Any], Any]:
    from ringloader.batchify import Pad

    return Pad()


def _pad_by_key() -> Callable[[Any], Any]:
    from ringloader.batchify import Dict, Pad

    return Dict(input_ids=Pad())


def _pad_fields() -> Callable[[Any], Any]:
    from ringloader.batchify import AsList, Group, Pad

    return Group(Pad(axis=0), Pad(axis=1), AsList())


# Samples, and how to make them; of each, the loader, the name and the function of each row. The first of each
# has what the others must make too.
GROUPS: dict[str, tuple[Callable[[], Dataset[Any]], list[tuple[str, str, Callable[[], Any]]]]] = {
    f"{BATCH_SIZE} texts of {SHORTEST} to {LONGEST} int64": (
        lambda: Texts("tensors"),
        [
            ("torch", "pad_sequence", lambda: _pad_tensors),
            ("torch", "Pad", _pad),
            ("ringloader", "pad_sequence", lambda: _pad_tensors),
            ("ringloader", "Pad", _pad),
        ],
    ),
    "the same bytes, in rows of one length": (
        lambda: Texts("equal"),
        [
            ("torch", "default_collate", lambda: default_collate),
            ("ringloader", "default_collate", lambda: default_collate),
        ],
    ),
    "the texts as lists of Python's ints": (
        lambda: Texts("lists"),
        [
            ("torch", "pad_sequence", lambda: _pad_lists),
            ("ringloader", "pad_sequence", lambda: _pad_lists),
            ("ringloader", "Pad", _pad),
        ],
    ),
    "the lists in dicts": (
        lambda: Texts("dicts"),
        [
            ("torch", "pad_sequence", lambda: _pad_dicts),
            ("torch", "DataCollatorWithPadding", _transformers_pad),
            ("ringloader", "DataCollatorWithPadding", _transformers_pad),
            ("ringloader", "Pad", _pad_by_key),
        ],
    ),
    f"{BATCH_SIZE} graphs of 8 to 71 nodes: features, edges, a name": (
        lambda: Graphs(ENDLESS),
        [
            ("torch", "pad_sequence", lambda: _pad_graphs),
            ("ringloader", "pad_sequence", lambda: _pad_graphs),
            ("ringloader", "Pad", _pad_fields),
        ],
    ),
}


def _arguments(group: str, row: int) -> tuple[Any, Dataset[Any], dict[str, Any]]:
    make, rows = GROUPS[group]
    loader, _, function = rows[row]
    arguments = {
        "batch_size": BATCH_SIZE,
        "num_workers": NUM_WORKERS,
        "prefetch_factor": PREFETCH_FACTOR,
        "collate_fn": function(),
    }
    return LOADERS[loader], make(), arguments


def timed_run(group: str, row: int, seconds: float) -> dict[str, Any]:
    """One run of a row, in the process that calls it."""
    return timed_loader(*_arguments(group, row), seconds)


def fingerprints(group: str, row: int) -> list[str]:
    """The first batches of a row, each looked at when three later ones have come."""
    torch.set_num_threads(1)
    loader, dataset, arguments = _arguments(group, row)
    iterator = iter(loader.make(dataset, **arguments))
    held = [_plain(next(iterator)) for _ in range(4)]
    found = []
    for _ in range(VERIFIED_BATCHES):
        found.append(fingerprint(held.pop(0)))
        held.append(_plain(next(iterator)))
    loader.checked(iterator)
    return found


def _plain(batch: Any) -> Any:
    """A tuple of fields comes as a list from torch's collation and as a tuple from others."""
    return list(batch) if isinstance(batch, tuple) else batch


def measured(rounds: int, seconds: float, method: str) -> list[dict[str, Any]]:
    """All rows. Those of a group are compared with its first and then timed in turn."""
    found = []
    for group, (_, made) in GROUPS.items():
        rows: list[dict[str, Any]] = []
        for number, (loader, function, _) in enumerate(made):
            if function == "DataCollatorWithPadding" and find_spec("transformers") is None:
                print(f"{loader}, {function}: left out, transformers is not installed", file=sys.stderr)
                continue
            rows.append(
                {"group": group, "number": number, "loader": loader, "function": function, "runs": []}
            )
        print(group, file=sys.stderr, flush=True)
        expected = None
        for row in rows:
            batches = call_in_process(method, fingerprints, group, row["number"])
            expected = expected or batches
            if batches != expected:
                raise ProcessFailedError(
                    f"{row['loader']}, {row['function']}: other batches than the first row's"
                )
        for turn in range(rounds):
            for row in rows if turn % 2 == 0 else reversed(rows):
                row["runs"].append(call_in_process(method, timed_run, group, row["number"], seconds))
        found += rows
    return found


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians, and each row's ratio to the first of its group, taken inside a round."""
    made = []
    for row in rows:
        first = next(other for other in rows if other["group"] == row["group"])
        rates = [run["batches"] / run["seconds"] for run in row["runs"]]
        pairs = zip(rates, first["runs"], strict=True)
        ratios = [rate / (run["batches"] / run["seconds"]) for rate, run in pairs]
        cpu = {
            where: median(run[f"{where}_cpu_seconds"] / run["batches"] * 1e6 for run in row["runs"])
            for where in ("main", "worker")
        }
        made.append(
            {
                **{name: row[name] for name in ("group", "loader", "function")},
                "rate": median(rates),
                "times": [min(ratios), median(ratios), max(ratios)],
                "cpu_us": cpu,
            }
        )
    return made


def table(made: list[dict[str, Any]]) -> str:
    """A line for each row."""
    lines = [
        "| samples | loader | collate_fn | batches/s | times the group's first (range) "
        "| main process, CPU us a batch | workers, CPU us a batch |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for row in made:
        low, middle, high = row["times"]
        cells = [
            row["group"],
            f"`{row['loader']}`",
            f"`{row['function']}`",
            f"{row['rate']:,.0f}",
            ratio_cell(middle, low, high),
            *(f"{row['cpu_us'][where]:,.0f}" for where in ("main", "worker")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns 1 if a row failed or had other batches than the first of its group."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.padding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with every row once (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed window of one run (default 1)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: every row once, briefly")
    parser.add_argument(
        "--out", type=Path, default=BUILD / "bench-padding", help="written with .md and .json appended"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.1
    where = machine()
    try:
        rows = measured(options.rounds, options.seconds, "forkserver")
    except ProcessFailedError as error:
        print(error, file=sys.stderr)
        return 1
    made = summaries(rows)
    how = (
        f"{NUM_WORKERS} workers, prefetch_factor {PREFETCH_FACTOR}; medians of {options.rounds} interleaved "
        f"rounds of {options.seconds:g} s, each run in a process of its own"
    )
    page = head(where, how) + "\n\n" + table(made)
    print(page)
    write(options.out, page, {"machine": where, "how": how, "rows": made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
