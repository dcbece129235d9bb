"""Loaders of other packages whose workers are threads, over torch's own samplers, fetcher and collation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from . import torchs

# dataloader-rs lists all indices of an epoch before its first batch.
LISTED_INDICES = 1 << 22


class _IndexBatches(Sampler[Any]):
    """An epoch's indices, batch by batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return torchs.index_batches(self.loader)[0]


class _Nodes:
    """torchdata.nodes, put together as its guide to migration does, without the steps that are not needed.

    ``ParallelMapper`` has twice as many batches on their way as it has workers: torch's prefetch_factor 2.
    """

    def __init__(self, dataset: Dataset[Any], arguments: dict[str, Any]) -> None:
        from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

        if arguments["prefetch_factor"] != 2:
            raise ValueError(
                f"prefetch_factor is {arguments['prefetch_factor']}; torchdata.nodes has 2 batches on their "
                "way for each worker, whatever it is told"
            )
        torchs_own = torchs.in_process(dataset, arguments)
        node = ParallelMapper(
            SamplerWrapper(_IndexBatches(torchs_own)),
            map_fn=torchs.fetch_of(torchs_own),
            num_workers=arguments["num_workers"],
            in_order=arguments.get("in_order", True),
            method="thread",
        )
        self.loader = Loader(node)
        self.length = len(torchs_own)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def torchdata_nodes(dataset: Dataset[Any], **arguments: Any) -> Any:
    """``torchdata.nodes`` with worker threads."""
    return _Nodes(dataset, arguments)


class _Pipeline:
    """A pipeline of SPDL: torch's indices, one stage of threads that fetch and collate, a sink.

    Its sink has the batches that torch has ready beyond those that workers are at.
    """

    def __init__(self, dataset: Dataset[Any], arguments: dict[str, Any]) -> None:
        self.torchs_own = torchs.in_process(dataset, arguments)
        self.workers = arguments["num_workers"]
        self.ready = self.workers * (arguments["prefetch_factor"] - 1)
        self.output_order = "input" if arguments.get("in_order", True) else "completion"

    def __len__(self) -> int:
        return len(self.torchs_own)

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(_IndexBatches(self.torchs_own))
        fetch = torchs.fetch_of(self.torchs_own)
        builder = builder.pipe(fetch, concurrency=self.workers, output_order=self.output_order)
        pipeline = builder.add_sink(self.ready).build(num_threads=self.workers)
        pipeline.start()
        return _PipelineIterator(pipeline)


class _PipelineIterator:
    """Ends the pipeline with itself."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.batches = pipeline.get_iterator(timeout=60)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def __del__(self) -> None:
        self.pipeline.stop()


def spdl(dataset: Dataset[Any], **arguments: Any) -> Any:
    """``spdl.pipeline`` with worker threads."""
    return _Pipeline(dataset, arguments)


class _Indices:
    """An epoch's indices one by one, in torch's order."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        # Torch draws the base of the workers' seeds before it asks the sampler. This is a generator, so that
        # nothing is drawn where only iterability is looked at.
        torchs.index_batches(self.loader)
        yield from self.loader.sampler


def dataloader_rs(dataset: Dataset[Any], **arguments: Any) -> Any:
    """``dataloader_rs.PyDataloader``; an endless dataset is cut, since its indices are listed first."""
    from dataloader_rs import PyDataloader, PyDataset

    class Samples(PyDataset):
        def __len__(self) -> int:
            return min(len(dataset), LISTED_INDICES)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> Any:
            return dataset[index]

    torchs_own = torchs.in_process(dataset, arguments)
    collate = torchs_own.collate_fn
    batched = arguments["batch_size"] is not None
    workers = arguments["num_workers"]
    return PyDataloader(
        Samples(),
        batch_size=arguments["batch_size"] if batched else 1,
        sampler=_Indices(torchs_own) if arguments.get("shuffle") else None,
        num_workers=workers,
        # The loader counts what is on its way beyond one batch for each worker.
        prefetch_depth=workers * (arguments["prefetch_factor"] - 1),
        collate_fn=collate if batched else lambda samples: collate(samples[0]),
    )
