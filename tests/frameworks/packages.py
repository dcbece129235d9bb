"""Which distribution stands behind which file of tests."""

from __future__ import annotations

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
    "ray": "ray",
    "torchdata": "torchdata",
}


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[str]:
    return sorted(name for name in FRAMEWORKS.values() if version(name) is None)


def files_without_packages() -> list[str]:
    """Modules of tests that cannot be run here."""
    return [f"test_{file}" for file, name in FRAMEWORKS.items() if version(name) is None]
