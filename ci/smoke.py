"""Runs an installed wheel: the same batches as torch's loader, by each way of starting workers."""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import ringloader

# Each way of starting workers, and the path that its batches take.
WAYS: dict[str, tuple[dict[str, str], str]] = {
    "fork": ({"multiprocessing_context": "fork"}, "native"),
    "forkserver": ({"multiprocessing_context": "forkserver"}, "native"),
    "spawn": ({"multiprocessing_context": "spawn"}, "native"),
    "threads": ({"worker_method": "thread"}, "threads"),
}
EPOCHS = 2


class Samples(torch.utils.data.Dataset[Any]):
    """Tensors, numbers and text, each a function of the index."""

    def __len__(self) -> int:
        """How many."""
        return 103

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample at ``index``."""
        image = torch.arange(3 * 32 * 32, dtype=torch.float32).reshape(3, 32, 32) * index
        return {"image": image, "label": index, "weight": index / 7, "name": f"sample {index}"}


def epochs(cls: type[Any], **options: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each batch of some epochs, beside the iterator that returned it."""
    loader = cls(
        Samples(),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        **options,
        generator=torch.Generator().manual_seed(7),
    )
    for _ in range(EPOCHS):
        iterator = iter(loader)
        for batch in iterator:
            yield iterator, batch


def compare(way: str) -> int:
    """The number of batches, each of which is torch's and came over the path of that way."""
    count = 0
    options, path = WAYS[way]
    ours = epochs(ringloader.DataLoader, **options)
    theirs = epochs(torch.utils.data.DataLoader)
    for (iterator, batch), (_, expected) in zip(ours, theirs, strict=True):
        assert ringloader.report(iterator).path == path, ringloader.report(iterator)
        assert batch.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, batch[name]), f"{way}: {name} differs in batch {count}"
        count += 1
    return count


def run_installed() -> None:
    """What ``python -m ringloader run`` runs: torch's class is ours."""
    iterator = iter(torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=2))
    assert ringloader.report(iterator).path == "native", ringloader.report(iterator)
    labels = [label for batch in iterator for label in batch["label"].tolist()]
    assert labels == list(range(len(Samples())))


def main() -> None:
    """Runs all of it, or the part that runs in a process with ringloader installed."""
    if sys.argv[1:] == ["installed"]:
        run_installed()
        return
    where = Path(ringloader.__file__)
    assert where.is_relative_to(sys.prefix), f"imported from {where}, not from this environment"
    assert shutil.which("cargo") is None, "cargo is on PATH"
    versions = f"ringloader {importlib.metadata.version('ringloader')}, torch {torch.__version__}"
    python = f"CPython {platform.python_version()}{sys.abiflags}"
    sys.stdout.write(f"{versions}, {python}, {platform.machine()}, {' '.join(platform.libc_ver())}\n")
    for way in WAYS:
        count = compare(way)
        assert count == EPOCHS * -(-len(Samples()) // 8), count
        sys.stdout.write(f"  {way}: {count} batches as torch's\n")
    subprocess.run([sys.executable, "-m", "ringloader", "run", __file__, "installed"], check=True)
    sys.stdout.write("  python -m ringloader run\n")


if __name__ == "__main__":
    main()
