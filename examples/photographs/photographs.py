"""A data set of JPEG crops, cut once from photographs that ship inside scikit-image and scikit-learn."""

from __future__ import annotations

import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "photographs"

# Package, file inside it. All of these lie in the wheels: nothing is downloaded.
PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "bricks": ("skimage", "data/brick.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "grass": ("skimage", "data/grass.png"),
    "gravel": ("skimage", "data/gravel.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
CROP = 96
TRAIN_CROPS = 270
HELD_OUT_CROPS = 60
# Held-out cells are a little larger than a crop, one in four, spread over the photograph.
CELL = 112
INPUT = 64


def _specification() -> dict[str, object]:
    return {
        "photographs": sorted(PHOTOGRAPHS),
        "crop": CROP,
        "cell": CELL,
        "train": TRAIN_CROPS,
        "held-out": HELD_OUT_CROPS,
    }


def _locate(package: str, file: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"{package} is not installed; it holds {file}. Install scikit-image, scikit-learn"
        )
    path = Path(found.origin).parent / file
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not in the installed {package}; install a release whose wheel has it"
        )
    return path


def _held_out_cells(width: int, height: int) -> list[tuple[int, int]]:
    columns, rows = width // CELL, height // CELL
    return [(x * CELL, y * CELL) for y in range(rows) for x in range(columns) if (x + 2 * y) % 4 == 1]


def _meets(x: int, y: int, cell: tuple[int, int]) -> bool:
    return x < cell[0] + CELL and cell[0] < x + CROP and y < cell[1] + CELL and cell[1] < y + CROP


def _positions(width: int, height: int, rng: random.Random) -> dict[str, list[tuple[int, int]]]:
    """Corners of crops. INVARIANT: no training crop shares a pixel with a held-out one."""
    cells = _held_out_cells(width, height)
    train: list[tuple[int, int]] = []
    while len(train) < TRAIN_CROPS:
        x, y = rng.randint(0, width - CROP), rng.randint(0, height - CROP)
        if not any(_meets(x, y, cell) for cell in cells):
            train.append((x, y))
    held_out = []
    for number in range(HELD_OUT_CROPS):
        x, y = cells[number % len(cells)]
        held_out.append((x + rng.randint(0, CELL - CROP), y + rng.randint(0, CELL - CROP)))
    return {"train": train, "held-out": held_out}


def prepare() -> Path:
    """Cuts the crops unless a complete set is there already.

    Returns:
        The directory, with ``train/<photograph>/<number>.jpg`` and ``held-out/...``.
    """
    complete = DIRECTORY / "complete.json"
    expected = len(PHOTOGRAPHS) * (TRAIN_CROPS + HELD_OUT_CROPS)
    if complete.exists() and json.loads(complete.read_text()) == _specification():
        present = sum(1 for _ in DIRECTORY.glob("*/*/*.jpg"))
        if present == expected:
            return DIRECTORY
    complete.unlink(missing_ok=True)
    rng = random.Random(0)
    with tqdm(total=expected, desc="cutting crops", unit="crop") as progress:
        for name, (package, file) in PHOTOGRAPHS.items():
            with Image.open(_locate(package, file)) as opened:
                photograph = opened.convert("RGB")
            for split, corners in _positions(*photograph.size, rng).items():
                directory = DIRECTORY / split / name
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir(parents=True)
                for number, (x, y) in enumerate(corners):
                    crop = photograph.crop((x, y, x + CROP, y + CROP))
                    crop.save(directory / f"{number:04}.jpg", quality=92)
                    progress.update()
    complete.write_text(json.dumps(_specification()))
    return DIRECTORY


Sample = tuple[np.ndarray[Any, Any], int]


class Crops(Dataset[Sample]):
    """Crops, decoded, and the number of the photograph that each comes from."""

    def __init__(self, directory: Path) -> None:
        names = sorted(PHOTOGRAPHS)
        self.items = [
            (path, label) for label, name in enumerate(names) for path in sorted((directory / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.items[index]
        with Image.open(path) as file:
            return np.array(file.convert("RGB")), label


class Prepare:
    """Makes a crop what the network takes.

    For training, position, mirroring and colour are random, drawn from Python's, numpy's and torch's
    generators, as such code commonly mixes them.
    """

    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __call__(self, sample: Sample) -> tuple[torch.Tensor, int]:
        """Prepares one sample."""
        image, label = sample
        margin = CROP - INPUT
        left, top = margin // 2, margin // 2
        if self.augment:
            left, top = random.randint(0, margin), random.randint(0, margin)
        pixels = image[top : top + INPUT, left : left + INPUT].astype(np.float32) / 255.0
        if self.augment:
            gain = np.random.uniform(0.7, 1.3, 3).astype(np.float32)
            offset = np.float32(np.random.uniform(-0.1, 0.1))
            pixels = np.clip(pixels * gain + offset, 0.0, 1.0)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if self.augment and torch.rand(()) < 0.5:
            tensor = tensor.flip(-1)
        return (tensor - 0.45) / 0.25, label


class Prepared(Dataset[tuple[torch.Tensor, int]]):
    """Crops that are decoded and prepared each time."""

    def __init__(self, crops: Crops, prepare: Prepare) -> None:
        self.crops = crops
        self.prepare = prepare

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.prepare(self.crops[index])
