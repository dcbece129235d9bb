"""MONAI: its loader and tensors with metadata, its caches, and a loader whose workers may be threads."""

import re

import nibabel
import numpy as np
import pytest
import torch
from monai.data import (
    CacheDataset,
    DataLoader,
    Dataset,
    GridPatchDataset,
    PatchIterd,
    PersistentDataset,
    SmartCacheDataset,
    ThreadDataLoader,
    decollate_batch,
)
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    LoadImaged,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    ScaleIntensityd,
)
from monai.utils import set_determinism

from frameworks import loader_ways, training
from parity.describe import describe

KEYS = ["image", "label"]


@pytest.fixture(autouse=True)
def _forget_the_seed():
    yield
    set_determinism(None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    found = []
    for number in range(6):
        rng = np.random.default_rng(number)
        volumes = {
            "image": rng.random((16, 16, 16), np.float32),
            "label": rng.integers(2, size=(16, 16, 16)).astype(np.uint8),
        }
        for key, volume in volumes.items():
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), folder / f"{key}{number}.nii.gz")
        found.append({key: str(folder / f"{key}{number}.nii.gz") for key in KEYS})
    return found


def transform():
    """Returns transforms: cached ones, and after them drawn ones for each epoch; two patches of a volume."""
    return Compose(
        [
            LoadImaged(KEYS),
            EnsureChannelFirstd(KEYS),
            ScaleIntensityd("image"),
            EnsureTyped(KEYS),
            RandCropByPosNegLabeld(KEYS, label_key="label", spatial_size=(8, 8, 8), num_samples=2),
            RandFlipd(KEYS, prob=0.5),
            RandGaussianNoised("image", prob=0.7),
        ]
    )


def told(batch):
    """A batch, and what its tensors know of themselves."""
    patches = decollate_batch(batch)
    history = str([[patch[key].applied_operations for key in KEYS] for patch in patches])
    return [
        [(type(batch[key]).__name__, describe(batch[key].array)) for key in KEYS],
        [sorted(map(str, patch["image"].meta.items())) for patch in patches],
        re.sub(r"id: \d+", "", history),
    ]


def epochs(loader, count=2):
    return [[told(batch) for batch in loader] for _ in range(count)]


def train(loader):
    torch.manual_seed(1)
    model = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
    optimizer = torch.optim.Adam(model.parameters())
    loss_of = DiceLoss(sigmoid=True)
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = loss_of(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [losses, training.weights(model)]


@pytest.mark.parametrize("persistent", [False, True])
def test_training_from_a_cache(compare, files, persistent):
    def program(way):
        set_determinism(7)
        dataset = CacheDataset(files, transform(), progress=False)
        options = {"num_workers": 2, "shuffle": True, "persistent_workers": persistent}
        return train(way.loader(DataLoader, dataset, batch_size=2, **options))

    compare(program)


def test_a_cache_on_disk(compare, files, tmp_path):
    def program(way):
        set_determinism(7)
        dataset = PersistentDataset(files, transform(), cache_dir=tmp_path / way.name)
        return epochs(way.loader(DataLoader, dataset, batch_size=2, shuffle=True, num_workers=2))

    compare(program)


def test_a_cache_that_is_replaced_between_epochs(compare, files):
    def program(way):
        set_determinism(7)
        dataset = SmartCacheDataset(files, transform(), replace_rate=0.5, cache_num=4, progress=False, seed=3)
        loader = way.loader(DataLoader, dataset, batch_size=2, num_workers=2)
        dataset.start()
        found = []
        for _ in range(3):
            found.append([told(batch)[1:] for batch in loader])
            dataset.update_cache()
        dataset.shutdown()
        return found

    compare(program)


# Each of torch's workers imports monai.
@pytest.mark.limit(480)
def test_workers_that_do_not_fork(compare, files):
    def program(way):
        set_determinism(7)
        dataset = Dataset(files, transform())
        options = {"num_workers": 2, "shuffle": True, "multiprocessing_context": "spawn"}
        return epochs(way.loader(DataLoader, dataset, batch_size=2, **options), 1)

    compare(program)


def test_patches_of_a_grid(compare, files):
    def program(way):
        set_determinism(7)
        load = Compose([LoadImaged(KEYS), EnsureChannelFirstd(KEYS)])
        patches = GridPatchDataset(Dataset(files, load), PatchIterd(KEYS, (8, 8, 16)), with_coordinates=False)
        return epochs(way.loader(DataLoader, patches, batch_size=3, num_workers=2))

    compare(program)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_loader_that_is_read_by_a_thread(compare, files, repeats):
    def program(way):
        set_determinism(7)
        dataset = CacheDataset(files, transform(), progress=False)
        options = {"num_workers": 2, "shuffle": True, "buffer_size": 2, "repeats": repeats}
        return epochs(way.loader(ThreadDataLoader, dataset, batch_size=2, **options))

    compare(program)


def test_workers_that_are_threads_are_torchs(way_name, files):
    def program(way):
        dataset = CacheDataset(files, transform().transforms[:4], progress=False)
        return epochs(
            way.loader(ThreadDataLoader, dataset, batch_size=2, num_workers=2, use_thread_workers=True)
        )

    with loader_ways.use("torch") as torchs:
        expected = program(torchs)
    with loader_ways.use(way_name) as ours:
        assert program(ours) == expected
    assert ours.paths == ["torch"] * torchs.torchs == ["torch", "torch"]
