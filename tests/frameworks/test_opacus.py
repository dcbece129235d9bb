"""opacus: `make_private` builds a loader of its own class from the one that it gets."""

import warnings

import opacus
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

import ringloader
from frameworks import loader_ways, training

# Of its hooks, and of a random generator that is not for secrets.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def private(way, workers, **options):
    """A model, its optimizer and the private loader."""
    model = training.small_model()
    return opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=way.DataLoader(training.Points(), batch_size=4, num_workers=workers, **options),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def losses(model, optimizer, batches):
    return [training.step(model, optimizer, batch) for batch in batches if len(batch[0])]


@pytest.mark.parametrize("workers", [0, 2])
def test_private_training(compare, workers):
    """Batches of random sizes, an empty one among them."""

    def program(way):
        model, optimizer, loader = private(way, workers)
        if way.name == "class":
            loader = ringloader.convert(loader)
        found = [losses(model, optimizer, loader) for _ in range(3)]
        return [found, training.weights(model)]

    ours = compare(program, workers=workers)
    assert len(ours.made) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_parts(compare, workers):
    """The manager builds a loader once more."""

    def program(way):
        model, optimizer, loader = private(way, workers, **({"persistent_workers": True} if workers else {}))
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as in_parts:
            if way.name == "class":
                in_parts = ringloader.convert(in_parts)
            found = [losses(model, optimizer, in_parts) for _ in range(2)]
        return [found, training.weights(model)]

    compare(program, workers=workers)


def test_batches_that_are_empty(compare):
    """From the collation, which remembers what a batch looks like in each worker."""

    def program(way):
        loader = way.DataLoader(training.Points(6), batch_size=1, num_workers=2)
        made = opacus.data_loader.DPDataLoader.from_data_loader(
            loader, generator=torch.Generator().manual_seed(4)
        )
        if way.name == "class":
            ringloader.convert(made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [[len(batch) and [part.tolist() for part in batch] for batch in made] for _ in range(6)]
        assert any(len(batch[1]) == 0 for epoch in found for batch in epoch if batch)
        return found

    compare(program)


def test_the_class_that_is_passed_is_dropped():
    with loader_ways.use("class") as way:
        _, _, loader = private(way, 2)
        list(loader)
    assert not isinstance(loader, ringloader.DataLoader)
    assert way.reports == []
