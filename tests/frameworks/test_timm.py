"""timm: `create_loader` builds torch's class or one of its own; the endless sampler; the prefetcher."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_loader
from timm.data.loader import MultiEpochsDataLoader, PrefetchLoader

import ringloader
from frameworks import training
from parity.describe import describe


class Pictures(torch.utils.data.Dataset):
    """`create_loader` sets `transform`."""

    transform = None

    def __len__(self):
        return 14

    def __getitem__(self, index):
        pixels = np.arange(40 * 32 * 3, dtype=np.uint8).reshape(40, 32, 3) + np.uint8(index)
        picture = Image.fromarray(pixels)
        return (picture if self.transform is None else self.transform(picture)), index % 3


def loader_of(way, **options):
    made = create_loader(
        Pictures(),
        **{"input_size": (3, 24, 24), "batch_size": 4, "is_training": True, "num_workers": 2, **options},
        device=torch.device("cpu"),
    )
    if way.name == "class":
        ringloader.convert(made.loader if isinstance(made, PrefetchLoader) else made)
    return made


def epochs(loader, count=2):
    return [[describe(batch) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("prefetcher", [False, True])
@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_create_loader(compare, prefetcher, endless, persistent):
    def program(way):
        return epochs(
            loader_of(
                way,
                use_prefetcher=prefetcher,
                use_multi_epochs_loader=endless,
                persistent_workers=persistent,
                auto_augment="rand-m5-n1",
                re_prob=0.5,
            )
        )

    ours = compare(program)
    if endless:
        assert len(ours.made) == 1, "one iterator for all epochs"


def test_validation(compare):
    def program(way):
        return epochs(loader_of(way, is_training=False, use_prefetcher=True))

    compare(program)


def test_multi_epochs_loader(compare):
    """The loader's sampler never ends. The next epoch is prefetched while the last one is handed out."""

    def program(way):
        loader = way.loader(
            MultiEpochsDataLoader,
            training.Points(),
            batch_size=5,
            shuffle=True,
            num_workers=2,
            drop_last=True,
        )
        found = epochs(loader, 3)
        assert [len(epoch) for epoch in found] == [4, 4, 4]
        return found

    ours = compare(program)
    assert len(ours.made) == 1
