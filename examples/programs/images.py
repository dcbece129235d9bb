"""Images in a folder for each class, with torchvision's transforms: the start of most image classifiers.

``python examples/programs/images.py [FOLDER]``. Without a folder it writes 512 JPEG files once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

FOLDER = Path(__file__).resolve().parents[2] / "build" / "programs" / "images"
CLASSES, IMAGES = 8, 64


def write_images(folder: Path) -> None:
    """Writes smooth colours with grain, as costly to decode as photographs of 320x240."""
    if len(list(folder.glob("*/*.jpg"))) == CLASSES * IMAGES:
        return
    rng = np.random.default_rng(0)
    for number in range(CLASSES * IMAGES):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((320, 240), Image.Resampling.BICUBIC), dtype=np.float32)
        pixels = np.clip(smooth + rng.normal(0, 11, (240, 320, 1)), 0, 255).astype(np.uint8)
        path = folder / f"class-{number % CLASSES}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=85)


def make_loader(
    loader_class: type[DataLoader[Any]] = DataLoader, num_workers: int = 0, folder: Path = FOLDER
) -> Any:
    """Makes the loader of an epoch of training."""
    if folder == FOLDER:
        write_images(folder)
    augmented = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = ImageFolder(str(folder), augmented)
    return loader_class(dataset, batch_size=16, shuffle=True, num_workers=num_workers)


if __name__ == "__main__":
    import ringloader

    where = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for images, classes in make_loader(ringloader.DataLoader, 2, where):
        print(tuple(images.shape), classes.bincount().tolist())
