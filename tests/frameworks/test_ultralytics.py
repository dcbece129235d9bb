"""Ultralytics: a loader whose sampler never ends, and which keeps, ends and renews its iterator by itself."""

import numpy as np
import pytest
import yaml
from PIL import Image
from ultralytics.cfg import get_cfg
from ultralytics.data.build import InfiniteDataLoader, build_dataloader, build_yolo_dataset
from ultralytics.data.utils import check_det_dataset
from ultralytics.models.yolo.detect import DetectionTrainer

import ringloader
from faults import proc
from frameworks import training
from parity.describe import describe

MODEL = {
    "nc": 2,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[[1, 2], 1, "Detect", ["nc"]]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures with boxes, and the files that name them and a model."""
    root = tmp_path_factory.mktemp("boxes")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 18)):
        for kind in ("images", "labels"):
            (root / kind / part).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(255, size=(48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / part / f"{index}.png")
            boxes = [f"{box % 2} 0.5 0.5 {0.2 + box / 10} 0.3\n" for box in range(index % 3)]
            (root / "labels" / part / f"{index}.txt").write_text("".join(boxes))
    described = {"path": str(root), "train": "images/train", "val": "images/val", "names": {0: "a", 1: "b"}}
    (root / "data.yaml").write_text(yaml.safe_dump(described))
    (root / "model.yaml").write_text(yaml.safe_dump(MODEL))
    return root


class Trainer(DetectionTrainer):
    """With workers, which it does without on a CPU."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.args.workers = 2


class Converting(Trainer):
    def get_dataloader(self, *args, **kwargs):
        return ringloader.convert(super().get_dataloader(*args, **kwargs))


def test_training(compare, folder, tmp_path):
    """The last epoch is without mosaics: workers are ended, and others started."""

    def program(way):
        trainer = (Converting if way.name == "class" else Trainer)(
            overrides={
                "model": str(folder / "model.yaml"),
                "data": str(folder / "data.yaml"),
                "project": str(tmp_path / way.name),
                "imgsz": 32,
                "epochs": 3,
                "batch": 4,
                "close_mosaic": 1,
                "device": "cpu",
                "seed": 3,
                "amp": False,
                "plots": False,
                "verbose": False,
            }
        )
        losses = []
        trainer.add_callback("on_train_batch_end", lambda trainer: losses.append(str(trainer.loss_items)))
        trainer.train()
        return [losses, training.weights(trainer.model), str(trainer.metrics)]

    compare(program)


def boxes_of(folder, mode):
    settings = get_cfg(overrides={"imgsz": 32, "task": "detect"})
    described = check_det_dataset(str(folder / "data.yaml"))
    return build_yolo_dataset(settings, described[mode], 4, described, mode=mode, rect=mode == "val")


@pytest.mark.parametrize("mode", ["train", "val"])
def test_build_dataloader(compare, folder, mode):
    def program(way):
        loader = build_dataloader(boxes_of(folder, mode), 4, 2, shuffle=mode == "train", device="cpu")
        if way.name == "class":
            ringloader.convert(loader)
        return [[describe(batch) for batch in loader] for _ in range(2)]

    ours = compare(program)
    assert len(ours.made) == 1, "one iterator for all epochs"


def test_a_loader_that_is_reset_in_mid_epoch(compare):
    def program(way):
        loader = way.loader(InfiniteDataLoader, training.Points(), batch_size=4, shuffle=True, num_workers=2)
        first = [describe(batch) for batch, _ in zip(loader, range(3), strict=False)]
        loader.reset()
        second = [describe(batch) for batch in loader]
        loader.close()
        assert not proc.wait_without_children(10)
        return [first, second]

    compare(program)


def test_a_loader_that_is_dropped(compare):
    """The loader terminates its workers, whatever they do."""

    def program(way):
        loader = way.loader(InfiniteDataLoader, training.Points(), batch_size=4, num_workers=2)
        batch = next(iter(loader))
        del loader
        assert not proc.wait_without_children(10)
        return [describe(batch)]

    compare(program)
