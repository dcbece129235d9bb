"""torchio: a loader class of its own for subjects, and a queue that builds torch's class by itself."""

import numpy as np
import pytest
import torch
import torchio as tio

from frameworks import loader_ways
from parity.describe import describe


def subject(number):
    """A volume, its labels, and what else people put beside them."""
    random = torch.Generator().manual_seed(number)
    return tio.Subject(
        image=tio.ScalarImage(tensor=torch.rand(1, 10, 10, 10, generator=random)),
        labels=tio.LabelMap(tensor=torch.randint(3, (1, 10, 10, 10), generator=random)),
        age=number,
        name=f"subject {number}",
        weights=np.full(3, number),
    )


def dataset():
    transform = tio.Compose([tio.RandomFlip(axes=(0, 1, 2)), tio.RandomNoise(), tio.RescaleIntensity((0, 1))])
    return tio.SubjectsDataset([subject(number) for number in range(8)], transform=transform)


def queue(**options):
    return tio.Queue(
        dataset(),
        max_length=10,
        samples_per_volume=4,
        sampler=tio.UniformSampler(4),
        num_workers=2,
        **options,
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_subjects(compare, persistent):
    def program(way):
        loader = way.loader(
            tio.SubjectsLoader,
            dataset(),
            batch_size=3,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
        )
        return [describe(batch) for _ in range(2) for batch in loader]

    compare(program)


def test_volumes_in_files(compare, tmp_path):
    """Subjects as they are, whose volumes are read by the workers."""
    for number in range(4):
        subject(number).image.save(tmp_path / f"{number}.nii.gz")

    def program(way):
        subjects = [tio.Subject(image=tio.ScalarImage(file)) for file in sorted(tmp_path.iterdir())]
        files = tio.SubjectsDataset(subjects, transform=tio.RandomAffine())
        loader = way.DataLoader(files, batch_size=2, num_workers=2, collate_fn=list)
        return [
            [(describe(one.image.data), describe(one.image.affine), str(one.image.path), str(one.history))]
            for batch in loader
            for one in batch
        ]

    compare(program)


def test_patches_of_a_grid(compare):
    def program(way):
        grid = tio.GridSampler(subject(1), 6, 2)
        aggregator = tio.GridAggregator(grid)
        for batch in way.loader(tio.SubjectsLoader, grid, batch_size=4, num_workers=2):
            aggregator.add_batch(batch["image"][tio.DATA], batch[tio.LOCATION])
        return [describe(aggregator.get_output_tensor())]

    compare(program)


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("background", [False, True])
def test_a_queue_of_patches(compare, background):
    """The queue's subjects come from workers, over a loader inside; the one outside has none."""

    def program(way):
        loader = way.DataLoader(queue(start_background=background), batch_size=5, collate_fn=list)
        batches = [patch for _ in range(2) for batch in loader for patch in batch]
        return [describe(patch.image.data) for patch in batches]

    compare(program)


@loader_ways.INSTALL_ONLY
def test_a_queue_that_workers_inherit_is_refused(way_name):
    """The queue looks for the error that torch's iterator raises in a forked child."""
    with loader_ways.use(way_name) as way:
        loader = way.DataLoader(queue(), batch_size=5, num_workers=2, collate_fn=list)
        with pytest.raises(RuntimeError, match=r"number of workers .* should be 0"):
            next(iter(loader))
