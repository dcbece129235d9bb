"""Loads a folder of photographs for training: each file is decoded once, and cropped anew in every epoch.

    python examples/photos.py FOLDER [--cache FILE] [--workers N] [--epochs N]

The folder has a folder of JPEG files for each class, as torchvision's ImageFolder. Needs Pillow; with
OpenCV, the random crop is faster.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from ringloader import CachedDataset, DataLoader

try:
    import cv2
except ModuleNotFoundError:
    cv2 = None
else:
    # The workers are processes: one core each.
    cv2.setNumThreads(0)

SIDE = 256
CROP = 224
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

Sample = tuple[np.ndarray, int]


class Photos(Dataset[Sample]):
    """The part of the pipeline that is the same in every epoch: decoded, with the shorter side at 256."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.items = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).glob("*.jp*g"))
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.items[index]
        with Image.open(path) as image:
            # libjpeg decodes large photographs at a half, a quarter or an eighth of their size.
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            image = image.convert("RGB")
        scale = SIDE / min(image.size)
        size = [max(SIDE, round(side * scale)) for side in image.size]
        return np.array(image.resize(size, Image.Resampling.BILINEAR)), label


def random_resized_crop(sample: Sample) -> tuple[torch.Tensor, int]:
    """The part that is random, as torchvision's ``RandomResizedCrop`` and ``RandomHorizontalFlip``.

    Channels stay last.
    """
    pixels, label = sample
    height, width = pixels.shape[:2]
    for _ in range(10):
        share, ratio, x, y = torch.rand(4).tolist()
        area = height * width * (0.08 + 0.92 * share)
        root = math.sqrt((4 / 3) ** (2 * ratio - 1))
        across, down = round(math.sqrt(area) * root), round(math.sqrt(area) / root)
        if 0 < across <= width and 0 < down <= height:
            break
    else:
        across = down = min(height, width)
    left, top = int(x * (width - across + 1)), int(y * (height - down + 1))
    part = pixels[top : top + down, left : left + across]
    if cv2 is not None:
        part = cv2.resize(part, (CROP, CROP), interpolation=cv2.INTER_AREA)
    else:
        part = np.array(Image.fromarray(part).resize((CROP, CROP), Image.Resampling.BILINEAR))
    image = torch.from_numpy(part)
    return image.flip(1) if torch.rand(()) < 0.5 else image, label


def main() -> None:
    """Loads all epochs, and prints the rate of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, help="a file for the pictures, for the next run too")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    photos = Photos(options.folder)
    cached = CachedDataset(
        photos, path=options.cache, version=f"short side {SIDE}, Pillow", then=random_resized_crop
    )
    loader = DataLoader(cached, 64, shuffle=True, num_workers=options.workers, persistent_workers=True)
    for epoch in range(options.epochs):
        begun, count = time.perf_counter(), 0
        for images, _ in loader:
            # Whole batches are converted faster than samples, and travel in a quarter of the bytes. To put
            # channels first takes no time, and models in torch's `channels_last` want them as they are.
            images = images.permute(0, 3, 1, 2).float().div_(255).sub_(MEAN).div_(STD)
            count += len(images)
        print(f"epoch {epoch + 1}: {count / (time.perf_counter() - begun):,.0f} photographs per second")
    print(cached.stats())


if __name__ == "__main__":
    main()
