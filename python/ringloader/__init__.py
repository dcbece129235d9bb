"""A drop-in replacement for PyTorch's ``DataLoader`` whose hot path is Rust over shared-memory rings."""

from ringloader._install import install, installed, uninstall
from ringloader._path import PathReport, path
from ringloader.dataloader import DataLoader

__all__ = ["DataLoader", "PathReport", "install", "installed", "path", "uninstall"]
