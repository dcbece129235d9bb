"""Ray Train: two workers; `prepare_data_loader` builds torch's class anew, with its own sampler."""

import os
import tempfile
from pathlib import Path

import pytest
import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DistributedSampler

import ringloader
from frameworks import data, launch, ways

TESTS = Path(__file__).resolve().parent.parent
PACKAGE = Path(ringloader.__file__).resolve().parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]


@pytest.fixture(scope="module")
def cluster():
    """As small as Ray can be, in a folder that goes with it."""
    path = os.pathsep.join([str(PACKAGE), str(TESTS), os.environ.get("PYTHONPATH", "")])
    # Its sockets' names have little room, so the folder's name must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=3,
            object_store_memory=80 << 20,
            include_dashboard=False,
            configure_logging=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )
        yield folder
        ray.shutdown()


def loop(config):
    """What each of Ray's workers runs: every way, one after the other."""
    torch.set_num_threads(1)
    rank = train.get_context().get_world_rank()
    launch.write_ways(
        lambda way: fit(way, config["add_dist_sampler"]), rank, config["folder"], config["names"]
    )
    train.report({})


def fit(way, add_dist_sampler):
    points = data.Points(26)
    options = {} if add_dist_sampler else {"sampler": DistributedSampler(points)}
    loader = way.DataLoader(points, batch_size=4, num_workers=1, **options)
    loader = prepare_data_loader(loader, add_dist_sampler=add_dist_sampler)
    assert isinstance(loader.sampler, DistributedSampler)
    model = prepare_model(data.small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, classes = [], []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            losses.append(data.step(model, optimizer, batch))
            classes.append(batch[1].tolist())
    return {"data": losses, "classes": classes, "weights": data.weights(model)}


def run(folder, names, **config):
    TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "names": names, **config},
        scaling_config=ScalingConfig(num_workers=launch.RANKS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder)),
    ).fit()


def test_ray_adds_its_sampler(cluster, tmp_path):  # noqa: ARG001
    """It builds torch's own class then, which only `install()` reaches."""
    run(tmp_path, ["torch", "class", "install"], add_dist_sampler=True)
    launch.check_ways(tmp_path, names=("install",), unreached=("class",))


def test_a_sampler_of_the_users(cluster, tmp_path):  # noqa: ARG001
    """Ray keeps the loader, inside one of its own."""
    run(tmp_path, ["torch", *ways.OURS], add_dist_sampler=False)
    launch.check_ways(tmp_path, names=ways.OURS)
