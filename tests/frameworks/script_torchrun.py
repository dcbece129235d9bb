"""One rank: DDP on the CPU over a loader with a DistributedSampler."""

from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from frameworks import launch, loader_ways, training


def train(way: loader_ways.Way) -> dict[str, Any]:
    points = training.Points(26)
    sampler: DistributedSampler[Any] = DistributedSampler(points, seed=5)
    loader = way.DataLoader(points, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    model = DistributedDataParallel(training.small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, firsts = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            losses.append(training.step(model, optimizer, batch))
            firsts.append(batch[1].tolist())
    return {"data": losses, "classes": firsts, "weights": training.weights(model)}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    launch.main(train, torch.distributed.get_rank())
    torch.distributed.destroy_process_group()
