"""torch's fetcher in steps, for features that take part at each sample of a batch."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import StackDataset, Subset

from ringloader._torch import internals


class Result(NamedTuple):
    """A batch with a sidecar. A batch that has none travels as it is.

    Every transport carries it as any other named tuple. The stages of the main process take it apart
    (``_core/feature.py``). A user's batch is asked for its type only.

    Attributes:
        data: The batch.
        errors: The bad samples of ``on_error``: pickled if they come from another process, else a list; None
            if all samples were good.
        snapshot: The bytes of a dataset's state (``_features/state/snapshots.py``); None if none is sent.
        is_empty: True if no sample of the batch is left: the caller gets the next batch.
    """

    data: Any
    errors: Any = None
    snapshot: bytes | None = None
    is_empty: bool = False


def through(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``transform`` for batches that may have a sidecar: it gets the batch alone."""
    return functools.partial(_through, transform)


def _through(transform: Callable[[Any], Any], found: Any) -> Any:
    if type(found) is not Result:
        return transform(found)
    return found if found.is_empty else found._replace(data=transform(found.data))


class Turn:
    """The sample whose turn it is.

    Attributes:
        number: Its number in the batch, or in the run of one. Of an iterable dataset: how many samples the
            iterator was asked for in this epoch; one that is resumed sets it.
    """

    number = 0


class Handler(Protocol):
    """The slot for errors of samples and of ``collate_fn``."""

    def failed(self, error: Exception, index: Any, tries: int, is_batch: bool) -> list[Any] | None:
        """Handles an error, in the ``except`` block.

        Args:
            error: The error.
            index: Of the sample, or of the batch.
            tries: How often this has failed before.
            is_batch: True if the batch failed, and not one sample.

        Returns:
            ``[replacement]``; ``[]`` to leave it out; None to try again.
        """

    def pause(self, tries: int) -> float | None:
        """Returns the seconds to wait before a sample that has failed is asked for again; None: it is not."""

    def several(self, samples: SampleFetcher, index: Any) -> list[Any]:
        """Asks a dataset for all samples of a batch at once. Returns ``[samples]``, or ``[]`` for none."""


class Ahead(Protocol):
    """The slot for samples that are begun before their batch is fetched.

    Attributes:
        is_careful: True while samples are made one at a time, because one may end the process.
    """

    is_careful: bool

    def begin_batch(self, samples: SampleFetcher, index: Any, seeds: Sequence[int]) -> Any:
        """Begins the samples of a batch, with their seeds, if they have any. Returns what has begun."""

    def index_of(self, index: Any) -> Any:
        """Returns the index of the batch that is fetched, which may be iterated again."""

    def pause(self, seconds: float) -> None:
        """Waits before a sample or a batch is asked for again, unless that was done."""


class Parts(NamedTuple):
    """The samples of a batch that were made in parts, in place of its index: they are only collated.

    Attributes:
        parts: Lists of samples, some of them as a ``Result``.
        index: The index of the batch.
    """

    parts: list[Any]
    index: Any

    def joined(self) -> list[Any]:
        """Returns the samples of all parts, in a list; an empty one if an error has left nothing of them."""
        if len(self.parts) == 1 and type(self.parts[0]) is not Result:
            return self.parts
        data: list[Any] = []
        has_errors = False
        for part in self.parts:
            if type(part) is Result:
                has_errors, part = True, part.data or []
            data += part
        return [data] if data or not has_errors else []


# A batch of which nothing is left.
EMPTY = Result(None, is_empty=True)


class SampleFetcher:
    """torch's fetcher of one epoch, with slots that features fill in the order of their positions.

    MIRRORS torch fetch.py::_MapDatasetFetcher and _IterableDatasetFetcher. It makes batches only if a feature
    takes part at each sample; else torch's own does.

    Args:
        torchs: torch's fetcher.

    Attributes:
        torchs: The same. Features put theirs around its ``collate_fn``.
        collate_fn_alone: The ``collate_fn`` before that.
        is_by_index: True for torch's own fetcher of a dataset with indices.
        is_used: True once a feature takes part at each sample.
        turn: The sample whose turn it is.
        before_batch: Functions that are called before the samples of a batch, or of a run of one.
        get: Returns the sample of an index, or the next one of an iterable dataset, which gets its number.
        several: Returns the samples of a batch from one call of ``__getitems__``.
        asks_each: True if a ``__getitems__`` is not called: the dataset is asked for each sample.
        handler: Handles errors; None: they are raised.
        ahead: Begins samples before their batch is fetched; None: each is made when its turn comes.
        makes_parts: True if samples are left as they are until ``Parts`` of them come.
        gather: The fetcher that makes batches without asking for samples; None: there is none.
    """

    def __init__(self, torchs: Any) -> None:
        self.torchs = torchs
        self.get: Callable[[Any], Any]
        self.collate_fn_alone: Any = getattr(torchs, "collate_fn", None)
        self.turn = Turn()
        self.before_batch: list[Callable[[], None]] = []
        self.handler: Handler | None = None
        self.ahead: Ahead | None = None
        self.gather: Any = None
        self.asks_each = self.makes_parts = self.is_used = False
        self.is_by_index = internals.fetches_by_index(torchs)
        # INVARIANT: no slot leads back to this object, so that the dataset's iterator goes with its fetcher.
        if self.is_by_index:
            self.get = functools.partial(operator.getitem, torchs.dataset)
            self.several = functools.partial(_several, torchs.dataset)
        elif internals.fetches_in_turn(torchs):
            self.get = functools.partial(_next, torchs.dataset_iter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torchs, name)

    def use(self, option: str) -> None:
        """Makes the batches here, and not in torch's own method.

        Args:
            option: The option that takes part at each sample.

        Raises:
            RuntimeError: If torch's fetcher was replaced.
        """
        if "get" not in vars(self):
            raise RuntimeError(
                f"{option} cannot take effect: torch's fetcher was replaced by {type(self.torchs).__name__}"
            )
        self.is_used = True

    def fetcher(self) -> Any:
        """Returns the innermost fetcher, once features have filled the slots."""
        return self if self.is_used else self.gather or self.torchs

    def begin(self, index: Any, seeds: Sequence[int] = ()) -> Any:
        """Begins the samples of a batch that is to be fetched. Returns the batch; None: nothing has begun."""
        if self.ahead is None or self.ahead.is_careful or self.gather is not None:
            return None
        return self.ahead.begin_batch(self, index, seeds)

    @property
    def is_asked_for_several(self) -> bool:
        """True if the samples of a batch come from one call of ``__getitems__``."""
        dataset = self.torchs.dataset
        return not self.asks_each and hasattr(dataset, "__getitems__") and bool(dataset.__getitems__)

    def fetch(self, index: Any, /) -> Any:
        if self.gather is not None:
            try:
                return self.gather.fetch(index)
            except Exception:
                # Sample by sample then. What makes such batches calls no code of the user's.
                pass
        if type(index) is Parts:
            found, index = index.joined(), index.index
        else:
            for begin in self.before_batch:
                begin()
            found, index = self._by_index(index) if self.is_by_index else self._in_turn(index)
            if found and self.makes_parts:
                return found[0]
        if found:
            found = self.tried(self.torchs.collate_fn, found[0], index, is_batch=True)
        return found[0] if found else EMPTY

    def tried(self, make: Callable[[Any], Any], given: Any, index: Any, is_batch: bool = False) -> list[Any]:
        """Returns ``[make(given)]``, or what the handler makes of an error.

        Args:
            make: The function.
            given: Its argument.
            index: Of the sample, or of the batch.
            is_batch: True if it makes a batch.
        """
        tries = 0
        while True:
            try:
                return [make(given)]
            except Exception as error:
                if self.handler is None:
                    raise
                found = self.handler.failed(error, index, tries, is_batch)
            if found is not None:
                return found
            wait = time.sleep if self.ahead is None else self.ahead.pause
            wait(self.handler.pause(tries) or 0.0)
            tries += 1

    def _by_index(self, index: Any) -> tuple[list[Any], Any]:
        """Returns the samples to collate, in a list, or an empty list if none is left; and the index."""
        torchs, turn, get = self.torchs, self.turn, self.get
        turn.number = 0
        if not torchs.auto_collation:
            return self.tried(get, index, index), index
        if self.ahead is not None:
            index = self.ahead.index_of(index)
        if self.is_asked_for_several:
            if self.handler is not None:
                return self.handler.several(self, index), index
            return [self.several(index)], index
        # An index that is no list may allow only one iteration.
        index = index if isinstance(index, (list, tuple)) else list(index)
        if self.handler is None:
            return [[get(at) for turn.number, at in enumerate(index)]], index
        data: list[Any] = []
        for turn.number, at in enumerate(index):
            data += self.tried(get, at, at)
        return [data] if data or not index else [], index

    def _in_turn(self, index: Any) -> tuple[list[Any], Any]:
        """Returns the samples of an iterable dataset in the same way, and their numbers."""
        torchs, turn, get = self.torchs, self.turn, self.get
        if torchs.ended:
            raise StopIteration
        first = at = turn.number
        if not torchs.auto_collation:
            turn.number += 1
            return self.tried(get, at, at), at
        data: list[Any] = []
        numbers: list[int] = []
        for _ in index:
            at = turn.number
            turn.number = at + 1
            try:
                if self.handler is None:
                    data.append(get(at))
                elif found := self.tried(get, at, at):
                    data += found
                    numbers.append(at)
            except StopIteration:
                turn.number = at
                torchs.ended = True
                break
        asked = turn.number - first
        if asked == 0 or (torchs.drop_last and asked < len(index)):
            raise StopIteration
        return [data] if data else [], numbers


def gives_several(dataset: Any) -> bool:
    """True if the samples of a batch come from one call of a ``__getitems__`` of the dataset's own.

    One that asks for one sample after another is none: that of a ``CachedDataset``, and those of torch's own
    wrappers, unless a dataset in them has one.
    """
    method = getattr(dataset, "__getitems__", None)
    own = getattr(method, "__func__", None)
    if not method or (own is not None and own is getattr(type(dataset), "_ringloader_asks_each", None)):
        return False
    for wrapper in (Subset, StackDataset):
        if type(dataset).__getitem__ is wrapper.__getitem__ and own is wrapper.__getitems__:
            return any(map(gives_several, inner(dataset)))
    return True


def inner(dataset: Any) -> list[Any]:
    """Returns the datasets inside a dataset of torch's, or inside a ``CachedDataset``."""
    if not hasattr(dataset, "datasets"):
        return [dataset.dataset] if hasattr(dataset, "dataset") else []
    datasets: Any = dataset.datasets
    return list(datasets.values() if isinstance(datasets, Mapping) else datasets)


def _several(dataset: Any, index: Any) -> Any:
    return dataset.__getitems__(index)


def _next(iterator: Iterator[Any], _number: int) -> Any:
    return next(iterator)
