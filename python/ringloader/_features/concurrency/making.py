"""``worker_concurrency``: its feature, and its worker's side: samples begin before their batch is fetched."""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from ringloader._core.feature import Feature, Setup
from ringloader._core.notes import beyond_iterators
from ringloader._data.cached_dataset import CachedDataset
from ringloader._features import worker_info
from ringloader._features.concurrency.event_loop import CLOSES_WITHIN, Holder, Kept
from ringloader._features.concurrency.lines import Call, Limits, LoopLines, ThreadLines
from ringloader._features.concurrency.reading import LOOK_SECONDS, AheadChannel, Begun, EndedError
from ringloader._features.rules import has_remote_pool
from ringloader._features.shared_words import SharedWords
from ringloader._features.table import Options
from ringloader._log import logger
from ringloader._worker.fetch import EMPTY, SampleFetcher, Turn, gives_several, inner
from ringloader._worker.options import EpochStart, Fetcher, InFront, Position, WorkerOption

if TYPE_CHECKING:
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchLoader

_SHARED_DRAWS = (
    "worker_concurrency: samples draw from generators of the process, which all of them share, so "
    "seeding='sample' does not make these numbers repeatable; draw from get_worker_info().rng"
)


class Concurrency(Feature):
    """Makes the samples of each worker several at once.

    Args:
        samples: Makes them.
        reads_ahead: True if workers take tasks before their turn.
        are_processes: True if the workers are processes of this one.
        words: The most samples under way, by worker; None: not noted.
    """

    def __init__(
        self, samples: Samples, reads_ahead: bool, are_processes: bool, words: SharedWords | None
    ) -> None:
        self._options = samples, Tasks()
        self._reads_ahead = reads_ahead
        self._are_processes = are_processes
        # Ends the workers where the program exits.
        self._at_exit: Any = None
        self._words = words
        # The most samples under way, by worker, read before the memory was given back.
        self._last: list[int] = []

    def setup(self, setup: Setup) -> Setup:
        return setup._replace(under_way=self._under_way)

    def _under_way(self, worker: int) -> int:
        if self._last or self._words is None:
            return self._last[worker] if worker < len(self._last) else 0
        return self._words.get(worker, 0)

    def workers(self) -> Iterable[WorkerOption]:
        return self._options

    def schedule(self, scheduler: Any) -> None:
        if self._reads_ahead:
            scheduler.take_ahead()

    def begun(self, loader: TorchLoader, iterator: OurIterator) -> None:  # noqa: ARG002
        workers: Any = getattr(iterator, "_all_workers", None)
        if self._are_processes and self._at_exit is None:
            # Before `multiprocessing` terminates them, so that they close their datasets.
            self._at_exit = util.Finalize(None, workers.end, (True,), exitpriority=1)

    def close(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()
        if self._words is not None and not self._last:
            self._last = self._words.words.tolist()
            self._words.close()


def feature_for(loader: TorchLoader, options: Options, setup: Setup) -> Concurrency | None:
    """Returns the feature; torch's own loader has none."""
    if setup.path == "torch":
        return None
    are_here, is_remote = setup.path in ("threads", "single-process"), has_remote_pool(options)
    holder = _held_by(loader, one_thread=setup.workers > 0) if are_here else None
    words = None
    # Actors on other machines share no memory.
    if options.stats and not is_remote:
        words = SharedWords.make("ringloader-under-way", 1, max(setup.workers, 1))
    samples = Samples(options.worker_concurrency, options.sample_timeout, holder, words)
    # A worker claims one run of a batch after another.
    return Concurrency(samples, options.worker_task != "sample", not (are_here or is_remote), words)


def _held_by(loader: TorchLoader, one_thread: bool) -> Holder:
    """Returns the loop and lines that a loader has over all its epochs."""
    found = beyond_iterators.get(loader)
    if isinstance(found, Holder) and found.kept.is_of_this_process and found.kept.one_thread == one_thread:
        return found
    made = Holder(Kept(one_thread))
    beyond_iterators.put(loader, made)
    return made


class Samples(WorkerOption):
    """Makes the samples of a worker, several at once.

    Args:
        most: Samples that may be under way at once.
        seconds: The longest time of a coroutine for a sample; None: any.
        holder: The loop and lines of a loader without worker processes; None: each process has its own.
        words: The most samples under way, by worker, for the main process; None: not noted.
    """

    position = Position.AHEAD
    ends_within = CLOSES_WITHIN

    def __init__(
        self, most: int, seconds: float | None, holder: Holder | None, words: SharedWords | None
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._holder = holder
        self._words = words
        self._worker = 0
        self._kept = None if holder is None else holder.kept
        self.is_careful = False
        # True without workers.
        self._is_here = False
        self._lines: LoopLines | ThreadLines | None = None
        self._info: Any = None
        self._at_exit: Any = None
        # The states of the process's generators before the first batch whose samples have seeds; None: then.
        self._states: Any = None
        self._is_checked = False
        # The batch that is fetched, until it was.
        self._begun: Begun | None = None
        self._is_fetched = False
        # The call of that batch that was taken last.
        self._last: Call | None = None
        # Is given something once the call has ended that the worker waits for.
        self._rung: queue.SimpleQueue[None] | None = None
        # Looks around while the worker waits. Returns the seconds until it looks again.
        self.look: Callable[[], float] = functools.partial(float, LOOK_SECONDS)

    def has_room(self) -> bool:
        """Returns True if another sample would begin at once; else the worker wakes once one would."""
        return self._lines is not None and self._rung is not None and self._lines.has_room(self._rung)

    def join(self, worker: int, port: Any, start: EpochStart) -> None:  # noqa: ARG002
        self._worker = worker

    def begin(self, dataset: Any, start: EpochStart) -> Any:
        if start.base_seed is None:
            self._info = worker_info.of_samples()
        else:
            self._is_here, self._info = True, worker_info.without_workers(start.base_seed, dataset)
        return dataset

    def fill(self, samples: SampleFetcher) -> None:
        samples.use("worker_concurrency")
        dataset = samples.torchs.dataset
        samples.asks_each = not gives_several(dataset)
        samples.ahead = self
        self._make_one: Callable[[Any], Any] = samples.get
        self._make_several: Callable[[Any], Any] = samples.several
        samples.get = functools.partial(self._get, samples.turn)
        samples.several = functools.partial(self._outcome, 0, self._make_several)
        self._rung = queue.SimpleQueue()
        if self._kept is None:
            self._kept = Kept(one_thread=False)
            # A worker that ends by an error does not ask for its end.
            self._at_exit = util.Finalize(None, self._kept.close, exitpriority=100)
        self._kept.add(_all_in(dataset))
        if self._is_here and self._kept.lines:
            # The lines of the epochs before.
            self._lines = self._kept.lines[0]
        if self._lines is None:
            self._lines = self._make_lines(self._kept, is_async(dataset, samples.is_asked_for_several))
        self._lines.info = self._info
        self._lines.most_under_way = 0

    def _make_lines(self, kept: Kept, on_loop: bool) -> LoopLines | ThreadLines:
        limits = Limits(self._most, self._seconds, kept.one_thread)
        made: LoopLines | ThreadLines
        if on_loop:
            made = LoopLines(limits, self._info, kept.find_loop())
        else:
            made = ThreadLines(limits, self._info, kept.find_loop)
        kept.lines.append(made)
        return made

    def begin_batch(self, samples: SampleFetcher, index: Any, seeds: Sequence[int]) -> Begun:
        """Begins the samples of a batch."""
        pause = None if samples.handler is None else samples.handler.pause
        if samples.torchs.auto_collation and samples.is_asked_for_several:
            calls = [Call(self._make_several, index, _length(index), seeds[0] if seeds else None)]
        else:
            if samples.torchs.auto_collation and not isinstance(index, (list, tuple)):
                # The index may allow only one iteration.
                index = list(index)
            indices: Sequence[Any] = index if samples.torchs.auto_collation else [index]
            each: Sequence[int | None] = seeds or [None] * len(indices)
            calls = [
                Call(self._make_one, at, 1, seed, pause) for at, seed in zip(indices, each, strict=False)
            ]
            if samples.handler is None:
                for number, call in enumerate(calls):
                    call.batch, call.number = calls, number
        if seeds and not self._is_checked:
            # Once. Other threads of the program draw too, where workers are threads.
            self._is_checked = True
            self._states = _states_of_process() if self._is_here or self._holder is None else None
        assert self._lines is not None
        self._lines.add(calls)
        return Begun(index, calls)

    def index_of(self, index: Any) -> Any:
        if self._is_fetched:
            # A batch that all workers were to make, and that is made again here.
            self._begun = None
        self._is_fetched = True
        return index if self._begun is None else self._begun.index

    def pause(self, seconds: float) -> None:
        # A sample was made again on its line, after this pause.
        if self._last is None or self._last.is_taken:
            time.sleep(seconds)

    def fetch(self, fetcher: Fetcher, index: Any, begun: Begun | None) -> Any:
        """Returns the batch of an index, whose samples have begun or begin now."""
        self._begun, self._is_fetched = begun, False
        try:
            return fetcher.fetch(index)
        except EndedError:
            return EMPTY
        finally:
            self._begun = self._last = None
            left = [] if begun is None else [call for call in begun.calls if not call.is_over]
            if left and self._lines is not None:
                self._lines.drop(left)
            if self._words is not None and self._lines is not None:
                self._words.set(self._worker, 0, self._lines.most_under_way)

    def _get(self, turn: Turn, index: Any) -> Any:
        return self._outcome(turn.number, self._make_one, index)

    def _outcome(self, number: int, make: Callable[[Any], Any], index: Any) -> Any:
        lines, begun = self._lines, self._begun
        assert lines is not None
        call = None
        if begun is not None and number < len(begun.calls) and not begun.calls[number].is_taken:
            call = begun.calls[number]
        if call is None:
            call = Call(make, index)
            lines.add([call])
        self._wait(call)
        if self._states is not None and (begun is None or number == len(begun.calls) - 1):
            if _states_of_process() != self._states:
                logger.warning(_SHARED_DRAWS)
            self._states = None
        self._last = call
        return call.take()

    def _wait(self, call: Call) -> None:
        rung = self._rung
        assert rung is not None
        call.waiter = rung
        # ORDERING: looked at after the waiter is there, which is looked at after the end.
        while not call.is_over:
            with contextlib.suppress(queue.Empty):
                rung.get(timeout=self.look())
        call.waiter = None

    def close(self) -> None:
        """Ends the lines of the worker; in a process, its loop too."""
        if self._lines is not None:
            self._lines.close()
        if self._holder is None and self._kept is not None:
            self._at_exit.cancel()
            self._kept.close()
            self._kept = None
        self._lines = None

    def leave_process(self) -> None:
        self.close()
        if self._words is not None:
            self._words.close()


def _states_of_process() -> Any:
    """Returns the states of the generators that all samples of a process share."""
    return random.getstate(), torch.default_generator.get_state().tolist()


class Tasks(WorkerOption):
    """Begins the tasks of a worker before their turn."""

    position = Position.TURN

    def __init__(self) -> None:
        self._samples: Samples | None = None
        self._channel: AheadChannel | None = None

    def join(self, worker: int, port: Any, start: EpochStart) -> Callable[..., Any]:  # noqa: ARG002
        return lambda usual: functools.partial(self._make_channel, usual)

    def _make_channel(self, usual: Callable[..., Any], *args: Any) -> AheadChannel:
        self._channel = AheadChannel(usual(*args))
        return self._channel

    def fill(self, samples: SampleFetcher) -> None:
        assert isinstance(samples.ahead, Samples)
        self._samples = samples.ahead

    def wrap(self, fetcher: Fetcher) -> Fetcher:
        samples, channel = self._samples, self._channel
        assert samples is not None
        if channel is not None:
            channel.follow(fetcher, samples.has_room, samples.close)
            samples.look = channel.look
        return _InTurn(fetcher, samples, channel)


class _InTurn(InFront):
    """In front of a fetcher: fetches batches whose samples have begun.

    Args:
        fetcher: The fetcher.
        samples: Makes the samples.
        channel: Has begun tasks; None: none is begun before it is fetched.
    """

    def __init__(self, fetcher: Fetcher, samples: Samples, channel: AheadChannel | None) -> None:
        super().__init__(fetcher)
        self._samples = samples
        self._channel = channel

    def fetch(self, index: Any, /) -> Any:
        begun = self._behind.begin(index) if self._channel is None else self._channel.take_begun()
        return self._samples.fetch(self._behind, index, begun)


def is_async(dataset: Any, several: bool = False) -> bool:
    """True for a dataset whose samples are coroutines: its own method is one, or those of all inside."""
    kind = type(dataset)
    if inspect.iscoroutinefunction(getattr(kind, "__getitems__" if several else "__getitem__", None)):
        return True
    wrappers = (Subset, ConcatDataset, StackDataset, CachedDataset)
    if not any(kind.__getitem__ is wrapper.__getitem__ for wrapper in wrappers):
        return False
    return all(is_async(one, several) for one in inner(dataset))


def _all_in(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all that it has inside, those of other wrappers too."""
    seen, left = set(), [dataset]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            # Attributes of these names may be anything.
            with contextlib.suppress(Exception):
                left += inner(one)


def _length(index: Any) -> int:
    try:
        return max(len(index), 1)
    except TypeError:
        return 1
