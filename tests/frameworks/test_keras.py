"""Keras on the backend torch: it keeps the loaders that `fit` gets, and makes some of arrays itself."""

import keras
import numpy as np
import pytest
import torch

import ringloader
from frameworks import loader_ways, training


def compiled():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(training.CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def outcome(model, history):
    return [history.history, [value.tolist() for value in model.get_weights()]]


@pytest.mark.parametrize("workers", [0, 2])
def test_fit_evaluate_and_predict(compare, workers):
    def program(way):
        model = compiled()
        train = way.DataLoader(training.Points(), batch_size=4, shuffle=True, num_workers=workers)
        other = way.DataLoader(training.Points(9), batch_size=4, num_workers=workers)
        history = model.fit(train, validation_data=other, epochs=2, verbose=0)
        return [
            outcome(model, history),
            model.evaluate(other, verbose=0),
            model.predict(other, verbose=0).tolist(),
        ]

    ours = compare(program, workers=workers)
    assert len(ours.reports) == 2
    # One for the shapes, and two in each epoch, the second of which nobody reads.
    assert len(ours.made) == 1 + 2 * 2 + 2 * 2 + 2 + 2


def test_persistent_workers_start_once(compare):
    def program(way):
        train = way.DataLoader(training.Points(), batch_size=4, num_workers=2, persistent_workers=True)
        model = compiled()
        return outcome(model, model.fit(train, epochs=3, verbose=0))

    ours = compare(program)
    assert len(ours.made) == 1


@loader_ways.INSTALL_ONLY
def test_arrays(compare):
    """Keras makes a loader of them, without workers."""

    def program(way):  # noqa: ARG001
        features = np.random.rand(24, training.FEATURES).astype(np.float32)
        model = compiled()
        history = model.fit(features, np.arange(24) % training.CLASSES, 4, epochs=2, verbose=0)
        return [outcome(model, history), model.predict(features, verbose=0).tolist()]

    compare(program, workers=0)


class SaveLoader(keras.callbacks.Callback):
    """The callback of docs/frameworks/keras.md."""

    def __init__(self, loader, folder, every):
        super().__init__()
        self.loader, self.folder, self.every = loader, folder, every

    def on_train_begin(self, logs=None):  # noqa: ARG002
        if (self.folder / "loader.pt").exists():
            self.loader.load_state_dict(torch.load(self.folder / "loader.pt", weights_only=True))

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        if (batch + 1) % self.every == 0:
            self.model.save(self.folder / "model.keras")
            torch.save(self.loader.state_dict(), self.folder / "loader.pt")


class Classes(training.Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + index, index % training.CLASSES


class StoppedError(Exception):
    pass


class Stop(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.last = batch

    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002
        if batch == self.last:
            raise StoppedError


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_within_an_epoch(tmp_path, workers):
    def loader(seed):
        return ringloader.StatefulDataLoader(
            Classes(),
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(seed),
        )

    whole = compiled()
    whole.fit(loader(3), verbose=0)
    train, model = loader(3), compiled()
    with pytest.raises(StoppedError):
        model.fit(train, verbose=0, callbacks=[SaveLoader(train, tmp_path, 4), Stop(6)])
    # With a generator that was seeded otherwise.
    train, model = loader(50), keras.saving.load_model(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(train, verbose=0, callbacks=[SaveLoader(train, tmp_path, 100)])
    assert [value.tolist() for value in model.get_weights()] == [
        value.tolist() for value in whole.get_weights()
    ]
