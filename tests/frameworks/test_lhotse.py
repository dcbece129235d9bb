"""lhotse: a sampler yields cuts and not indices, in the main process or in the workers; batches hold cuts."""

import random

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Fbank, MonoCut, Recording, SupervisionSegment
from lhotse.dataset import (
    DynamicBucketingSampler,
    DynamicCutSampler,
    IterableDatasetWrapper,
    K2SpeechRecognitionDataset,
    OnTheFlyFeatures,
    PerturbSpeed,
    SimpleCutSampler,
    make_worker_init_fn,
)

from parity.describe import describe

RATE = 8000


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """A file of cuts, as recipes write it: some seconds of noise."""
    folder = tmp_path_factory.mktemp("audio")
    noise = np.random.default_rng(0)

    def cut(number):
        file = folder / f"{number}.wav"
        length = RATE // 4 + RATE // 20 * (number % 6)
        soundfile.write(file, noise.normal(scale=0.1, size=length), RATE)
        recording = Recording.from_file(file)
        text = SupervisionSegment(
            f"text-{number}", recording.id, 0, recording.duration, text=f"word {number}"
        )
        return MonoCut(f"cut-{number}", 0, recording.duration, 0, recording=recording, supervisions=[text])

    CutSet.from_cuts(map(cut, range(24))).to_file(folder / "cuts.jsonl.gz")
    return folder / "cuts.jsonl.gz"


class Speech(torch.utils.data.Dataset):
    """A dataset that gets a whole batch of cuts."""

    def __getitem__(self, cuts):
        audio = [torch.from_numpy(cut.load_audio()[0]) for cut in cuts]
        return {"audio": torch.nn.utils.rnn.pad_sequence(audio, batch_first=True), "cuts": cuts}


def content(batch):
    return [(key, list(value) if key == "cuts" else describe(value)) for key, value in batch.items()]


def epochs(loader, sampler, count=2):
    found = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        found.append([content(batch) for batch in loader])
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_cuts_go_to_the_workers(compare, manifest, persistent):
    """The sampler, which counts what it hands out, runs in the main process."""

    def program(way):
        sampler = DynamicBucketingSampler(
            CutSet.from_file(manifest), max_duration=1.5, num_buckets=3, shuffle=True, buffer_size=12
        )
        loader = way.DataLoader(
            Speech(), sampler=sampler, batch_size=None, num_workers=2, persistent_workers=persistent
        )
        return [epochs(loader, sampler), sampler.diagnostics.get_report()]

    compare(program)


def test_the_samplers_state_after_some_batches(compare, manifest):
    def make(way):
        sampler = SimpleCutSampler(CutSet.from_file(manifest).to_eager(), max_cuts=4, shuffle=True)
        return sampler, way.DataLoader(Speech(), sampler=sampler, batch_size=None, num_workers=2)

    def program(way):
        sampler, loader = make(way)
        iterator = iter(loader)
        seen = [content(next(iterator)) for _ in range(2)]
        state = sampler.state_dict()
        again, loader = make(way)
        again.load_state_dict(state)
        return [seen, [content(batch) for batch in loader]]

    compare(program)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_sampler_runs_in_the_workers(compare, manifest, persistent):
    """Each has a seed of its own, by `worker_init_fn`."""

    def program(way):
        cuts = CutSet.from_file(manifest).repeat(2)
        sampler = DynamicCutSampler(cuts, max_duration=1.5, shuffle=True, seed="randomized")
        loader = way.DataLoader(
            IterableDatasetWrapper(Speech(), sampler, auto_increment_epoch=True),
            batch_size=None,
            num_workers=2,
            persistent_workers=persistent,
            worker_init_fn=make_worker_init_fn(rank=0, world_size=1, seed=5),
        )
        return [[content(batch) for batch in loader] for _ in range(2)]

    compare(program)


def test_shards_of_audio(compare, manifest, tmp_path):
    CutSet.from_file(manifest).to_shar(tmp_path, fields={"recording": "wav"}, shard_size=6)

    def program(way):
        cuts = CutSet.from_shar(in_dir=tmp_path, split_for_dataloading=True, shuffle_shards=True, seed=3)
        dataset = IterableDatasetWrapper(Speech(), DynamicCutSampler(cuts, max_cuts=3))
        init = make_worker_init_fn(rank=0, world_size=1, seed=5)
        loader = way.DataLoader(dataset, batch_size=None, num_workers=2, worker_init_fn=init)
        return [
            [(describe(batch["audio"]), [cut.id for cut in batch["cuts"]]) for batch in loader]
            for _ in range(2)
        ]

    compare(program)


def test_features_made_in_the_workers(compare, manifest):
    def program(way):
        dataset = K2SpeechRecognitionDataset(
            input_strategy=OnTheFlyFeatures(Fbank()),
            cut_transforms=[PerturbSpeed([0.9, 1.1], p=0.8, randgen=random.Random(4))],
        )
        sampler = SimpleCutSampler(CutSet.from_file(manifest), max_duration=2)
        loader = way.DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=2)
        return epochs(loader, sampler)

    compare(program)
