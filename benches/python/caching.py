"""``CachedDataset`` on JPEG files: samples kept at several points of a pipeline, beside torch's loader.

Each round runs every row for a second or an epoch, one after the other, with two workers that live on.
Processor time is that of the main process and the workers. Rows whose packages are not installed are
left out.
"""

from __future__ import annotations

import argparse
import io
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from PIL import Image

import ringloader
from ringloader import CachedDataset

from .files import FILES
from .measure import process_cpu_ns

Array = np.ndarray[Any, Any]

PHOTOGRAPHS = 512
SIZE = 500, 375
LARGE = 2400, 1800
SIDE = 256
CROP = 224
BATCH = 64
WORKERS = 2
# Of a round, at least.
SECONDS = 1.0


def write_photographs(size: tuple[int, int], count: int) -> list[Path]:
    """Synthetic JPEG files: smooth colour with grain, as costly to decode as a photograph."""
    folder = FILES / f"jpeg-{size[0]}"
    paths = [folder / f"{number}.jpg" for number in range(count)]
    if not all(path.exists() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        grain = random.normal(0, 11, (size[1], size[0], 1)).astype(np.float32)
        for number, path in enumerate(paths):
            coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
            pixels = np.clip(smooth + np.roll(grain, 37 * number, axis=1), 0, 255).astype(np.uint8)
            part = path.with_suffix(".part")
            Image.fromarray(pixels).save(part, format="JPEG", quality=90)
            part.rename(path)
    return paths


def decode_pil(data: bytes) -> Image.Image:
    """Decodes by Pillow."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def decode_draft(data: bytes) -> Image.Image:
    """Decodes by Pillow, at the smallest of libjpeg's scales that is large enough."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (SIDE, SIDE))
    return image.convert("RGB")


def decode_simplejpeg(data: bytes) -> Array:
    """Decodes by simplejpeg."""
    import simplejpeg

    pixels: Array = simplejpeg.decode_jpeg(data)
    return pixels


def decode_opencv(data: bytes) -> Array:
    """Decodes by OpenCV."""
    import cv2

    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def decode_torchvision(data: bytes) -> torch.Tensor:
    """Decodes by torchvision."""
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


def short_side(image: Image.Image) -> Image.Image:
    """Makes the shorter side 256."""
    scale = SIDE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def box(width: int, height: int) -> tuple[int, int, int, int]:
    """A box as torchvision's ``RandomResizedCrop`` draws it: left, top, width and height."""
    for _ in range(10):
        share, ratio, left, top = torch.rand(4).tolist()
        area = width * height * (0.08 + 0.92 * share)
        root = math.sqrt((4 / 3) ** (2 * ratio - 1))
        across, down = round(math.sqrt(area) * root), round(math.sqrt(area) / root)
        if 0 < across <= width and 0 < down <= height:
            return int(left * (width - across + 1)), int(top * (height - down + 1)), across, down
    return 0, 0, width, height


def crop_pil(image: Image.Image) -> torch.Tensor:
    """A random crop, resized by Pillow."""
    left, top, width, height = box(*image.size)
    corners = left, top, left + width, top + height
    resized = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=corners)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def crop_opencv(pixels: Array) -> torch.Tensor:
    """A random crop, resized by OpenCV. Channels stay last: to permute a batch takes no time."""
    import cv2

    left, top, width, height = box(pixels.shape[1], pixels.shape[0])
    part = pixels[top : top + height, left : left + width]
    return torch.from_numpy(cv2.resize(part, (CROP, CROP), interpolation=cv2.INTER_AREA))


class CropTorchvision:
    """A random crop, resized by torchvision on ``uint8`` tensors."""

    def __init__(self, antialias: bool) -> None:
        from torchvision.transforms import v2

        self.crop = v2.RandomResizedCrop(CROP, antialias=antialias)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Crops one image."""
        cropped: torch.Tensor = self.crop(image)
        return cropped


def finished(image: Image.Image) -> torch.Tensor:
    """The sample of a pipeline without random steps: shorter side 256, the middle 224."""
    image = short_side(image)
    left, top = (image.width - CROP) // 2, (image.height - CROP) // 2
    middle = image.crop((left, top, left + CROP, top + CROP))
    return torch.from_numpy(np.array(middle)).permute(2, 0, 1).contiguous()


class Photographs(torch_data.Dataset[Any]):
    """The files, decoded, with the steps that are to be kept."""

    def __init__(self, paths: list[Path], *steps: Callable[[Any], Any]) -> None:
        self.paths = paths
        self.steps = steps

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        sample: Any = self.paths[index].read_bytes()
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass
class Row:
    """One row. ``beside`` names the row that it is compared with."""

    name: str
    dataset: torch_data.Dataset[Any]
    loader: Any = ringloader.DataLoader
    beside: str = "torch, Pillow"
    clears: bool = False
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = self.loader(
            self.dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
        )

    def epoch(self) -> int:
        """Runs one, and returns the number of samples."""
        return sum(len(batch) for batch in self.batches)

    def cpu_ns(self) -> int:
        """Processor time of this process and the row's workers."""
        iterator = self.batches._iterator
        return time.process_time_ns() + sum(process_cpu_ns(one.pid) for one in iterator._workers)

    def measure(self) -> None:
        """Notes the figures of a round."""
        if self.clears:
            self.dataset.clear()
        before, begun, count, seconds = self.cpu_ns(), time.perf_counter(), 0, 0.0
        while seconds < SECONDS:
            count += self.epoch()
            seconds = time.perf_counter() - begun
            if self.clears:
                break
        self.rates.append(count / seconds)
        self.cpu_ms.append((self.cpu_ns() - before) / count / 1e6)


def rows(paths: list[Path], folder: Path) -> list[Row]:
    """All rows that can run here."""
    crop = Photographs(paths, decode_pil, crop_pil)
    whole = Photographs(paths, decode_pil, finished)
    half = PHOTOGRAPHS // 2 * (3 * CROP * CROP + 256)
    small = Photographs(paths, decode_pil, short_side, np.array)
    tensors = Photographs(paths, decode_pil, short_side, np.array, channels_first)
    made = [
        Row("torch, Pillow", crop, torch_data.DataLoader),
        Row("ringloader, Pillow", crop),
    ]
    faster = [("cv2", "OpenCV", decode_opencv), ("simplejpeg", "simplejpeg", decode_simplejpeg)]
    has_opencv = find_spec("cv2") is not None
    if has_opencv:
        import cv2

        # As in any worker: one process, one core.
        cv2.setNumThreads(0)
    for package, name, decode in faster:
        if has_opencv and find_spec(package) is not None:
            made.append(
                Row(f"ringloader, {name}, cropped by OpenCV", Photographs(paths, decode, crop_opencv))
            )
    made.append(
        Row("pictures kept, cropped by Pillow", CachedDataset(Photographs(paths, decode_pil), then=crop_pil))
    )
    if has_opencv:
        made.append(
            Row("short side 256 kept, cropped by OpenCV (area)", CachedDataset(small, then=crop_opencv))
        )
    if find_spec("torchvision") is not None:
        decoded = Photographs(paths, decode_torchvision, CropTorchvision(True))
        made.append(Row("ringloader, torchvision", decoded))
        for antialias in (True, False):
            text = "antialiased" if antialias else "not antialiased"
            cached = CachedDataset(tensors, then=CropTorchvision(antialias))
            made.append(Row(f"short side 256 kept, cropped by torchvision, {text}", cached))
    of_whole = "torch, no random step"
    made += [
        Row(of_whole, whole, torch_data.DataLoader),
        Row("ringloader, no random step", whole, beside=of_whole),
        Row(
            "finished samples, first epoch",
            CachedDataset(whole),
            beside="ringloader, no random step",
            clears=True,
        ),
        Row("finished samples kept", CachedDataset(whole), beside=of_whole),
        Row("finished samples kept in a file", CachedDataset(whole, path=folder / "whole"), beside=of_whole),
        Row("finished samples, room for half", CachedDataset(whole, half), beside=of_whole),
    ]
    large = write_photographs(LARGE, 32)
    made += [
        Row("torch, Pillow, 2,400 x 1,800", Photographs(large, decode_pil, crop_pil), torch_data.DataLoader),
        Row(
            "the same by Image.draft",
            Photographs(large, decode_draft, crop_pil),
            torch_data.DataLoader,
            beside="torch, Pillow, 2,400 x 1,800",
        ),
    ]
    return made


def channels_first(pixels: Array) -> torch.Tensor:
    """As torch's models take it."""
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def rank(path: str | None, paths: list[Path], begin: Any, results: Any) -> None:
    """One of two ranks, each of which reads half of the samples in an epoch, then the other half."""
    torch.set_num_threads(1)
    number, epochs = begin
    dataset = CachedDataset(Photographs(paths, decode_pil, finished), path=path)
    for turn in range(epochs):
        part = torch_data.Subset(dataset, range((number + turn) % 2, len(paths), 2))
        for _ in ringloader.DataLoader(part, BATCH, num_workers=1):
            pass
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    results.put((sum(one.ru_utime + one.ru_stime for one in used), dataset.stats()["misses"]))


def two_ranks(paths: list[Path], folder: Path) -> None:
    """Prints the processor time of two ranks, each with its own memory, and sharing a path."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    print("\n| two ranks, two epochs, each another half | ms of processor time per sample | samples made |")
    print("|---|--:|--:|")
    for name, path in (("each its own cache", None), ("one `path`", str(folder / "ranks"))):
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=rank, args=(path, paths, (number, 2), results)) for number in range(2)
        ]
        for process in ranks:
            process.start()
        found = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
        made = sum(misses for _, misses in found) if path is None else max(misses for _, misses in found)
        print(f"| {name} | {sum(seconds for seconds, _ in found) / 2 / len(paths) * 1e3:.2f} | {made} |")


def read_beside_clone() -> None:
    """Prints the time of one read, and of a clone of the same bytes."""
    print("\n| sample | µs to clone it | to read it | to read it from a file |")
    print("|---|--:|--:|--:|")
    for shape, dtype in (((10,), "float32"), ((3, CROP, CROP), "uint8"), ((3, CROP, CROP), "float32")):
        samples = [torch.ones(shape, dtype=getattr(torch, dtype)) for _ in range(PHOTOGRAPHS)]
        with TemporaryDirectory(dir=FILES) as folder:
            stored = [CachedDataset(samples), CachedDataset(samples, path=Path(folder) / "cache")]
            calls = [lambda at, samples=samples: samples[at].clone(), *(one.__getitem__ for one in stored)]
            for call in calls:
                each(call)
            times = [min(each(call) for _ in range(5)) for call in calls]
        print(f"| {dtype} {shape} | " + " | ".join(f"{value:.1f}" for value in times) + " |")


def each(call: Callable[[int], object]) -> float:
    """Microseconds of a call, over all samples."""
    begun = time.perf_counter()
    for index in range(PHOTOGRAPHS):
        call(index)
    return (time.perf_counter() - begun) / PHOTOGRAPHS * 1e6


def ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, with the range."""
    found = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})"


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(prog="python -m benches.python.caching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with every row once (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    paths = write_photographs(SIZE, PHOTOGRAPHS)
    with TemporaryDirectory(dir=FILES) as name:
        made = rows(paths, Path(name))
        for row in made:
            # Starts the workers, and fills the cache.
            row.epoch()
        for _ in range(options.rounds):
            for row in made:
                row.measure()
        print("| row | samples per second | ms of processor time | times | rate (range) | CPU (range) |")
        print("|---|--:|--:|---|--:|--:|")
        by_name = {row.name: row for row in made}
        for row in made:
            other = by_name[row.beside]
            rate = ratios(row.rates, other.rates)
            cpu = ratios(other.cpu_ms, row.cpu_ms)
            figures = f"{median(row.rates):,.0f} | {median(row.cpu_ms):.2f} | {row.beside} | {rate} | {cpu}"
            print(f"| {row.name} | {figures} |")
        for row in made:
            if isinstance(row.dataset, CachedDataset) and not row.clears:
                print(f"{row.name}: {row.dataset.stats()}")
        two_ranks(paths, Path(name))
    read_beside_clone()


if __name__ == "__main__":
    main()
