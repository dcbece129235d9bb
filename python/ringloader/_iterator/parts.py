"""Makes the parts of an iterator that options ask for: stages, options of workers, clock, next epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ringloader._native as _native
from ringloader._common import states
from ringloader._iterator.stages import Stages, Transform
from ringloader._options import epochs, seeding
from ringloader._options.table import Options
from ringloader._report import asked
from ringloader._report.tally import Clock
from ringloader._stats.recording import History, Recording
from ringloader._torch import devices
from ringloader._worker import gather, result
from ringloader._worker.options import WorkerOption, in_order

if TYPE_CHECKING:
    from ringloader._placement.registration import Registrations
    from ringloader._torch.protocols import TorchLoader

    # The clock of ``stats``, and that of a report at exit. A plain tuple: each `iter` makes one.
    Times = tuple[_native.Recorder | None, Clock | None]


def times_of(options: Options, workers: int) -> Times:
    """Returns the clocks, and begins the first epoch: imports after it take the caller's time."""
    return (
        _native.Recorder(max(workers, 1)) if options.stats else None,
        Clock() if asked.mode() else None,
    )


def stages_of(
    loader: TorchLoader,
    options: Options,
    workers: int,
    times: Times,
    shared_bytes: int = 0,
    registrations: Callable[[str], Registrations | None] | None = None,
    history: History | None = None,
) -> Stages:
    """Returns the stages of the options in the main process.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
        times: Its clocks.
        shared_bytes: The shared memory of all workers, in bytes.
        registrations: Returns what is registered of the workers' memory, for a device type.
        history: Returns the number of workers, and its changes.
    """
    if not options.changed:
        return Stages(clock=times[1])
    recorder, clock = times
    from ringloader._options import collecting

    device, transform = devices.resolve(options.device), options.device_transform
    recording = None
    if recorder is not None:
        recording = Recording(loader, options, workers, device is not None, recorder, shared_bytes, history)
    bad_samples = collecting.collecting_for(loader, options)
    if device is None:
        if recording is not None and transform is not None:
            transform = recording.placing(transform)
        return Stages(
            collecting=bad_samples,
            transform=None if transform is None else Transform(transform),
            recording=recording,
            clock=clock,
        )
    from ringloader._placement.device import Moving

    transform = None if transform is None else result.through(transform)
    moving = Moving(device, options.device_prefetch, transform, registrations)
    return Stages(moving, bad_samples, recording=recording, clock=clock)


def worker_options_of(
    loader: TorchLoader, options: Options, workers: int, clock: Any = None
) -> Sequence[WorkerOption]:
    """Returns the options that take part where batches are made: in workers, or without them here.

    Args:
        loader: The loader.
        options: Its options.
        workers: The most workers that it may have.
        clock: With ``stats``, the clocks of threads, or the recorder of a loader without workers.
    """
    own_states = states.of(loader)
    gathering = gather.option_for(loader)
    snapshots = None if own_states is None else own_states.worker_option(loader)
    if not options.changed:
        return in_order(gathering, snapshots)
    # A torch without a private name that it needs has torch's path. In this form an import is cheap.
    import ringloader._options.handling as handling
    import ringloader._stats.timing as timing

    return in_order(
        gathering,
        handling.option_for(options),
        epochs.option_for(loader, options),
        snapshots,
        timing.option_for(loader, workers, clock) if options.stats else None,
        seeding.option_for(loader, options, workers),
    )


def numbering_of(loader: TorchLoader, options: Options) -> tuple[seeding.Keys | None, bool]:
    """Returns what makes the places of samples, if an option seeds by them, and if one counts epochs."""
    if not options.changed:
        return None, False
    return seeding.keys_for(loader, options), epochs.are_counted(loader, options)


def next_epoch_of(loader: TorchLoader, options: Options) -> Any:
    """Returns what begins epochs before ``iter``, or None."""
    if not options.prefetch_epochs:
        return None
    from ringloader._iterator.next_epoch import NextEpoch

    return NextEpoch(loader)
