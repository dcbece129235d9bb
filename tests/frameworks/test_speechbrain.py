"""speechbrain: it replaces two methods of torch's iterators, for every loader of the process."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ringloader
from frameworks import loader_ways, training
from parity import harness

_TORCHS = {name: vars(_BaseDataLoaderIter)[name] for name in ("__init__", "_reset")}
try:
    importlib.import_module("torchaudio")
except (ImportError, RuntimeError):
    # Its newest binary refuses the CUDA of this torch. Nothing here reads audio.
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sb = pytest.importorskip("speechbrain.dataio.dataloader")
core = importlib.import_module("speechbrain.core")
checkpoints = importlib.import_module("speechbrain.utils.checkpoints")
if getattr(sys.modules["torchaudio"], "__file__", None) is None:
    del sys.modules["torchaudio"]
_THEIRS = {name: vars(_BaseDataLoaderIter)[name] for name in ("__init__", "_reset", "__old_init__")}


def _put(methods):
    for name, method in methods.items():
        setattr(_BaseDataLoaderIter, name, method)


# Only for the tests here.
_put(_TORCHS)


@pytest.fixture(autouse=True)
def _replaced():
    _put(_THEIRS)
    yield
    _put(_TORCHS)


def test_the_import_replaces_what_we_go_along_with():
    assert all(_THEIRS[name] is not _TORCHS[name] for name in _TORCHS)


class Training(core.Brain):
    losses: list[float]

    def compute_forward(self, batch, stage):  # noqa: ARG002
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):  # noqa: ARG002
        return torch.nn.functional.cross_entropy(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):  # noqa: ARG002
        self.losses.append(loss.item())

    def on_stage_end(self, stage, stage_loss, epoch=None):  # noqa: ARG002
        self.losses.append(float(stage_loss))


def test_a_brain_fits(compare):
    def program(way):
        brain = Training(
            {"model": training.small_model()},
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            {},
            {"noprogressbar": True},
        )
        brain.losses = []
        train = way.loader(
            sb.SaveableDataLoader,
            training.Points(),
            batch_size=4,
            num_workers=2,
            sampler=sb.ReproducibleRandomSampler(training.Points(), seed=3),
        )
        valid = way.loader(
            sb.SaveableDataLoader, training.Points(), batch_size=6, num_workers=1, persistent_workers=True
        )
        brain.fit(range(1, 3), train, valid)
        return [brain.losses, training.weights(brain.modules)]

    ours = compare(program)
    assert len(ours.made) == 3, "the persistent workers have one iterator"


def test_other_loaders_of_the_process(compare):
    def program(way):
        loader = way.DataLoader(training.Points(), batch_size=5, shuffle=True, num_workers=2)
        return [[batch[1].tolist() for batch in loader] for _ in range(2)]

    compare(program)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_a_checkpoint(way_name, workers, tmp_path):
    def loader(way):
        made = way.loader(
            sb.SaveableDataLoader,
            training.Numbers(),
            batch_size=4,
            num_workers=workers,
            sampler=sb.ReproducibleRandomSampler(training.Numbers(), seed=5),
        )
        return made, checkpoints.Checkpointer(tmp_path / way.name, {"loader": made})

    def program(way):
        found = []
        first, checkpointer = loader(way)
        for number, (_, samples) in enumerate(first):
            found.append(samples.tolist())
            if number == 3:
                checkpointer.save_checkpoint(end_of_epoch=False)
                break
        second, checkpointer = loader(way)
        checkpointer.recover_if_possible()
        for _ in range(2):
            found.append([samples.tolist() for _, samples in second])
        return found

    with loader_ways.use("torch") as torchs:
        expected = program(torchs)
    assert [len(batches) for batches in expected[4:]] == [6, 10]
    with loader_ways.use(way_name) as ours:
        assert program(ours) == expected
    path = harness.expected_path if workers else "single-process"
    assert ours.paths == [path, "torch", path]


def test_a_part_that_another_module_replaces_is_torchs(monkeypatch):
    """The replacement around speechbrain's, which calls it, need not do so next time."""
    theirs = _BaseDataLoaderIter.__init__
    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", lambda self, loader: theirs(self, loader))
    loader = ringloader.DataLoader(training.Numbers(), num_workers=1)
    assert len(list(loader)) == 40
    assert ringloader.report(loader).reason == f"_BaseDataLoaderIter.__init__ was replaced by {__name__}"
