"""A run over a loader prepared by accelerate, which stops and goes on; as a program, one of two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState

import ringloader
from frameworks import training

EPOCHS = 3

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seedable": {"use_seedable_sampler": True, "data_seed": 5},
    "dispatched": {"dispatch_batches": True},
    "split": {"split_batches": True},
}


def prepared(workers: int, options: dict[str, Any], seed: int = 1) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    config = DataLoaderConfiguration(use_stateful_dataloader=True, **options)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = torch.utils.data.DataLoader(
        training.Numbers(), batch_size=4, shuffle=True, num_workers=workers, drop_last=True
    )
    return accelerator, accelerator.prepare(loader)


def batches_of(loader: Any, epoch: int, stop: int | None = None) -> list[list[int]]:
    """Returns the numbers of an epoch's batches, of so many only."""
    loader.set_epoch(epoch)
    found = []
    for _, numbers in loader:
        found.append(numbers.tolist())
        if len(found) == stop:
            break
    return found


def whole(workers: int, options: dict[str, Any]) -> list[list[list[int]]]:
    _forget()
    _, loader = prepared(workers, options)
    return [batches_of(loader, epoch) for epoch in range(EPOCHS)]


def resumed(
    workers: int, options: dict[str, Any], stop_epoch: int, taken: int, folder: Path
) -> list[list[list[int]]]:
    """Returns what is left of the epoch in which a run has stopped, unless it was over, and later ones."""
    _forget()
    accelerator, loader = prepared(workers, options)
    for epoch in range(stop_epoch):
        batches_of(loader, epoch)
    batches_of(loader, stop_epoch, taken)
    _save(accelerator, folder)
    is_over = taken == len(loader)
    _forget()
    # Another seed: the order comes from the checkpoint.
    accelerator, loader = prepared(workers, options, seed=99)
    accelerator.load_state(str(folder))
    return [batches_of(loader, epoch) for epoch in range(stop_epoch + is_over, EPOCHS)]


def _save(accelerator: Accelerator, folder: Path) -> None:
    """Saves a checkpoint. accelerate writes the loader's state by all ranks into one file: rank 0 last."""
    for rank in reversed(range(accelerator.num_processes)):
        if rank == accelerator.process_index:
            accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()


def _forget() -> None:
    """Drops what accelerate keeps for the process; of several, the group stays."""
    if not torch.distributed.is_initialized():
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def main(folder: Path) -> None:
    results = {}
    for way, options in WAYS.items():
        expected = whole(2, options)
        rest = resumed(0, options, 1, 3, folder / way)
        results[way] = [expected[1][3:], *expected[2:]], rest
    rank = Accelerator(cpu=True).process_index
    (folder / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ringloader.installed(stateful=True):
        main(Path(sys.argv[1]))
