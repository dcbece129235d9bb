"""The order of an epoch, begun again: over the generators as they were, and past samples that are known."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

import ringloader._native as _native
from ringloader._sources import samplers
from ringloader._state.saved import Saved
from ringloader.rollover import RolloverBatchSampler

# More than any epoch has.
_ALL = (1 << 63) - 1


def draws_of(loader: Any) -> samplers.TorchDraws:
    """Returns the draws of a loader's sampler.

    Raises:
        NotImplementedError: For a sampler that is not read natively.
    """
    found = samplers.draws_in_any_iter(loader._index_sampler)
    if found is None:
        raise NotImplementedError(
            f"the state of a loader with {loader._index_sampler!r:.120} cannot be had yet: use one of "
            "torch's samplers, with a generator of the CPU or none"
        )
    if torch.default_generator in (loader.generator, getattr(found.sampler, "generator", None)):
        raise NotImplementedError(
            "the state of a loader with generator=torch.default_generator cannot be had yet: leave generator "
            "out, which draws from the same one"
        )
    return found


def kind_of(draws: samplers.TorchDraws) -> str:
    """Returns the name of a sampler's class."""
    return type(draws.sampler).__name__


def sampler_generator(loader: Any, draws: samplers.TorchDraws) -> torch.Generator | None:
    """Returns the generator that a sampler has and the loader has not."""
    found: torch.Generator | None = getattr(draws.sampler, "generator", None)
    return None if found is loader.generator else found


def places(draws: samplers.TorchDraws) -> tuple[int, int]:
    """Returns the place of a sampler's first sample in the epoch, and the step to the next one."""
    sampler = draws.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.rank, sampler.num_replicas
    return 0, 1


def draw_base_seed(generator: torch.Generator) -> None:
    """Moves a generator on as torch's iterator does. MIRRORS torch dataloader.py::_BaseDataLoaderIter."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


class Shadow:
    """The order of an epoch that is under way, read a second time and up to where it has been returned.

    Neither the samplers nor any generator that other code sees is moved.

    Args:
        loader: The loader.
        saved: The epoch's beginning.
    """

    def __init__(self, loader: Any, saved: Saved) -> None:
        self._draws = draws_of(loader)
        self._draws.given, self._draws.epoch = saved.drawn, saved.epoch
        self._draws.twins = _twins(loader, self._draws, saved)
        self._draws.rolling = None
        self._place, self._step = places(self._draws)
        self._rest = saved.rest
        self._stream: _native.Stream | None = None
        self.samples = 0
        self.fingerprint: int | None = 0

    def pass_to(self, samples: int) -> None:
        """Goes on up to so many samples from the beginning, or to the end."""
        if samples <= self.samples:
            return
        if self._stream is None:
            self._stream = opened(self._draws)
            if self._rest is not None:
                self._stream.roll_over(list(self._rest))
        place = self._place + self.samples * self._step
        count, fingerprint = self._stream.pass_over(self._draws, samples - self.samples, place, self._step)
        self.samples += count
        if fingerprint is None or self.fingerprint is None:
            self.fingerprint = None
        else:
            self.fingerprint = (self.fingerprint + fingerprint) % (1 << 64)


def _twins(loader: Any, draws: samplers.TorchDraws, saved: Saved) -> dict[int, torch.Generator]:
    twins: dict[int, torch.Generator] = {}
    if loader.generator is not None and saved.loader_generator is not None:
        twin = torch.Generator()
        twin.set_state(saved.loader_generator)
        if saved.base_seed_drawn:
            draw_base_seed(twin)
        twins[id(loader.generator)] = twin
    own = sampler_generator(loader, draws)
    if own is not None and saved.sampler_generator is not None:
        twin = torch.Generator()
        twin.set_state(saved.sampler_generator)
        twins[id(own)] = twin
    return twins


def opened(draws: samplers.TorchDraws) -> _native.Stream:
    """Returns a stream that was just begun.

    Raises:
        RuntimeError: If torch would refuse the sampler.
    """
    stream = draws.open()
    if stream is None:
        raise RuntimeError(f"the order of {draws.sampler!r:.120} cannot be read again: torch refuses it now")
    return stream


def restored(loader: Any, draws: samplers.TorchDraws, saved: Saved) -> None:
    """Puts the generators, and what ``rollover`` kept back, to where they were when the epoch began."""
    if saved.loader_generator is not None:
        loader.generator.set_state(saved.loader_generator)
        if saved.base_seed_drawn:
            draw_base_seed(loader.generator)
    own = sampler_generator(loader, draws)
    if own is not None and saved.sampler_generator is not None:
        own.set_state(saved.sampler_generator)
    if draws.rolling is not None and saved.rest is not None:
        draws.rolling.set_rest(list(saved.rest))


def end(loader: Any, draws: samplers.TorchDraws, saved: Saved) -> None:
    """Puts the generators, and what ``rollover`` keeps back, to where an epoch that is over left them."""
    restored(loader, draws, saved)
    if saved.loader_generator is None and saved.sampler_generator is None and draws.rolling is None:
        return
    draws.given, draws.epoch = saved.drawn, saved.epoch
    stream = opened(draws)
    if draws.rolling is None:
        stream.pass_over(draws, _ALL, 0, 1)
    while stream.next(draws) is not None:
        pass


def passing(saved: Saved, draws: samplers.TorchDraws, note: Callable[[int, int | None], None]) -> None:
    """Has draws go on behind the samples that a state has passed, where their stream is made.

    Args:
        saved: The state.
        draws: The draws of the epoch that goes on.
        note: Called with the samples that were passed, and their fingerprint.
    """
    place, step = places(draws)

    def begin(stream: _native.Stream) -> None:
        count, fingerprint = stream.pass_over(draws, saved.to_pass, place, step)
        note(count, fingerprint)
        same = count == saved.samples and fingerprint == saved.fingerprint
        if not saved.is_edited and not same:
            raise ValueError(
                f"load_state_dict(): the {saved.samples} samples that the state has passed are not the first "
                f"of the {type(draws.sampler).__name__} now: its dataset, arguments or seed are others than "
                "when the state was taken; give it those, or begin the epoch anew"
            )

    draws.given, draws.epoch, draws.begin = saved.drawn, saved.epoch, begin


class Rest:
    """The rest of an epoch without workers, read natively in place of torch's sampler iterator."""

    def __init__(self, draws: samplers.TorchDraws, at_once: bool) -> None:
        self._draws = draws
        # What the epoch had drawn before is not drawn again, so nothing has to wait for the first request.
        self._stream = opened(draws) if at_once else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stream is None:
            self._stream = opened(self._draws)
        index = self._stream.next(self._draws)
        if index is None:
            raise StopIteration
        return index


class FirstRequest:
    """Notes what the first request to a sampler draws from the program's generator, and steps aside.

    Args:
        iterator: An iterator of torch's kind.
        record: Gets the generator's state before the draw.
    """

    def __init__(self, iterator: Any, record: samplers.Record) -> None:
        # No circle: an iterator that is dropped before it is asked goes at once.
        self._iterator = weakref.ref(iterator)
        self._record = record
        self._sampler_iter = iterator._sampler_iter

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        iterator = self._iterator()
        if iterator is not None:
            iterator._sampler_iter = self._sampler_iter
        self._record.drawn = torch.default_generator.get_state()
        return next(self._sampler_iter)


def draws_from_program(draws: samplers.TorchDraws) -> bool:
    """True if a sampler draws from the program's generator."""
    return getattr(draws.sampler, "generator", draws) is None


def seed_in(drawn: torch.Tensor) -> int:
    """Returns the seed that torch's ``RandomSampler`` draws from a generator in this state."""
    generator = torch.Generator()
    generator.set_state(drawn)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def rest_of(loader: Any) -> list[Any] | None:
    """Returns the indices that ``rollover`` keeps back for the epoch that begins next."""
    batch_sampler = loader._index_sampler
    return batch_sampler.rest() if isinstance(batch_sampler, RolloverBatchSampler) else None
