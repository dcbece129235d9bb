"""One rank: a run under DDP, and a second one that goes on from a checkpoint in the middle of an epoch."""

import json
import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import ringloader
from frameworks import launch, lightning_module, training


def fit(folder: Path, workers: int, checkpoint: Path | None = None) -> lightning_module.Watching:
    loader = ringloader.StatefulDataLoader(
        training.Numbers(), batch_size=4, shuffle=True, num_workers=workers
    )
    model = lightning_module.Watching()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        strategy="ddp",
        devices=launch.RANKS,
        logger=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    whole = fit(folder, 0)
    resumed = fit(folder / "again", 2, folder / "step=3.ckpt")
    result = {"whole": whole.seen, "resumed": resumed.seen}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
