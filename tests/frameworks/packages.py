"""The distribution that stands behind each file of tests."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

# File of tests and of docs/frameworks: distribution.
FRAMEWORKS = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "datasets": "datasets",
    "torchrun": "torch",
    "torch_geometric": "torch-geometric",
    "timm": "timm",
    "torchvision": "torchvision",
    "ignite": "pytorch-ignite",
    "skorch": "skorch",
    "speechbrain": "speechbrain",
    "ray": "ray",
    "torchdata": "torchdata",
    "tensordict": "tensordict",
    "sentence_transformers": "sentence-transformers",
    "lhotse": "lhotse",
    "torchio": "torchio",
    "fastai": "fastai",
    "monai": "monai",
    "ultralytics": "ultralytics",
    "webdataset": "webdataset",
    "pytorch_forecasting": "pytorch-forecasting",
}


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def missing(files: Iterable[str]) -> list[str]:
    """The distributions that are not installed, of those behind `files`."""
    return sorted(FRAMEWORKS[file] for file in files if version(FRAMEWORKS[file]) is None)
