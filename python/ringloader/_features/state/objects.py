"""The dataset of a worker's epoch, its iterator and fetcher: their state, and batches that are passed over.

With the option ``Snapshots`` a batch comes with a snapshot (``_worker/result.py``), if one was due: which
worker made it, how many batches that was asked for in this epoch, and its state.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, NamedTuple

from ringloader._features.seeding import generators
from ringloader._features.state.positions import Snapshot, has_state
from ringloader._worker.fetch import SampleFetcher
from ringloader._worker.options import Failing, Fetcher


class SnapshotPolicy(NamedTuple):
    """The times at which states are taken, and the objects whose states they are.

    Attributes:
        every: Steps of the loader from one state to the next; None: no states.
        workers: The number of workers; 0 for none.
        is_iterable: True for a dataset that each worker reads by itself.
        of_dataset: False if workers share the dataset, whose state is then no worker's.
    """

    every: int | None
    workers: int
    is_iterable: bool
    of_dataset: bool


class Sent(NamedTuple):
    """The state that a worker sends with a batch.

    Attributes:
        worker: The worker.
        asked: Batches that it was asked for in this epoch.
        snapshot: The state after the batch.
    """

    worker: int
    asked: int
    snapshot: Snapshot


def read_sent(sent: bytes) -> Sent:
    """Reads the bytes that came with a batch."""
    worker, asked, snapshot = pickle.loads(sent)
    return Sent(worker, asked, Snapshot(*snapshot))


class Objects:
    """The dataset of a worker's epoch, its iterator and fetcher, and which of them have a state.

    Args:
        dataset: The dataset.
        samples: The slots of the fetcher, and torch's own.
        fetcher: The fetcher that options have made of it.
        policy: When states are taken, and of what.
    """

    def __init__(
        self, dataset: Any, samples: SampleFetcher, fetcher: Fetcher, policy: SnapshotPolicy
    ) -> None:
        self.dataset = dataset
        self.torchs = samples.torchs
        self._turn = samples.turn
        self._fetcher = fetcher
        self._policy = policy
        iterator = getattr(self.torchs, "dataset_iter", None) if policy.is_iterable else None
        self._has_iterator = has_state(iterator)
        self._has_dataset = policy.of_dataset and iterator is not dataset and has_state(dataset)
        # Batches that are passed over before the first one, of how many samples, in which worker.
        self._to_pass = self._size = self._worker = 0

    @property
    def have_state(self) -> bool:
        """True if there is a state to take."""
        return self._has_dataset or self._has_iterator

    def sent(self, worker: int, asked: int) -> bytes:
        """Returns the bytes to send with a batch. ``asked``: batches that the worker was asked for."""
        return pickle.dumps((worker, asked, self.snapshot()), pickle.HIGHEST_PROTOCOL)

    def snapshot(self) -> tuple[bytes, bool, int]:
        """Returns the fields of a :class:`Snapshot` of now."""
        found = {}
        if self._has_dataset:
            found["dataset"] = self.dataset.state_dict()
        if self._has_iterator:
            found["iterator"] = self.torchs.dataset_iter.state_dict()
        samples = self._turn.number if self._policy.is_iterable else 0
        is_ended = bool(getattr(self.torchs, "ended", False))
        return pickle.dumps(found, pickle.HIGHEST_PROTOCOL), is_ended, samples

    def pass_over(self, batches: int, size: int, worker: int) -> Fetcher:
        """Returns a fetcher that first reads and drops batches.

        It does so when the first task has come, as the key of seeded generators comes with that.

        Args:
            batches: The number of batches.
            size: The samples of a batch.
            worker: The worker.
        """
        self._to_pass, self._size, self._worker = batches, size, worker
        return self

    def fetch(self, index: Any, /) -> Any:
        """Returns the next batch."""
        if self._to_pass:
            try:
                # Without workers, what was drawn for these batches was drawn before.
                with contextlib.nullcontext() if self._policy.workers else generators.put_back():
                    self._drop()
            except ValueError as error:
                self._fetcher = Failing(error, once=True)
            self._to_pass = 0
        return self._fetcher.fetch(index)

    def _drop(self) -> None:
        """Reads and drops the batches between the state of the worker and the point where its epoch resumes.

        Raises:
            ValueError: If there are fewer.
        """
        torchs = self.torchs
        index = [None] * self._size if torchs.auto_collation else None
        collate, torchs.collate_fn = torchs.collate_fn, lambda _samples: None
        try:
            for number in range(self._to_pass):
                try:
                    self._fetcher.fetch(index)
                except StopIteration:
                    raise ValueError(
                        f"load_state_dict(): the dataset of worker {self._worker} has ended after {number} "
                        f"of the {self._to_pass} batches that are read again: it is not the dataset "
                        "of the state"
                    ) from None
                except Exception:
                    # The caller got this error before, in its turn.
                    pass
        finally:
            torchs.collate_fn = collate
