"""The driver of a small Ray cluster, and what its two workers run."""

import os
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DistributedSampler

from faults import proc
from frameworks import launch, training


def fit(way, add_dist_sampler):
    points = training.Points(26)
    options = {} if add_dist_sampler else {"sampler": DistributedSampler(points)}
    loader = way.DataLoader(points, batch_size=4, num_workers=1, **options)
    loader = prepare_data_loader(loader, add_dist_sampler=add_dist_sampler)
    assert isinstance(loader.sampler, DistributedSampler)
    model = prepare_model(training.small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, classes = [], []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            losses.append(training.step(model, optimizer, batch))
            classes.append(batch[1].tolist())
    return {"data": losses, "classes": classes, "weights": training.weights(model)}


def loop(config):
    """Runs in each of Ray's two workers: all ways, with Ray's sampler and with one of the user's."""
    torch.set_num_threads(1)
    rank = train.get_context().get_world_rank()
    for folder, add_dist_sampler in config["folders"].items():
        launch.write_ways(lambda way, add=add_dist_sampler: fit(way, add), rank, folder, config["names"])
    train.report({})


def main() -> None:
    rays, users, *names = sys.argv[1:]
    # The sockets' names have little room, so the folder's name must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=launch.RANKS,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
        )
        TorchTrainer(
            loop,
            train_loop_config={"names": names, "folders": {rays: True, users: False}},
            scaling_config=ScalingConfig(num_workers=launch.RANKS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(Path(folder) / "storage")),
        ).fit()
        ray.shutdown()
    left = proc.wait_without_children(20)
    assert not left, f"left by Ray or by a loader: {left}"


if __name__ == "__main__":
    main()
