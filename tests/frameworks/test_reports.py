"""The report at exit names the loaders that frameworks keep to themselves."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from frameworks import launch

# The programs have no guard.
_HEAD = """
import multiprocessing, numpy, torch
from torch.utils.data import DataLoader, TensorDataset

multiprocessing.set_start_method("fork")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
"""

LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(dataset, batch_size=3, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(dataset, batch_size=4)

lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0,
).fit(Model())  # iterated here
"""

TRANSFORMERS = """
import tempfile
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        found = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}

rows = [{"x": x, "labels": y} for x, y in dataset]
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=3, dataloader_num_workers=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )
    transformers.Trainer(Model(), arguments, train_dataset=rows).train()  # iterated here
"""

KERAS = """
import keras

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(loss="mse")
train = DataLoader(dataset, batch_size=3, num_workers=1)
model.fit(train, epochs=2, verbose=0)  # iterated here
model.predict(numpy.zeros((8, 4)), batch_size=4, verbose=0)  # iterated here
"""

DARTS = """
from darts import TimeSeries
from darts.models import NBEATSModel

series = TimeSeries.from_values(numpy.arange(40, dtype=numpy.float32))
model = NBEATSModel(
    4, 2, n_epochs=2, batch_size=8, num_blocks=1, num_layers=1, layer_widths=8, num_stacks=1,
    pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False, "logger": False},
)
model.fit(series, dataloader_kwargs={"num_workers": 1})  # iterated here
"""

# Module: program, the path and batches of each of its loaders.
PROGRAMS = {
    "lightning": (LIGHTNING, [("native", 8), ("single-process", 6)]),
    "transformers": (TRANSFORMERS, [("native", 8)]),
    # It takes one more from each of its loaders, for the shapes.
    "keras": (KERAS, [("native", 9), ("single-process", 2)]),
    "darts": (DARTS, [("native", 10)]),
}
# keras is told by a variable, before its import, which library computes.
_ENVIRONMENT = {"KERAS_BACKEND": "torch"}


@pytest.mark.limit(240)
@pytest.mark.parametrize("framework", PROGRAMS)
def test_a_report_at_exit_names_loaders_that_are_hidden(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program, expected = PROGRAMS[framework]
    file = tmp_path / "train.py"
    file.write_text(_HEAD + program)
    output = launch.run_program(["-m", "ringloader", "run", "--report", str(file)], 200, _ENVIRONMENT)
    lines = [line for line in output.splitlines() if re.match(r"ringloader: \S+\.py:\d+: ", line)]
    marked = [
        number
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith("# iterated here")
    ]
    found = []
    of_program = rf"ringloader: {re.escape(str(file))}:(\d+)"
    for line in lines:
        about = re.fullmatch(
            rf"{of_program}: [^:]+: ([\w-]+); ([\d,]+) batches in .*; waited .* s; starts .* s", line
        )
        assert about, output
        assert int(about[1]) in marked, output
        found.append((about[2], int(about[3].replace(",", ""))))
    assert found == expected, output
