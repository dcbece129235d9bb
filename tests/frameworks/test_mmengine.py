"""mmengine: the Runner builds loaders from a configuration, and keeps loaders that it gets."""

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner

from frameworks import loader_ways, training


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = training.small_model()

    def forward(self, features, classes, mode):
        found = self.layers(features)
        if mode == "loss":
            return {"loss": torch.nn.functional.cross_entropy(found, classes)}
        return [found]


class Loss(BaseMetric):
    def process(self, data_batch, data_samples):
        loss = torch.nn.functional.cross_entropy(data_samples[0], data_batch[1])
        self.results.append(loss.item())

    def compute_metrics(self, results):
        return {"loss": sum(results)}


class Noting(Hook):
    """Notes what the program can see of the training."""

    def __init__(self):
        self.found = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):  # noqa: ARG002
        self.found.append([data_batch[0].tolist(), outputs["loss"].item()])

    def after_val_epoch(self, runner, metrics=None):  # noqa: ARG002
        self.found.append(metrics)


def configured(dataset, **options):
    """A loader for the Runner to build."""
    return {"dataset": dataset, "batch_size": 4, "collate_fn": {"type": "default_collate"}, **options}


def run(folder, name, train, other, loop, **options):
    noting = Noting()
    runner = Runner(
        Model(),
        str(folder),
        train_dataloader=train,
        val_dataloader=other,
        train_cfg=loop,
        val_cfg={},
        val_evaluator=[Loss()],
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        custom_hooks=[noting],
        randomness={"seed": 5},
        log_level="ERROR",
        experiment_name=name,
        **options,
    )
    runner.train()
    return [noting.found, training.weights(runner.model)]


EPOCHS = {"by_epoch": True, "max_epochs": 2, "val_interval": 1}
STEPS = {"by_epoch": False, "max_iters": 8, "val_interval": 5}


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loop", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_loaders_of_a_configuration(compare, tmp_path, loop, workers):
    def program(way):
        shuffled = {"sampler": {"type": "DefaultSampler", "shuffle": True}, "num_workers": workers}
        in_order = {"sampler": {"type": "DefaultSampler", "shuffle": False}, "num_workers": workers}
        if workers:
            in_order["persistent_workers"] = True
        train, other = configured(training.Points(), **shuffled), configured(training.Points(7), **in_order)
        return run(tmp_path / way.name, way.name, train, other, loop)

    ours = compare(program, workers=workers)
    assert len(ours.reports) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_are_passed(compare, tmp_path, workers):
    def program(way):
        train = way.DataLoader(training.Points(), batch_size=4, shuffle=True, num_workers=workers)
        other = way.DataLoader(training.Points(7), batch_size=4, num_workers=workers)
        return run(tmp_path / way.name, way.name, train, other, EPOCHS)

    ours = compare(program, workers=workers)
    assert len(ours.reports) == 2


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("loop", [{**EPOCHS, "max_epochs": 3}, STEPS], ids=["epochs", "steps"])
def test_going_on_from_a_checkpoint(compare, tmp_path, monkeypatch, loop):
    """After an epoch; or in the middle of it, where the Runner reads again what was trained on."""
    # mmengine does not tell torch that its checkpoints have more than weights.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    def program(way):
        def go(folder, **options):
            train = configured(
                training.Points(), sampler={"type": "DefaultSampler", "shuffle": True}, num_workers=2
            )
            other = configured(
                training.Points(7), sampler={"type": "DefaultSampler", "shuffle": False}, num_workers=2
            )
            saving = {"checkpoint": {"type": "CheckpointHook", "interval": 2, "by_epoch": loop["by_epoch"]}}
            return run(folder, folder.name, train, other, loop, default_hooks=saving, **options)

        found = go(tmp_path / f"{way.name} whole")
        kind = "epoch" if loop["by_epoch"] else "iter"
        checkpoint = tmp_path / f"{way.name} whole" / f"{kind}_2.pth"
        resumed = go(tmp_path / f"{way.name} resumed", load_from=str(checkpoint), resume=True)
        assert len(resumed[0]) < len(found[0])
        return [found, resumed]

    compare(program)
