"""A user's program, for mypy --strict: it types with either class of loader. It is checked, not run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.utils.data
from torch.utils.data import Dataset, RandomSampler, TensorDataset

import ringloader
from ringloader import DataLoader


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


def scaled(batch: torch.Tensor) -> torch.Tensor:
    return batch / 255


def first_of(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def seed(worker: int) -> None:
    torch.manual_seed(worker)


squares = Squares()
loader = DataLoader(squares)
assert_type(loader, DataLoader[torch.Tensor])
torchs: torch.utils.data.DataLoader[torch.Tensor] = loader
everything = DataLoader(
    squares,
    4,
    sampler=RandomSampler(squares),
    num_workers=2,
    collate_fn=first_of,
    worker_init_fn=seed,
    multiprocessing_context="spawn",
    generator=torch.Generator(),
    prefetch_factor=2,
    persistent_workers=True,
    device="auto",
    device_transform=scaled,
    on_error="skip",
    seeding="sample",
)
for batch in everything:
    value: Any = batch
iterator = iter(everything)
iterator.limit(3)
value = next(iterator), len(everything), everything.batch_size, everything.errors[0].index
pairs: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.ones(3), torch.ones(3)))
assert_type(ringloader.__version__, str)

# Each of these is an error that only written parameters let a type checker see.
DataLoader()  # type: ignore[call-arg]
DataLoader(squares, batch_sise=4)  # type: ignore[call-arg]
DataLoader(squares, num_workers="2")  # type: ignore[arg-type]
DataLoader(squares, max_shared_bytes="1 GB")  # type: ignore[arg-type]
DataLoader(squares, worker_method="threads")  # type: ignore[arg-type]
DataLoader(squares, on_error="ignore")  # type: ignore[arg-type]
DataLoader(squares, on_error=ringloader.Retry(then="retry"))  # type: ignore[arg-type]
DataLoader(squares, seeding="samples")  # type: ignore[arg-type]
ringloader.Sharded([1], uneven="rest")  # type: ignore[arg-type]
