"""A dataset of Hugging Face's in torch's format, as for fine-tuning.

``python examples/programs/hugging_face.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import DataLoader

TEXTS, LENGTH = 40_000, 128


def make_dataset() -> Any:
    """Makes texts of one length, as a tokenizer that pads and truncates leaves them."""
    rng = np.random.default_rng(0)
    columns = {
        "input_ids": list(rng.integers(1, 30_000, (TEXTS, LENGTH))),
        "attention_mask": list(np.ones((TEXTS, LENGTH), np.int64)),
        "label": rng.integers(0, 2, TEXTS),
    }
    return Dataset.from_dict(columns).with_format("torch")


def make_loader(loader_class: type[DataLoader[Any]] = DataLoader, num_workers: int = 0) -> Any:
    """Makes the loader of an epoch."""
    return loader_class(make_dataset(), batch_size=16, shuffle=True, num_workers=num_workers)


if __name__ == "__main__":
    import ringloader

    labels = 0
    for batch in make_loader(ringloader.DataLoader, 2):
        labels += int(batch["label"].sum())
    print(f"{labels} of {TEXTS} labels are 1")
