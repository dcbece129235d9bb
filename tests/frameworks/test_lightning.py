"""Lightning: it builds our class anew where it puts its own sampler in, and keeps it elsewhere."""

import functools
import itertools
import json

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import data as trainer_data
from torch import nn

import ringloader
from frameworks import kept_options, launch, lightning_module, loader_ways, training
from parity import option_cases


def trainer(**options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    return lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet, **options)


def loaders(way, persistent):
    options = {"num_workers": 2, "persistent_workers": persistent}
    train = way.DataLoader(training.Points(), batch_size=5, shuffle=True, **options)
    return train, way.DataLoader(training.Points(10), batch_size=4, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_fit_and_validate(compare, persistent):
    def program(way):
        train, validation = loaders(way, persistent)
        model = lightning_module.Classifier()
        ours = trainer()
        ours.fit(model, train, validation)
        validated = ours.validate(model, validation, verbose=False)
        assert train._iterator is None, "Lightning has not shut the workers down"
        return [model.losses, validated, training.weights(model)]

    compare(program)


def test_loaders_from_a_data_module(compare):
    """While its hooks run, Lightning wraps the constructors of all loader classes."""

    def program(way):
        class Module(lightning.LightningDataModule):
            def train_dataloader(self):
                return loaders(way, False)[0]

            def val_dataloader(self):
                return [loaders(way, True)[1], loaders(way, False)[1]]

        model = lightning_module.Classifier()
        trainer(use_distributed_sampler=True).fit(model, datamodule=Module())
        return [model.losses, training.weights(model)]

    compare(program)


def test_two_loaders_at_once(compare):
    """A CombinedLoader iterates several and shuts each down."""

    def program(way):
        model = lightning_module.Pairs()
        first, second = loaders(way, True)
        trainer().fit(model, {"first": first, "second": second})
        return [model.losses, training.weights(model)]

    ours = compare(program)
    assert len(ours.made) >= 2


def test_a_failing_step_leaves_no_worker(compare):
    """Lightning shuts the loaders down on an exception; the fixture looks for processes."""

    class Fails(lightning_module.Classifier):
        def training_step(self, batch, batch_index):
            if len(self.losses) == 3:
                raise RuntimeError("a step failed")
            return super().training_step(batch, batch_index)

    def program(way):
        train, _ = loaders(way, True)
        model = Fails()
        with pytest.raises(RuntimeError, match="a step failed"):
            trainer().fit(model, train)
        assert train._iterator is None
        return model.losses

    compare(program)


def test_overfitting_rebuilds_the_loader_with_another_sampler(compare):
    def program(way):
        train, _ = loaders(way, False)
        model = lightning_module.Classifier()
        trainer(overfit_batches=2).fit(model, train)
        return [model.losses, training.weights(model)]

    compare(program)


@pytest.mark.parametrize("options", [{"limit_train_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}])
def test_epochs_that_are_left_early_or_have_loaders_of_their_own(compare, options):
    def program(way):
        class Module(lightning.LightningDataModule):
            def train_dataloader(self):
                return loaders(way, True)[0]

        model = lightning_module.Classifier()
        trainer(**options).fit(model, datamodule=Module())
        return [model.losses, training.weights(model)]

    compare(program)


def test_fabric(compare):
    def program(way):
        fabric = Fabric(accelerator="cpu", devices=1)
        train, _ = loaders(way, False)
        model = training.small_model()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for features, classes in fabric.setup_dataloaders(train):
            loss = nn.functional.cross_entropy(model(features), classes)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    compare(program)


@pytest.mark.parametrize("way_name", ["class"])
def test_a_rebuilt_loader_keeps_our_class_and_option(way_name):
    from lightning.fabric.utilities.data import _update_dataloader

    with loader_ways.use(way_name) as way:
        loader = way.DataLoader(training.Points(), batch_size=4, num_workers=1, max_shared_bytes=1 << 24)
        rebuilt = _update_dataloader(loader, torch.utils.data.SequentialSampler(loader.dataset))
    assert type(rebuilt) is ringloader.DataLoader
    assert rebuilt.max_shared_bytes == 1 << 24
    assert rebuilt.num_workers == 1


@pytest.mark.slow
@pytest.mark.limit(240)
def test_ddp_puts_a_distributed_sampler_in(tmp_path):
    launch.run_ranks("script_lightning.py", tmp_path)


class Named(torch.utils.data.DataLoader):
    """A loader as programs have them: one argument of its own."""

    def __init__(self, dataset, *, name="train", **kwargs):
        super().__init__(dataset, **kwargs)
        self.name = name


def loader_with(kind, options, dataset):
    arguments = {"batch_size": 4, "num_workers": 2}
    if kind == "constructed":
        return ringloader.DataLoader(dataset, **{**arguments, **options})
    if kind == "converted subclass":
        return ringloader.convert(Named(dataset, name="test", **arguments), **options)
    return ringloader.convert(torch.utils.data.DataLoader(dataset, **arguments), **options)


UPDATES = {"fabric": fabric_data._update_dataloader, "trainer": trainer_data._update_dataloader}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", ["constructed", "converted", "converted subclass"])
@pytest.mark.parametrize("options", option_cases.CASES.values(), ids=option_cases.CASES)
def test_a_loader_that_is_made_anew_keeps_every_option(update, kind, options):
    loader = loader_with(kind, options, list(range(8)))
    sampler = torch.utils.data.SequentialSampler(range(8))
    anew = UPDATES[update](loader, sampler)
    assert anew is not loader and anew.sampler is sampler
    assert isinstance(anew, ringloader.DataLoader) and type(anew) is type(loader)
    assert kept_options.of_loader(anew, options) == options
    assert getattr(anew, "name", "test") == "test"


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", ["constructed", "converted", "converted subclass"])
def test_a_loader_that_is_made_anew_skips_a_bad_sample(update, kind):
    loader = loader_with(kind, {"on_error": "skip"}, kept_options.OneIsBad())
    anew = UPDATES[update](loader, torch.utils.data.SequentialSampler(range(12)))
    assert [batch[:, 0].tolist() for batch in anew] == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("options", option_cases.CASES.values(), ids=option_cases.CASES)
def test_a_loader_that_is_made_anew_has_the_installed_options(options):
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    with ringloader.installed(**options), kept_options.of_iterators() as found:
        iter(trainer_data._update_dataloader(loader, torch.utils.data.SequentialSampler(range(8))))
    assert [{name: getattr(one, name) for name in options} for one in found] == [options]


# A run of three epochs of ten steps, which stops and goes on.
STEPS, EPOCHS = 10, 3


def numbers(cls=ringloader.StatefulDataLoader, seed=3, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return cls(training.Numbers(), batch_size=4, shuffle=True, generator=generator, **options)


def fit(folder, model, loaders, every, from_step=None, ckpt_path=None, **options):
    """Runs the trainer, which saves a checkpoint every so many steps, perhaps from one of those."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **every)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    torch.manual_seed(1 if from_step is None else 99)
    ours = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[saving], **quiet, **options)
    path = ckpt_path if from_step is None else folder / f"step={from_step}.ckpt"
    ours.fit(model, *loaders, ckpt_path=path)
    return model


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("stop", "saved"), [(5, 3), (16, 15), (18, 18)])
def test_a_run_that_was_stopped_goes_on_with_the_next_sample(tmp_path, workers, stop, saved):
    every = {"every_n_train_steps": 3}
    whole = fit(tmp_path / "whole", lightning_module.Watching(), [numbers(num_workers=workers)], every)
    assert len(whole.seen) == STEPS * EPOCHS
    stopped = lightning_module.Watching(stop_after=stop)
    with pytest.raises(lightning_module.StoppedError):
        fit(tmp_path, stopped, [numbers(num_workers=workers)], every)
    # With a generator that was seeded otherwise.
    loader = numbers(seed=50, num_workers=workers)
    resumed = fit(tmp_path, lightning_module.Watching(), [loader], every, saved)
    assert resumed.seen == whole.seen[saved:]
    assert training.weights(resumed) == training.weights(whole)
    # With another number of workers the rest of the epoch is the same. Lightning never asks for the end of an
    # epoch, so that torch's sampler draws less in it without workers than with some.
    loader = numbers(seed=50, num_workers=2 - workers)
    resumed = fit(tmp_path, lightning_module.Watching(), [loader], every, saved)
    rest = STEPS - saved % STEPS
    assert resumed.seen[:rest] == whole.seen[saved:][:rest]


def test_two_loaders_go_on(tmp_path):
    def pair(seed):
        return [{"first": numbers(seed=seed, num_workers=2), "second": numbers(seed=seed + 1)}]

    every = {"every_n_train_steps": 4}
    whole = fit(tmp_path, lightning_module.Watching(), pair(3), every)
    resumed = fit(tmp_path, lightning_module.Watching(), pair(50), every, 4)
    assert resumed.seen == whole.seen[4:]


@pytest.mark.parametrize(
    ("options", "every", "steps"),
    [
        ({"val_check_interval": 4}, {"save_on_train_epoch_end": False}, (4, 8, 14)),
        ({"limit_train_batches": 6}, {"every_n_train_steps": 4}, (4, 8, 16)),
    ],
    ids=["validation", "limit"],
)
def test_checkpoints_at_other_moments(tmp_path, options, every, steps):
    def run(seed, *from_step):
        loaders = [numbers(seed=seed), torch.utils.data.DataLoader(training.Numbers(8))]
        return fit(tmp_path, lightning_module.Watching(), loaders, every, *from_step, **options)

    whole = run(3)
    for step in steps:
        assert run(50, step).seen == whole.seen[step:]


@pytest.mark.parametrize("cls", ["ringloader", "torchdata"])
def test_without_a_generator_the_rest_of_the_epoch_is_exact(tmp_path, cls):
    """torchdata's loader has a generator of its own then, which the next epochs go on with."""
    if cls == "torchdata":
        cls = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    else:
        cls = ringloader.StatefulDataLoader
    every = {"every_n_train_steps": 4}
    loader = functools.partial(numbers, cls, None, num_workers=2)
    whole = fit(tmp_path, lightning_module.Watching(), [loader()], every)
    resumed = fit(tmp_path, lightning_module.Watching(), [loader()], every, 4)
    assert resumed.seen[:6] == whole.seen[4:STEPS]
    for epoch in (resumed.seen[6:16], resumed.seen[16:]):
        assert sorted(itertools.chain(*(batch for (batch,) in epoch))) == list(range(40))


def test_a_checkpoint_with_a_state_needs_a_loader_with_one(tmp_path):
    every = {"every_n_train_steps": 4}
    fit(tmp_path, lightning_module.Watching(), [numbers()], every)
    torchs = numbers(torch.utils.data.DataLoader)
    with pytest.raises(RuntimeError, match="has 0 stateful loaders, but found 1 states in the checkpoint"):
        fit(tmp_path, lightning_module.Watching(), [torchs], every, 4)
    # The other way round there is nothing to load.
    without = tmp_path / "torchs"
    fit(without, lightning_module.Watching(), [torchs], every)
    resumed = fit(without, lightning_module.Watching(), [numbers()], every, 4)
    assert len(resumed.seen) == STEPS * EPOCHS - 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_state_goes_on(tmp_path, workers):
    every = {"every_n_train_steps": 4}

    def loader():
        return ringloader.StatefulDataLoader(training.Counted(), batch_size=4, num_workers=workers)

    whole = fit(tmp_path, lightning_module.Watching(), [loader()], every, max_steps=STEPS)
    assert len(whole.seen) == STEPS
    resumed = fit(tmp_path, lightning_module.Watching(), [loader()], every, 4, max_steps=STEPS)
    assert resumed.seen == whole.seen[4:]


@pytest.mark.slow
@pytest.mark.limit(240)
def test_ddp_goes_on_from_the_state_of_rank_0(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.RANKS}"]
    launch.run_program([*torchrun, "frameworks/script_lightning_resuming.py", str(tmp_path)], 200)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(launch.RANKS)]
    for rank in ranks:
        assert rank["resumed"] == rank["whole"][3:]
    assert ranks[0]["whole"] != ranks[1]["whole"]


class WarmingUp(lightning_module.Watching):
    """Asks for the number of steps, as schedules do."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("saved", [4, 14])
def test_a_model_that_asks_for_the_number_of_steps_needs_the_state_before_fit(tmp_path, workers, saved):
    """Lightning then sets its loaders up before it knows of a state, and never loads that."""
    every = {"every_n_train_steps": saved}
    whole = fit(tmp_path, WarmingUp(), [numbers(num_workers=workers)], every)
    path = tmp_path / f"step={saved}.ckpt"
    resumed = fit(tmp_path / "lost", WarmingUp(), [numbers(num_workers=workers)], every, ckpt_path=path)
    assert resumed.seen != whole.seen[saved:]
    loader = numbers(seed=50, num_workers=workers)
    loops = torch.load(path, weights_only=True)["loops"]
    loader.load_state_dict(loops["fit_loop"]["state_dict"]["combined_loader"][0])
    resumed = fit(tmp_path / "again", WarmingUp(), [loader], every, ckpt_path=path)
    assert resumed.seen == whole.seen[saved:]
    assert training.weights(resumed) == training.weights(whole)


class From(torch.utils.data.Sampler):
    """Begins at a place that its constructor gets."""

    def __init__(self, start=0):
        self.start = start

    def __iter__(self):
        start, self.start = self.start, 0
        return iter(range(start, 40))

    def __len__(self):
        return 40


class Remembering(From):
    """Has the place in a state, which a program may restore itself."""

    def __iter__(self):
        for place in range(self.start, 40):
            self.start = (place + 1) % 40
            yield place

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


def test_a_sampler_that_begins_at_its_own_place(tmp_path):
    def run(folder, sampler, **options):
        loader = ringloader.StatefulDataLoader(training.Numbers(), batch_size=4, sampler=sampler)
        every = {"every_n_train_steps": 4}
        return fit(tmp_path / folder, lightning_module.Watching(), [loader], every, **options).seen

    whole = run("from", From())
    checkpoint = tmp_path / "from/step=4.ckpt"
    assert run("1", From(), ckpt_path=checkpoint) == whole[4:]
    with pytest.raises(ValueError, match="are not those that the From gives now"):
        run("2", From(16), ckpt_path=checkpoint)
    # A sampler with a state is brought to where the loader's state has it, wherever it was.
    assert run("remembering", Remembering()) == whole
    checkpoint = tmp_path / "remembering/step=4.ckpt"
    for start in (0, 16):
        assert run(f"from {start}", Remembering(start), ckpt_path=checkpoint) == whole[4:]
