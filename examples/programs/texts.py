"""Lines of a text file, read in turn by the workers, as padded batches of tokens.

``python examples/programs/texts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FILE = Path(__file__).resolve().parents[2] / "build" / "programs" / "texts.txt"
WORDS, LINES = 5000, 100_000


def write_texts(path: Path) -> None:
    """Writes lines of 4 to 40 words, once."""
    if path.exists():
        return
    rng = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        for length in rng.integers(4, 41, LINES):
            file.write(" ".join(f"word{number}" for number in rng.integers(0, WORDS, length)) + "\n")
    part.rename(path)


class Lines(IterableDataset[torch.Tensor]):
    """The tokens of each line; each worker takes its share of the lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.vocabulary = {f"word{number}": number + 1 for number in range(WORDS)}

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        with self.path.open() as file:
            for line in islice(file, first, None, step):
                yield torch.tensor([self.vocabulary.get(word, 0) for word in line.split()])


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pads with zeros, and says which tokens are none."""
    tokens = pad_sequence(texts, batch_first=True)
    return {"tokens": tokens, "mask": tokens != 0}


def make_loader(loader_class: type[DataLoader[Any]] = DataLoader, num_workers: int = 0) -> Any:
    """Makes the loader of an epoch."""
    write_texts(FILE)
    return loader_class(Lines(FILE), batch_size=32, collate_fn=collate, num_workers=num_workers)


if __name__ == "__main__":
    import ringloader

    count = 0
    for batch in make_loader(ringloader.DataLoader, 2):
        count += int(batch["mask"].sum())
    print(f"{count} tokens")
