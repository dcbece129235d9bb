"""fastai: loaders of its own over the iterator class of torch, which two assignments turn to the hook."""

import fastai.data.load
import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.schedule import fit_one_cycle  # noqa: F401
from fastai.callback.training import ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import SkipItemException
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.tabular.core import Categorify, Normalize
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.text.data import LMDataLoader, SortedDL, TensorText, pad_input
from fastai.torch_core import noop
from fastai.vision.augment import RandomResizedCrop, aug_transforms
from fastai.vision.data import ImageDataLoaders
from PIL import Image
from torch import nn

from frameworks import loader_ways, training
from parity.describe import describe


@pytest.fixture
def compare_reached(compare, monkeypatch):
    """`compare`, with the assignments of docs/frameworks/fastai.md in force where they are needed."""
    several, single = fastai.data.load._loaders

    def run(program, gets_batches=True):
        def reached(way):
            def counted(loader):
                way.torchs += 1
                return several(loader)

            get_iterator = counted if way.name == "torch" else torch.utils.data.DataLoader._get_iterator
            monkeypatch.setattr(fastai.data.load, "_loaders", (get_iterator, single))
            return program(way)

        return compare(reached, gets_batches)

    monkeypatch.setattr(fastai.data.load._FakeLoader, "check_worker_number_rationality", noop, raising=False)
    return run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for index in range(20):
        pixels = np.random.default_rng(index).integers(255, size=(40, 36, 3), dtype=np.uint8)
        (folder / "ab"[index % 2]).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "ab"[index % 2] / f"{index}.png")
    return folder


def losses_of(learner, *callbacks):
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, cbs=callbacks)
    losses = [loss.item() for loss in learner.recorder.losses]
    return [losses, str(learner.recorder.values), training.weights(learner.model)]


def small_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("short", [False, True])
def test_pictures(compare_reached, pictures, short):
    """Augmented in workers and in the main process; `short`: epochs that end half-way."""

    def program(way):  # noqa: ARG001
        loaders = ImageDataLoaders.from_folder(
            pictures,
            valid_pct=0.3,
            seed=3,
            item_tfms=RandomResizedCrop(24),
            batch_tfms=aug_transforms(size=20),
            bs=4,
            num_workers=2,
            device="cpu",
        )
        learner = Learner(loaders, small_net(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
        found = losses_of(learner, *([ShortEpochCallback(0.5)] if short else []))
        with learner.no_bar():
            predicted, targets = learner.get_preds()
        return [found, describe(predicted), describe(targets)]

    ours = compare_reached(program)
    assert len(ours.made) == 5


@loader_ways.INSTALL_ONLY
def test_tables(compare_reached):
    """A batch is a data frame, and becomes tensors in the main process."""

    def program(way):  # noqa: ARG001
        rows = np.random.default_rng(0)
        frame = pd.DataFrame(
            {
                "number": rows.random(40),
                "kind": rows.choice(["x", "y"], 40),
                "target": rows.choice([0, 1], 40),
            }
        )
        loaders = TabularDataLoaders.from_df(
            frame,
            procs=[Categorify, Normalize],
            cat_names=["kind"],
            cont_names=["number"],
            y_names="target",
            valid_idx=list(range(10)),
            bs=8,
            num_workers=2,
            device="cpu",
        )
        loss = nn.MSELoss()
        return losses_of(tabular_learner(loaders, layers=[8], n_out=1, y_range=(0, 1), loss_func=loss))

    compare_reached(program)


def texts(count=24):
    return [(TensorText(torch.arange(2 + index % 5)), index % 3) for index in range(count)]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("persistent", [False, True])
def test_texts_by_length(compare_reached, persistent):
    def program(way):  # noqa: ARG001
        loader = SortedDL(
            texts(),
            bs=4,
            shuffle=True,
            before_batch=pad_input,
            num_workers=2,
            persistent_workers=persistent,
        )
        return [
            [(type(text).__name__, describe(text), describe(label)) for text, label in loader] for _ in "ab"
        ]

    compare_reached(program)


@loader_ways.INSTALL_ONLY
def test_a_language_model(compare_reached):
    def program(way):  # noqa: ARG001
        loader = LMDataLoader(texts(), bs=2, seq_len=5, shuffle=True, num_workers=2)
        return [[describe(part) for part in batch] for _ in "ab" for batch in loader]

    compare_reached(program)


def skip_odd(item):
    if item[1] % 2:
        raise SkipItemException
    return item


@loader_ways.INSTALL_ONLY
def test_items_that_are_skipped(compare_reached):
    def program(way):  # noqa: ARG001
        loader = fastai.data.load.DataLoader(training.Points(), bs=3, num_workers=2, after_item=skip_odd)
        return [describe(batch) for batch in loader]

    compare_reached(program)


@loader_ways.INSTALL_ONLY
def test_an_error_of_the_dataset(compare_reached):
    def program(way):  # noqa: ARG001
        loader = fastai.data.load.DataLoader(texts(), bs=4, num_workers=2)
        with pytest.raises(RuntimeError, match="Error when trying to collate") as raised:
            list(loader)
        return [str(raised.value).partition("Original Traceback")[0]]

    compare_reached(program, gets_batches=False)


def test_loaders_of_torchs_class(compare):
    def program(way):
        options = {"batch_size": 4, "num_workers": 2}
        loaders = DataLoaders(
            way.DataLoader(training.Points(), shuffle=True, **options),
            way.DataLoader(training.Points(8), **options),
        )
        learner = Learner(loaders, training.small_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
        return losses_of(learner)

    compare(program)
