"""One rank: accelerate shards the batches of a loader and trains with DDP."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard

from frameworks import launch, loader_ways, training


def train(way: loader_ways.Way) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = training.small_model()
    loader = way.DataLoader(training.Points(26), batch_size=4, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert isinstance(loader, DataLoaderShard)
    losses, classes = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            losses.append(training.step(model, optimizer, batch))
            classes.append(batch[1].tolist())
    return {"data": losses, "classes": classes, "weights": training.weights(model)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    launch.main(train, Accelerator(cpu=True).process_index)
