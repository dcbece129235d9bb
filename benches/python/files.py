"""The files that workloads read, under build/: each made once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

BUILD = Path(__file__).resolve().parents[2] / "build"
FILES = BUILD / "bench"
PHOTOGRAPHS = 64
# Three bytes a pixel: 602,112 when decoded.
SIDE = 448


def write_tokens() -> None:
    """A file of 16 million tokens."""
    path = FILES / "tokens.bin"
    if not path.exists():
        FILES.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        np.random.default_rng(0).integers(0, 50_000, 1 << 24, dtype=np.uint16).tofile(part)
        part.rename(path)


def write_jpegs() -> None:
    """64 synthetic JPEG files of 600 KB: smooth colour with grain, as costly to decode as a photograph."""
    from PIL import Image

    directory = FILES / "jpeg"
    if len(list(directory.glob("*.jpg"))) == 64:
        return
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    grain = rng.normal(0, 11, (1200, 1600, 1)).astype(np.float32)
    for number in range(64):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((1600, 1200), Image.Resampling.BICUBIC), dtype=np.float32)
        pixels = np.clip(smooth + np.roll(grain, 37 * number, axis=1), 0, 255).astype(np.uint8)
        part = directory / f"{number}.part"
        Image.fromarray(pixels).save(part, format="JPEG", quality=85)
        part.rename(part.with_suffix(".jpg"))


def has_photographs() -> bool:
    """True if there are photographs to cut from, or they were cut before."""
    return bool(photograph_paths()) or all(find_spec(package) for package in ("skimage", "sklearn"))


def photograph_paths() -> list[Path]:
    """Returns what ``write_photographs`` wrote; none before it has finished."""
    found = sorted((FILES / "photographs").glob("*.jpg"))
    return found if len(found) == PHOTOGRAPHS else []


def write_photographs() -> None:
    """64 JPEG files of 448x448, cut from photographs that ship inside scikit-image and scikit-learn."""
    if photograph_paths():
        return
    from PIL import Image
    from skimage import data
    from sklearn.datasets import load_sample_images

    pixels = [data.astronaut(), data.chelsea(), data.coffee(), data.hubble_deep_field(), data.retina()]
    pixels += [data.rocket(), *load_sample_images().images]
    pictures = [Image.fromarray(picture) for picture in pixels]
    directory = FILES / "photographs"
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(PHOTOGRAPHS):
        picture = pictures[number % len(pictures)]
        # The smaller ones lack a few pixels on one side, and are made a little larger.
        scale = max(1.0, SIDE / min(picture.size))
        width, height = (max(SIDE, round(side * scale)) for side in picture.size)
        left, top = (int(rng.integers(0, side - SIDE + 1)) for side in (width, height))
        part = directory / f"{number}.part"
        whole = picture.resize((width, height), Image.Resampling.BICUBIC)
        whole.crop((left, top, left + SIDE, top + SIDE)).save(part, format="JPEG", quality=90)
        part.rename(part.with_suffix(".jpg"))


def crop_paths() -> list[Path]:
    """The crops that the example ``examples/photographs`` has cut; none before it ran."""
    return sorted((BUILD / "photographs" / "train").glob("*/*.jpg"))
