"""accelerate: `prepare` builds torch's class anew from any loader's arguments, so `install()` reaches it."""

import json

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

import ringloader
from frameworks import accelerate_resuming, kept_options, launch, loader_ways, training
from parity import harness, option_cases

pytestmark = pytest.mark.usefixtures("forget_accelerates_state")


def loader_of(way, **options):
    return way.DataLoader(training.Points(), batch_size=5, shuffle=True, num_workers=2, **options)


def train(accelerator, loader, epochs=2, skip=0):
    model = training.small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for epoch in range(epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = skip_first_batches(loader, skip) if skip else loader
        losses += [training.step(model, optimizer, batch) for batch in batches]
    return [losses, training.weights(model)]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_prepared_loader(compare, seedable, persistent):
    def program(way):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
        )
        loader = accelerator.prepare(loader_of(way, persistent_workers=persistent))
        assert isinstance(loader, DataLoaderShard)
        return train(accelerator, loader)

    compare(program)


@loader_ways.INSTALL_ONLY
def test_skip_first_batches(compare):
    def program(way):
        accelerator = Accelerator(cpu=True)
        result = train(accelerator, accelerator.prepare(loader_of(way)), skip=2)
        assert len(result[0]) == 2 * (5 - 2)
        return result

    compare(program)


def test_skip_first_batches_of_a_loader_that_was_not_prepared():
    """accelerate builds torch's own class then too."""
    loader = ringloader.DataLoader(training.Points(), batch_size=5, num_workers=1)
    assert type(skip_first_batches(loader, 2)) is torch.utils.data.DataLoader


@loader_ways.INSTALL_ONLY
def test_a_stream_that_one_process_reads_for_all(compare):
    def program(way):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(way.DataLoader(training.Stream(), batch_size=5, num_workers=2))
        assert isinstance(loader, DataLoaderDispatcher)
        return train(accelerator, loader)

    compare(program)


def test_torchdatas_loader_is_left_alone_under_install():
    def program(way):
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return train(accelerator, accelerator.prepare(loader_of(way)))

    with loader_ways.use("torch") as way:
        expected = program(way)
    with loader_ways.use("install") as way:
        assert program(way) == expected
    assert way.made == []


def test_prepare_does_not_keep_our_class():
    with loader_ways.use("class") as way:
        prepared = Accelerator(cpu=True).prepare(loader_of(way))
        assert type(prepared) is DataLoaderShard
        assert not isinstance(prepared, ringloader.DataLoader)
        assert len(list(prepared)) == 5
        assert way.made == [], "the pages say that only install() reaches a prepared loader"


@loader_ways.CLASS_ONLY
def test_a_loader_marked_as_prepared_is_kept(compare):
    def program(way):
        accelerator = Accelerator(cpu=True)
        loader = loader_of(way)
        loader._is_accelerate_prepared = True
        assert accelerator.prepare(loader) is loader
        return train(accelerator, loader)

    compare(program)


@loader_ways.CLASS_ONLY
@pytest.mark.parametrize("persistent", [False, True])
def test_the_loader_inside_a_prepared_one_is_converted(compare, persistent):
    def program(way):
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(
            torch.utils.data.DataLoader(
                training.Points(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=persistent
            )
        )
        if way.name == "class":
            ringloader.convert(prepared.base_dataloader)
        return train(accelerator, prepared)

    compare(program)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_two_ranks(tmp_path):
    launch.run_ranks("script_accelerate.py", tmp_path, names=("install",))


@pytest.mark.parametrize("options", option_cases.CASES.values(), ids=option_cases.CASES)
def test_loaders_that_are_made_anew_have_the_installed_options(options):
    with ringloader.installed(**options), kept_options.of_iterators() as found:
        loader = torch.utils.data.DataLoader(training.Points(), batch_size=5, num_workers=2)
        prepared = Accelerator(cpu=True).prepare(loader)
        skipping = skip_first_batches(prepared, 1)
        assert isinstance(prepared, DataLoaderShard) and skipping is not prepared
        for one in (prepared, skipping):
            iterator = iter(one)
            next(iterator)
            iterator.close()
    assert [{name: getattr(one, name) for name in options} for one in found] == [options] * 2


def test_loaders_that_are_made_anew_skip_a_bad_sample():
    with ringloader.installed(on_error="skip"):
        loader = torch.utils.data.DataLoader(kept_options.OneIsBad(), batch_size=4, num_workers=2)
        prepared = Accelerator(cpu=True).prepare(loader)
        found = [
            [batch[:, 0].tolist() for batch in one] for one in (prepared, skip_first_batches(prepared, 1))
        ]
    assert found == [[[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]], [[4, 6, 7], [8, 9, 10, 11]]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", accelerate_resuming.WAYS.values(), ids=accelerate_resuming.WAYS)
# The last batch but one of an epoch, and the end of an epoch.
@pytest.mark.parametrize(("epoch", "taken"), [(0, 3), (1, 3), (1, 9), (1, 10)])
def test_a_run_that_was_stopped_goes_on_with_the_next_sample(tmp_path, workers, options, epoch, taken):
    with ringloader.installed(stateful=True):
        whole = accelerate_resuming.whole(workers, options)
        resumed = accelerate_resuming.resumed(workers, options, epoch, taken, tmp_path)
    assert resumed == [batches for batches in (whole[epoch][taken:], *whole[epoch + 1 :]) if batches]


def test_torchdatas_class_goes_on_so_in_its_first_epoch(tmp_path):
    """Later ones, and those of other samplers, it takes from another permutation."""
    options = accelerate_resuming.WAYS["seedable"]
    with ringloader.installed(stateful=True):
        ours = accelerate_resuming.resumed(0, options, 0, 3, tmp_path / "ours")
    theirs = accelerate_resuming.resumed(0, options, 0, 3, tmp_path / "theirs")
    assert theirs == ours


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatched", [False, True])
def test_a_stream_with_a_state_goes_on(tmp_path, workers, dispatched):
    options = {"dispatch_batches": dispatched}
    with ringloader.installed(stateful=True):
        whole = accelerate_resuming.whole(workers, options, training.Counted())
        resumed = accelerate_resuming.resumed(workers, options, 0, 3, tmp_path, training.Counted())
    assert resumed[0] == whole[0][3:]


def test_on_torchs_path_an_epoch_goes_on_too(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGLOADER", "off")
    with ringloader.installed(stateful=True):
        whole = accelerate_resuming.whole(0, {})
        resumed = accelerate_resuming.resumed(0, {}, 0, 3, tmp_path)
    assert resumed[0] == whole[0][3:]


def test_a_prepared_loader_over_torchdatas_name_is_ours(forget_accelerates_state):  # noqa: ARG001
    with ringloader.installed(stateful=True):
        _, prepared = accelerate_resuming.prepared(2, {})
        assert type(prepared.base_dataloader) is ringloader.StatefulDataLoader
        assert len(list(prepared)) == 10
        assert ringloader.report(prepared.base_dataloader).path == harness.expected_path
    _, prepared = accelerate_resuming.prepared(2, {})
    assert type(prepared.base_dataloader).__module__.startswith("torchdata.")


@pytest.mark.slow
@pytest.mark.limit(240)
def test_two_ranks_go_on(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.RANKS}"]
    launch.run_program([*torchrun, "frameworks/accelerate_resuming.py", str(tmp_path)], 200)
    for rank in range(launch.RANKS):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(results) == set(accelerate_resuming.WAYS)
        for way, (expected, resumed) in results.items():
            assert resumed == expected, way
