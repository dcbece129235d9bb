"""A drop-in replacement for PyTorch's ``DataLoader`` whose hot path is Rust over shared-memory rings.

Importing this package does not import torch: each name below comes when it is first asked for.
``pip show --verbose ringloader`` names the address of the documentation.
"""

# An import of typing takes milliseconds, at each start of Python with RINGLOADER_INSTALL. Type checkers go by
# the name, and jedi by the value: to it, a branch under `False` is dead.
TYPE_CHECKING = bool()  # noqa: UP018
if TYPE_CHECKING:
    import ringloader.batchify as batchify
    from ringloader._data.array_dataset import ArrayDataset
    from ringloader._data.arrays import SharedArray
    from ringloader._data.cached_dataset import CachedDataset
    from ringloader._data.lists import SharedList
    from ringloader._data.sharded import Sharded
    from ringloader._dispatch.dataset import Dispatch
    from ringloader._doctor.checks import Finding
    from ringloader._doctor.doctor import Diagnosis, doctor
    from ringloader._patch.convert import convert
    from ringloader._patch.install import install, installed, uninstall
    from ringloader._pool.pool import WorkerPool
    from ringloader._report.report import LoaderReport, PathReport, report, reports
    from ringloader._sources.weighted import WeightedRandomSampler
    from ringloader._stats.epoch import EpochStats, SlowFetch, Verdict, WorkersChange, WorkerStats
    from ringloader._stats.recording import epoch_stats
    from ringloader.bad_samples import BadSample, Retry
    from ringloader.dataloader import DataLoader
    from ringloader.rollover import RolloverBatchSampler
    from ringloader.seeds import Seeds
    from ringloader.stateful_dataloader import StatefulDataLoader

    __version__: str

_MODULES = {
    "ArrayDataset": "_data.array_dataset",
    "BadSample": "bad_samples",
    "CachedDataset": "_data.cached_dataset",
    "DataLoader": "dataloader",
    "Diagnosis": "_doctor.doctor",
    "Dispatch": "_dispatch.dataset",
    "EpochStats": "_stats.epoch",
    "Finding": "_doctor.checks",
    "LoaderReport": "_report.report",
    "PathReport": "_report.report",
    "Retry": "bad_samples",
    "Sharded": "_data.sharded",
    "SharedArray": "_data.arrays",
    "SharedList": "_data.lists",
    "SlowFetch": "_stats.epoch",
    "StatefulDataLoader": "stateful_dataloader",
    "Verdict": "_stats.epoch",
    "WeightedRandomSampler": "_sources.weighted",
    "WorkerPool": "_pool.pool",
    "WorkerStats": "_stats.epoch",
    "WorkersChange": "_stats.epoch",
    "RolloverBatchSampler": "rollover",
    "Seeds": "seeds",
    # The module itself.
    "batchify": "batchify",
    "convert": "_patch.convert",
    "doctor": "_doctor.doctor",
    "epoch_stats": "_stats.recording",
    "install": "_patch.install",
    "installed": "_patch.install",
    "report": "_report.report",
    "reports": "_report.report",
    "uninstall": "_patch.install",
}

__all__ = [
    "ArrayDataset",
    "BadSample",
    "CachedDataset",
    "DataLoader",
    "Diagnosis",
    "Dispatch",
    "EpochStats",
    "Finding",
    "LoaderReport",
    "PathReport",
    "Retry",
    "RolloverBatchSampler",
    "Seeds",
    "Sharded",
    "SharedArray",
    "SharedList",
    "SlowFetch",
    "StatefulDataLoader",
    "Verdict",
    "WeightedRandomSampler",
    "WorkerPool",
    "WorkerStats",
    "WorkersChange",
    "batchify",
    "convert",
    "doctor",
    "epoch_stats",
    "install",
    "installed",
    "report",
    "reports",
    "uninstall",
]


def __getattr__(name: str) -> object:
    # Lazy, so that an environment or a command can ask for ringloader before the program sets up torch.
    if name == "__version__":
        import importlib.metadata

        try:
            return importlib.metadata.version("ringloader")
        except importlib.metadata.PackageNotFoundError:
            raise AttributeError("ringloader has no __version__ where it is not installed") from None
    if name not in _MODULES:
        raise AttributeError(f"module 'ringloader' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"ringloader.{_MODULES[name]}")
    found = module if _MODULES[name] == name else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_environment() -> None:
    import os

    if os.environ.get("RINGLOADER_INSTALL", "0") not in ("", "0"):
        from ringloader._patch import on_import

        on_import.say_if_missing()


_check_environment()
