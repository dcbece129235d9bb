"""The package's names for type checkers and editors. At run time each is imported when it is first used."""

from ringloader import batchify as batchify
from ringloader._data.array_dataset import ArrayDataset as ArrayDataset
from ringloader._data.arrays import SharedArray as SharedArray
from ringloader._data.cached_dataset import CachedDataset as CachedDataset
from ringloader._data.lists import SharedList as SharedList
from ringloader._data.sharded import Sharded as Sharded
from ringloader._data.weighted import WeightedRandomSampler as WeightedRandomSampler
from ringloader._features.dispatch import Dispatch as Dispatch
from ringloader._features.pools.pool import WorkerPool as WorkerPool
from ringloader._features.report.report import LoaderReport as LoaderReport
from ringloader._features.report.report import PathReport as PathReport
from ringloader._features.report.report import report as report
from ringloader._features.report.report import reports as reports
from ringloader._features.stats.epoch import EpochStats as EpochStats
from ringloader._features.stats.epoch import SlowFetch as SlowFetch
from ringloader._features.stats.epoch import Verdict as Verdict
from ringloader._features.stats.epoch import WorkersChange as WorkersChange
from ringloader._features.stats.epoch import WorkerStats as WorkerStats
from ringloader._features.stats.recording import epoch_stats as epoch_stats
from ringloader._patch.convert import convert as convert
from ringloader._patch.install import install as install
from ringloader._patch.install import installed as installed
from ringloader._patch.install import uninstall as uninstall
from ringloader._sources.rollover import RolloverBatchSampler as RolloverBatchSampler
from ringloader._tools.doctor import Diagnosis as Diagnosis
from ringloader._tools.doctor import Finding as Finding
from ringloader._tools.doctor import doctor as doctor
from ringloader.bad_samples import BadSample as BadSample
from ringloader.bad_samples import Retry as Retry
from ringloader.dataloader import DataLoader as DataLoader
from ringloader.seeds import Seeds as Seeds
from ringloader.stateful_dataloader import StatefulDataLoader as StatefulDataLoader

__version__: str
