"""Each option of the table: it works, is left out and named in the log, or is an error at construction."""

import logging

import pytest
import torch
from torch.utils.data import TensorDataset

import ringloader
from ringloader import BadSample, DataLoader, Dispatch, WorkerPool, epoch_stats, report
from ringloader._features.auto import auto_workers
from ringloader._features.table import TABLE
from systems import parts

# An example of each option, with the options that it needs.
EXAMPLES = {
    "max_shared_bytes": {"max_shared_bytes": 1 << 20},
    "device": {"device": "cpu"},
    "device_prefetch": {"device_prefetch": 1},
    "device_transform": {"device": "cpu", "device_transform": torch.neg},
    "worker_pool": {},
    "main_prefetch": {"main_prefetch": 1},
    "worker_method": {"worker_method": "thread"},
    "worker_task": {"worker_task": "sample"},
    "last_batch": {"last_batch": "rollover"},
    "worker_reset_fn": {"worker_reset_fn": parts.keep},
    "seeding": {"seeding": "sample"},
    "seed": {"seed": 7, "seeding": "batch"},
    "restart_workers": {"restart_workers": 1},
    "sample_timeout": {"sample_timeout": 60.0},
    "on_error": {"on_error": "skip"},
    "max_errors": {"max_errors": 2, "on_error": "skip"},
    "watchdog": {"watchdog": 5.0},
    "stats": {"stats": True},
    "worker_concurrency": {"worker_concurrency": 4},
    "num_workers": {"num_workers": "auto"},
    "prefetch_epochs": {"prefetch_epochs": True, "persistent_workers": True},
}
NEED_WORKERS = {"num_workers", "main_prefetch", "prefetch_epochs"}
ERRORS = {
    *("worker_method", "worker_task", "worker_reset_fn", "seeding", "seed", "on_error"),
    "max_errors",
    "worker_concurrency",
}
LEFT_OUT = {
    *("max_shared_bytes", "device_prefetch", "main_prefetch", "restart_workers", "sample_timeout"),
    *("watchdog", "stats"),
    "prefetch_epochs",
}


def with_workers(name, **arguments):
    examples = {**EXAMPLES[name], **arguments}
    if name == "worker_pool":
        return DataLoader(parts.Numbers(), batch_size=3, worker_pool=WorkerPool(1), **examples)
    return DataLoader(parts.Numbers(), batch_size=3, **{"num_workers": 1, **examples})


def lists(loader):
    return [batch.tolist() for batch in loader]


PLAIN = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_each_option_has_an_example():
    of_states = {name for name, about in TABLE.items() if about.is_of_states}
    assert set(EXAMPLES) == set(TABLE) - of_states
    promised = {"works": set(), "is left out": set(), "is an error": set()}
    for name in EXAMPLES:
        fate = TABLE[name].off_linux or TABLE[name].on_torchs
        promised[fate.removesuffix(" with workers")].add(name)
    # `seed` and `max_errors` need another option, which is the error.
    assert promised["is an error"] == ERRORS - {"seed", "max_errors"}
    assert promised["is left out"] == LEFT_OUT


def test_options_that_change_batches_are_an_error_with_workers():
    for name in sorted(ERRORS):
        with pytest.raises(ValueError, match="cannot be used with num_workers=1 on this system") as raised:
            with_workers(name)
        said = str(raised.value)
        assert "ringloader's own workers need Linux; leave it out here, or pass num_workers=0" in said, name
        assert any(option in said for option in EXAMPLES[name]), name


def test_a_dispatch_is_an_error_with_workers():
    with pytest.raises(ValueError, match="a Dispatch as dataset cannot be used with num_workers=2"):
        DataLoader(Dispatch(range(4)), num_workers=2)
    assert lists(DataLoader(Dispatch(range(4)), batch_size=2)) == [[0, 1], [2, 3]]


def test_convert_raises_the_same():
    loader = torch.utils.data.DataLoader(parts.Numbers(), num_workers=1)
    with pytest.raises(ValueError, match="on_error cannot be used with num_workers=1"):
        ringloader.convert(loader, on_error="skip")
    assert type(loader) is torch.utils.data.DataLoader


def test_other_options_are_taken_with_workers():
    for name in sorted(set(EXAMPLES) - ERRORS):
        loader = with_workers(name)
        workers = auto_workers.bound() if name == "num_workers" else 1
        assert (loader.num_workers, len(loader)) == (workers, 3 if name == "last_batch" else 4), name


def test_options_and_data_with_a_worker_that_is_spawned(caplog):
    """All options that are left out, some that work, and data of each kind, in one loader."""
    caplog.set_level(logging.INFO, "ringloader")
    everything = parts.Everything(9)
    here = list(DataLoader(everything, batch_size=4, collate_fn=parts.collate))
    options = {name: value for one in sorted(LEFT_OUT) for name, value in EXAMPLES[one].items()}
    del options["persistent_workers"]
    pool = WorkerPool(1)
    with DataLoader(
        everything,
        batch_size=4,
        collate_fn=parts.collate,
        worker_pool=pool,
        prefetch_factor=3,
        last_batch="keep",
        **options,
    ) as loader:
        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
        there = [list(loader) for _ in range(2)][1]
        assert report(loader).path == "torch"
        assert report(loader).reason == "this platform has no memfd; shared-memory rings need Linux"
        with pytest.raises(RuntimeError, match="no times are known"):
            epoch_stats(loader)
        with pytest.raises(RuntimeError, match="cannot reach workers on torch's own path"):
            loader.call_workers(len)
    pool.shutdown()
    for one, other in zip(here, there, strict=True):
        assert one["word"] == other["word"] == [f"word {number}" for number in one["index"]]
        assert one["cached"] == other["cached"] == [2 * number for number in one["index"]]
        assert torch.equal(one["row"], other["row"]) and torch.equal(one["ragged"], other["ragged"])
        assert set(one["has"]) == {(False, False)} and set(other["has"]) == {(False, True)}
    # Each sample was made once in the first epoch, and read three times since.
    assert there[-1]["hits"][-1] == 3 * len(everything)
    told = [message.removeprefix("ringloader: ") for message in caplog.messages]
    expected = [f"{name} has no effect where torch's own loader runs" for name in LEFT_OUT - {"stats"}]
    expected += [
        "stats has no effect on this system: it needs Linux",
        "a WorkerPool has no processes on this system, where each iterator starts its own workers: "
        "ringloader's own workers need Linux",
        "a new process gets a copy of a SharedArray on this system, where no memory is shared: it does not "
        "see what others write later, and others do not see what it writes",
    ]
    assert sorted(told) == sorted(expected)


def test_without_workers_each_option_is_taken(caplog):
    for name in sorted(set(EXAMPLES) - NEED_WORKERS):
        caplog.clear()
        assert_taken_without_workers(name, caplog)


def assert_taken_without_workers(name, caplog):
    if name == "worker_pool":
        loader = DataLoader(parts.Numbers(), batch_size=3)
    else:
        loader = DataLoader(parts.Numbers(), batch_size=3, **EXAMPLES[name])
    found = lists(loader)
    if name == "last_batch":
        assert found == PLAIN[:3]
        assert lists(loader) == [[9, 0, 1], [2, 3, 4], [5, 6, 7]]
    elif name == "device_transform":
        assert found == [[-number for number in batch] for batch in PLAIN]
    else:
        assert found == PLAIN
    assert report(loader).path == "single-process"
    told = [message for message in caplog.messages if name in message]
    assert len(told) == (name == "stats")


def test_bad_samples_are_handled_without_workers():
    loader = DataLoader(parts.Failing(), batch_size=3, on_error="skip")
    assert lists(loader) == [[0, 1, 2], [4, 5], [6, 7, 8], [9]]
    (bad,) = loader.errors
    assert isinstance(bad, BadSample) and bad.index == 3


def test_a_reset_function_is_called_without_workers():
    dataset = parts.Numbers()
    loader = DataLoader(dataset, worker_reset_fn=parts.keep, seed=1)
    told = []
    for _ in range(2):
        for _ in loader:
            pass
        told.append(dataset.told)
    assert told == [0, 1]


def test_samples_are_seeded_by_their_place_without_workers():
    def drawn(batch_size):
        loader = DataLoader(
            parts.Drawing(),
            batch_size=batch_size,
            seeding="sample",
            seed=5,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
        )
        return [sample for batch in loader for sample in zip(*(part.tolist() for part in batch), strict=True)]

    before = torch.get_rng_state()
    assert drawn(2) == drawn(3)
    assert torch.equal(before, torch.get_rng_state())
    # Linux has the same numbers, with any workers: tests/features/seeding/test_places.py.
    dataset = parts.Drawing(2)
    (batch,) = DataLoader(dataset, batch_size=2, seeding="sample", seed=5)
    assert [number.tolist() for number in batch[1:]] == parts.SEEDED


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"device 'cuda' (is not of|does not exist)"):
        DataLoader(parts.Numbers(), device="cuda")
    assert lists(DataLoader(parts.Numbers(), batch_size=3, device="auto")) == PLAIN


def test_values_are_checked_as_on_linux():
    with pytest.raises(ValueError, match="watchdog must be positive"):
        DataLoader(TensorDataset(torch.arange(3)), watchdog=0.0)
    with pytest.raises(TypeError, match="stats must be"):
        DataLoader(TensorDataset(torch.arange(3)), stats=1)
