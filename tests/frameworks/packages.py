"""The distributions that each file of tests needs."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

# File of tests: distribution.
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
    "keras": "keras",
    "mmengine": "mmengine",
    "opacus": "opacus",
    "trl": "trl",
    "litdata": "litdata",
    "darts": "darts",
    "scvi": "scvi-tools",
    "streaming": "mosaicml-streaming",
}

# In an environment of its own: it needs older packages than the others do.
APART = {"streaming"}

# Distributions that the tests of a file need too, and its row names.
PARTNERS = {"trl": ("peft",)}


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def names(file: str) -> tuple[str, ...]:
    """The distributions that the tests of a file need."""
    return FRAMEWORKS[file], *PARTNERS.get(file, ())


def wanted() -> list[str]:
    """The files of a run that names none: those apart only where they are installed."""
    return [file for file in FRAMEWORKS if file not in APART or not missing([file])]


def missing(files: Iterable[str]) -> list[str]:
    """The distributions that `files` need and that are not installed."""
    return sorted(name for file in files for name in names(file) if version(name) is None)
