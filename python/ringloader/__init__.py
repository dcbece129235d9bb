"""A drop-in replacement for PyTorch's ``DataLoader``: scheduling, collation and transport in Rust.

Importing this package does not import torch: each name below comes when it is first asked for.
``pip show --verbose ringloader`` names the address of the documentation.
"""

# MIRRORS __init__.pyi: the public names, and their modules.
_MODULES = {
    "ArrayDataset": "_data.array_dataset",
    "BadSample": "bad_samples",
    "CachedDataset": "_data.cached_dataset",
    "DataLoader": "dataloader",
    "Diagnosis": "_tools.doctor",
    "Dispatch": "_features.dispatch",
    "EpochStats": "_features.stats.epoch",
    "Finding": "_tools.doctor",
    "LoaderReport": "_features.report.report",
    "PathReport": "_features.report.report",
    "Retry": "bad_samples",
    "RolloverBatchSampler": "_sources.rollover",
    "Seeds": "seeds",
    "Sharded": "_data.sharded",
    "SharedArray": "_data.arrays",
    "SharedList": "_data.lists",
    "SlowFetch": "_features.stats.epoch",
    "StatefulDataLoader": "stateful_dataloader",
    "Verdict": "_features.stats.epoch",
    "WeightedRandomSampler": "_data.weighted",
    "WorkerPool": "_features.pools.pool",
    "WorkerStats": "_features.stats.epoch",
    "WorkersChange": "_features.stats.epoch",
    # The module itself.
    "batchify": "batchify",
    "convert": "_patch.convert",
    "doctor": "_tools.doctor",
    "epoch_stats": "_features.stats.recording",
    "install": "_patch.install",
    "installed": "_patch.install",
    "report": "_features.report.report",
    "reports": "_features.report.report",
    "uninstall": "_patch.install",
}

__all__ = sorted(_MODULES)


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
