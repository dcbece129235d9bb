"""pytorch-forecasting: loaders that a dataset makes, of the class of torch, and a model trained over them."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_forecasting import GroupNormalizer, TemporalFusionTransformer, TimeSeriesDataSet

import ringloader
from frameworks import training
from parity.describe import describe

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module")
def series():
    """Four series for training, and their last steps to be predicted."""
    times = np.tile(np.arange(30), 4)
    names = np.repeat(np.arange(4), 30)
    frame = pd.DataFrame(
        {
            "time": times,
            "name": names.astype(str),
            "value": np.sin(times / 3 + names) + names,
            "kind": (times % 3).astype(str),
        }
    )
    train = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["name"],
        min_encoder_length=4,
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_known_categoricals=["kind"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["name"]),
        add_relative_time_idx=True,
        add_encoder_length=True,
    )
    return train, TimeSeriesDataSet.from_dataset(train, frame, predict=True, stop_randomization=True)


def loader_of(way, dataset, **options):
    loader = dataset.to_dataloader(num_workers=2, **options)
    return ringloader.convert(loader) if way.name == "class" else loader


@pytest.mark.parametrize("persistent", [False, True])
def test_training_and_prediction(compare, series, persistent):
    train, last = series

    def program(way):
        options = {"batch_size": 8, "persistent_workers": persistent}
        loader = loader_of(way, train, train=True, **options)
        to_predict = loader_of(way, last, train=False, **options)
        torch.manual_seed(3)
        model = TemporalFusionTransformer.from_dataset(
            train, hidden_size=4, attention_head_size=1, hidden_continuous_size=4, log_interval=0
        )
        trainer = pl.Trainer(max_epochs=2, limit_train_batches=5, **QUIET)
        trainer.fit(model, loader, to_predict)
        predicted = model.predict(to_predict, trainer_kwargs=dict(QUIET))  # it writes there
        return [training.weights(model), describe(predicted), trainer.callback_metrics["val_loss"].item()]

    compare(program)


def test_batches_of_one_time(compare, series):
    """The library's own sampler makes the batches."""

    def program(way):
        loader = loader_of(way, series[0], train=True, batch_size=4, batch_sampler="synchronized")
        return [describe(batch) for _ in range(2) for batch in loader]

    compare(program)
