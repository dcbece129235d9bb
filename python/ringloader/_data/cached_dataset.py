"""A dataset whose samples are made once, and read by all processes from then on."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
from collections.abc import Callable, Iterable, Sized
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any, Generic, Self, SupportsIndex, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset

import ringloader._native as _native
from ringloader._common.attributes import has_method, is_awaitable
from ringloader._common.proc import local_world_size
from ringloader._data.private import PrivateSamples
from ringloader._log import mib
from ringloader._torch import select_path

_T = TypeVar("_T")

_MISSING = object()
# Methods of a dataset that has epochs, or a state: what is kept belongs to none.
_OF_EPOCHS = frozenset({"set_epoch", "state_dict", "load_state_dict"})
# The room for it in a file's header.
_LONGEST_VERSION = 2048
_MOST_BYTES = (1 << 63) - 1
# Attributes that are not the dataset's.
_OWN = frozenset({"dataset", "then"})


class CachedDataset(Dataset[_T], Generic[_T]):
    """A map-style dataset that makes each sample of another dataset once, for all processes and epochs.

    ``cached[i]`` is ``dataset[i]``. The first process or thread that needs a sample makes it. All others read
    it from shared memory, or from a file. Each caller gets its own copy, with the types, dtypes, shapes and
    strides of ``dataset[i]`` (a numpy array with gaps gets other strides). A sample may be any object that
    can be pickled. Tensors on the CPU, arrays, numbers, strings, and trees of these are read fastest. The
    tensors and arrays of a sample share one block of memory, which stays while you hold one of them.
    Attributes that you set on a plain tensor are lost.

    The cache keeps samples until it is full, and replaces none. Other samples are made at each access.

    - If ``dataset[i]`` raises, the error is not kept.
    - A sample that cannot be pickled is returned, but not kept. The log says so once in each process.
    - A sample in a file that can no longer be unpickled is made again. The log says so, too.

    If ``dataset[i]`` uses random numbers, its first result is kept. Move random augmentation into ``then``.

    On macOS and Windows, each process keeps its own samples, up to 1 GiB unless you pass ``max_bytes``. A new
    process starts without samples, and ``path`` raises an error.

    New processes get the cache as a descriptor, with any start method. A copy shares the samples. Any other
    pickle (``torch.save``, a queue) has no samples: it has the path, or an empty cache.

    Attributes of ``dataset`` can be read and set through this object, for example by a ``worker_init_fn``.
    Exceptions are ``set_epoch``, ``state_dict``, ``load_state_dict``, names that begin with an underscore,
    and attributes that a subclass sets. If ``dataset`` begins to make other samples, call ``clear``: kept
    samples do not change.

    Args:
        dataset: A map-style dataset, with a length. Its keys are ``0`` to ``len(dataset) - 1``.
        max_bytes: The most bytes of samples, over all processes. The cache also takes up to 8 bytes for each
            sample of ``dataset``. Default: half of the memory of the machine or its control group, divided by
            ``LOCAL_WORLD_SIZE``; with ``path``, half of the free space of the file system. As the
            cache grows, it checks the free space again, and stops before less is free than it has taken.
        path: A file for the samples. It is created if it does not exist. Processes of one machine may use it
            at the same time, and the next run reads it again. If the file is cut off or damaged, samples are
            made again. It holds pickles: use only files that you trust.
        version: Your name for the version of the samples. A file with another version raises ``ValueError``.
        then: A function that is called with each sample after the cache, for random augmentation. Its result
            is not kept.

    Raises:
        TypeError: If ``dataset`` is iterable-style, or has no length.
        ValueError: If the file holds samples of another version, or of a dataset of another length, or is not
            ringloader's; if ``max_bytes`` is negative, or ``version`` has more than 2,048 bytes.
        OSError: If the file cannot be opened or made.
    """

    def __init__(
        self,
        dataset: Dataset[_T],
        max_bytes: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        version: str = "",
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        _check(dataset, max_bytes, version, then)
        self.dataset = dataset
        self.then = then
        where = None if path is None else _path(path)
        most = None if max_bytes is None else min(operator.index(max_bytes), _MOST_BYTES)
        self._opened = len(cast(Sized, dataset)), most, where, version
        self._samples = _open(*self._opened)
        for name in sorted(_OF_EPOCHS):
            if has_method(dataset, name):
                kind = type(dataset).__name__
                select_path.log_once(
                    f"CachedDataset does not pass {name} on to {kind}: the samples that it keeps belong to "
                    "no epoch; put what changes from epoch to epoch into then"
                )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Returns ``then(dataset[index])``, or ``dataset[index]``.

        Raises:
            IndexError: If there is no such sample.
            Exception: What ``dataset`` and ``then`` raise.
        """
        at = operator.index(index)
        length = len(self._samples)
        if not -length <= at < length:
            raise IndexError(f"index {at} is out of range for a dataset of length {length}")
        at %= length
        sample = self._kept(at)
        if sample is _MISSING:
            sample = self.dataset[at]
            if is_awaitable(sample):
                return self._when_it_comes(at, sample)
            sample = self._keep(at, sample)
        return sample if self.then is None else self.then(sample)

    async def _when_it_comes(self, index: int, coming: Any) -> Any:
        sample = self._keep(index, await coming)
        return sample if self.then is None else self.then(sample)

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Returns the samples of a batch, in order."""
        return [self[index] for index in indices]

    # Several calls make its samples.
    _ringloader_asks_each = __getitems__

    def stats(self) -> dict[str, Any]:
        """Returns counts over all processes.

        - ``items``, ``bytes``: the samples that are kept now, and the bytes that they take. Bytes that killed
          processes left behind are included.
        - ``max_bytes``: the limit now.
        - ``hits``, ``misses``: samples read, and samples made, since this program opened or made the cache.
        - ``full``: True if a sample found no room.
        """
        names = ("items", "bytes", "max_bytes", "hits", "misses", "full")
        return dict(zip(names, self._samples.stats(), strict=True))

    def clear(self) -> None:
        """Forgets all samples, and gives their memory back.

        If another process reads a sample at this moment, it gets that sample, or makes it again.

        Raises:
            OSError: If the disk fails. After a crash of the machine the samples may then exist again.
        """
        self._samples.clear()

    def _kept(self, index: int) -> Any:
        """Returns a copy of the sample that is kept, or ``_MISSING``."""
        try:
            return self._samples.get(index, _MISSING)
        except MemoryError:
            raise
        except Exception as error:
            path = self._opened[2]
            where = "" if path is None else f" in {path}"
            select_path.log_once(
                f"a CachedDataset cannot unpickle samples that it keeps{where}, and makes them again "
                f"each time: sample {index} ({type(error).__name__}: {error}). Remove the file, or call "
                "clear, if they are of an earlier version",
                (type(self.dataset), path, type(error)),
            )
            return _MISSING

    def _keep(self, index: int, sample: Any) -> Any:
        """Returns a copy of the sample: another thread may be about to keep the dataset's own object."""
        try:
            own, is_too_large = self._samples.put(index, sample)
        except MemoryError:
            return sample
        except Exception as error:
            kind = type(sample).__name__
            self._pass_on(
                f"{index}, of type {kind}, cannot be pickled ({type(error).__name__}: {error})",
                type(sample),
                type(error),
            )
            return sample
        if is_too_large:
            most = mib(self._samples.stats()[2])
            self._pass_on(
                f"{index} is larger than all that the cache may take, {most}; pass a larger max_bytes"
            )
        return own

    def _pass_on(self, why: str, *kinds: object) -> None:
        """Says once for each of ``kinds`` that a sample is not kept. There may be many such samples."""
        kind = type(self.dataset)
        text = f"a CachedDataset passes samples of {kind.__name__} on without keeping them: sample {why}"
        select_path.log_once(text, (kind, *kinds))

    def __copy__(self) -> Self:
        """Returns a dataset with the same samples, and attributes of its own."""
        return self._like(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        shared = {"_samples": self._samples}
        own = {name: value for name, value in self.__dict__.items() if name not in shared}
        return self._like({**copy.deepcopy(own, memo), **shared})

    def _like(self, attributes: dict[str, Any]) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(attributes)
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        samples = state.pop("_samples")
        if _native.SUPPORTED and context.get_spawning_popen() is not None:
            state["_sent"] = [reduction.DupFd(fd) for fd in samples.filenos()], samples.terms
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent = state.pop("_sent", None)
        self.__dict__.update(state)
        self._samples = _open(*self._opened) if sent is None else _attach(*sent)

    def __getattr__(self, name: str) -> Any:
        # Not before the constructor has run, as while this is unpickled.
        if name.startswith("_") or name in _OF_EPOCHS or "dataset" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in _OWN or name.startswith("_") or type(self) is not CachedDataset
        if is_own or "dataset" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r})"


def _open(
    length: int, max_bytes: int | None, path: str | None, version: str
) -> _native.SampleCache | PrivateSamples:
    if not _native.SUPPORTED:
        if path is not None:
            raise ValueError(
                f"CachedDataset keeps samples in a file only on Linux, and got path={path!r}: leave path out "
                "on this system"
            )
        return PrivateSamples(length, max_bytes)
    if path is None:
        return _native.SampleCache.in_memory(length, max_bytes, local_world_size())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            # Python runs a signal's handler between two tries.
            with contextlib.suppress(InterruptedError):
                return _native.SampleCache.open(fd, length, version, max_bytes)
    except ValueError as error:
        raise ValueError(f"the file {path!r} cannot be this cache: {error}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _attach(sent: list[Any], terms: tuple[int, int | None, int, str | None]) -> _native.SampleCache:
    fds = [one.detach() for one in sent]
    try:
        return _native.SampleCache.attach(fds, terms)
    finally:
        for fd in fds:
            os.close(fd)


def _check(dataset: object, max_bytes: object, version: object, then: object) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"CachedDataset takes a map-style dataset, not the iterable-style {kind}: it keeps samples by "
            "their index, and those of a stream have none"
        )
    if not (has_method(dataset, "__getitem__") and isinstance(dataset, Sized)):
        raise TypeError(f"CachedDataset takes a dataset with __getitem__ and __len__, and {kind} lacks one")
    if max_bytes is not None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, SupportsIndex):
            raise TypeError(f"max_bytes must be a number of bytes or None, not {max_bytes!r}")
        max_bytes = operator.index(max_bytes)
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative: {max_bytes}")
    if not isinstance(version, str):
        raise TypeError(f"version must be a string, not {version!r}; for example version=str(...)")
    try:
        length = len(version.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"version must be text that UTF-8 can encode, not {version!r}: {error}") from None
    if length > _LONGEST_VERSION:
        raise ValueError(f"version has {length} bytes, more than {_LONGEST_VERSION}; pass a hash of it")
    if then is not None and not callable(then):
        raise TypeError(f"then must be callable, not {then!r}")


def _path(path: object) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a string, bytes, a path or None, not {path!r}")
    name = os.fsdecode(path)
    if "\0" in name:
        raise ValueError(f"path must not have a null character: {name!r}")
    return str(Path(name).absolute())


CachedDataset.__module__ = "ringloader"
