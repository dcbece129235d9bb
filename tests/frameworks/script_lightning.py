"""One rank: Lightning's DDP strategy, which replaces the sampler of the loader that it is given."""

import os
from typing import Any

import lightning
import torch
from torch.utils.data import DistributedSampler

from frameworks import launch, lightning_module, loader_ways, training


def train(way: loader_ways.Way) -> dict[str, Any]:
    loader = way.DataLoader(
        training.Points(26), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    )
    assert not isinstance(loader.sampler, DistributedSampler)
    model = lightning_module.Classifier()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy="ddp",
        devices=launch.RANKS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    used = trainer.train_dataloader
    assert isinstance(used.sampler, DistributedSampler)
    assert type(used) is way.DataLoader
    return {"data": model.losses, "classes": model.classes, "weights": training.weights(model)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    launch.main(train, int(os.environ["RANK"]))
