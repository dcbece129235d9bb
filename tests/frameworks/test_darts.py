"""darts: its models make their loaders, of the class of torch, and train by Lightning."""

import numpy as np
import pytest
from darts import TimeSeries
from darts.models import NBEATSModel, TiDEModel

from frameworks import loader_ways, training

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
SIZES = {
    NBEATSModel: {"num_stacks": 1, "num_blocks": 1, "num_layers": 1, "layer_widths": 8},
    TiDEModel: {"hidden_size": 8, "decoder_output_dim": 4},
}


def series(start):
    values = np.sin(np.arange(start, start + 40) / 3).astype(np.float32)
    return TimeSeries.from_values(values)


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("model_class", SIZES)
def test_fit_and_predict(compare, model_class, workers):
    def program(way):  # noqa: ARG001
        model = model_class(
            6, 2, n_epochs=2, batch_size=8, random_state=3, pl_trainer_kwargs=QUIET, **SIZES[model_class]
        )
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        model.fit([series(0), series(7)], val_series=series(20), dataloader_kwargs=options)
        predicted = model.predict(4, series=[series(3), series(9)], dataloader_kwargs=options)
        return [training.weights(model.model), [one.values().tolist() for one in predicted]]

    ours = compare(program, workers=workers)
    # Of training, validation and prediction.
    assert len(ours.reports) == 3
