"""The memory of batches: their contents, their sizes, and their holders."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import torch

from chaos.case import Program, case, must
from chaos.data import Numbers, Returns, check, check_all, identity
from faults.proc import wait_until


def resident_mib() -> float:
    """Of this process, shared memory too."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@case()
def all_batches_are_held(program: Program) -> None:
    """400 batches are held until the end: each keeps its bytes."""
    held = list(program.loader(Numbers(400, 20_000), num_workers=2))
    for number, batch in enumerate(held):
        check(batch, number)


@case()
def batches_outlive_the_loader(program: Program) -> None:
    """Views of batches keep their bytes after loader, iterator and workers are gone."""
    views = [batch.numpy()[:, 5:] for batch in program.loader(Numbers(60, 20_000), num_workers=2)]
    gc.collect()
    junk = list(program.loader(Numbers(60, 20_000), num_workers=2))
    must(all((view == number).all() for number, view in enumerate(views)), "a view has changed")
    del junk


@case()
def what_the_caller_writes_stays_his(program: Program) -> None:
    """The caller fills each batch: no later batch shows it, and what he holds stays as he left it."""
    held = []
    for number, batch in enumerate(program.loader(Numbers(300, 20_000), num_workers=2)):
        check(batch, number)
        batch.fill_(-number - 1)
        held = [*held[-19:], (number, batch)]
        for old, kept in held:
            must(bool((kept == -old - 1).all()), f"what was written to batch {old} has changed")


class AnySize(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((random.Random(index).choice([0, 1, 7, 1000, 300_000, 2_000_000]),), index)


@case()
def changing_sizes(program: Program) -> None:
    """Batches of no element up to 16 MB in turn, some of them held: every byte is right."""
    held: list[tuple[int, torch.Tensor]] = []
    for number, batch in enumerate(program.loader(AnySize(200), batch_size=None, num_workers=2)):
        must(len(batch) == len(AnySize(1)[number]), f"batch {number} has another size")
        held = [*held[-4:], (number, batch)]
        for old, kept in held:
            must(bool((kept == old).all()), f"batch {old} has changed")


@case()
def one_huge_batch(program: Program) -> None:
    """A batch of 512 MiB comes, every byte right."""
    with program.within(30):
        check_all(program.loader(Numbers(2, 1 << 26), num_workers=1), 2)


@case(limit=60, fast=True)
def memory_comes_back_after_a_spike(program: Program) -> None:
    """200 MiB of batches are held and dropped: within 5 s the process has what it had, but for 60 MiB."""
    check_all(program.loader(Numbers(10), num_workers=2), 10)
    before = resident_mib()
    iterator = iter(program.loader(Numbers(10**6, 131_072), num_workers=2))
    held = [next(iterator) for _ in range(200)]
    # Memory that nobody has looked at is not mapped.
    for number, batch in enumerate(held):
        check(batch, number)
    del batch
    must(resident_mib() > before + 150, "the batches are not in memory")
    held.clear()
    del iterator
    gc.collect()
    must(wait_until(lambda: resident_mib() < before + 60, 5), f"{resident_mib() - before:.0f} MiB more")
    program.figure = f"{resident_mib() - before:+.0f} MiB"


def _odd() -> Any:
    return {
        "none": None,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]),
        "strided": torch.arange(12).reshape(3, 4).t()[1:],
        "expanded": torch.tensor([3]).expand(4),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "text": "ä\0\U0001f600",
        "bytes": bytes(range(256)),
        "deep": [[[({"a": (1, 2.5, {3})},)]]],
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        equal = torch.equal(one.to_dense(), other.to_dense()) if one.is_sparse else torch.equal(one, other)
        return (
            equal and one.dtype == other.dtype and one.stride() == other.stride()
            if not one.is_sparse
            else equal
        )
    return bool(type(one) is type(other) and one == other)


@case(fast=True)
def odd_samples(program: Program) -> None:
    """Empty, scalar, strided and sparse tensors, odd types, text and nested objects arrive as they are."""
    (found,) = program.loader(Returns(1, 0, _odd), batch_size=None, num_workers=1, collate_fn=identity)
    for name, value in _odd().items():
        must(_same(value, found[name]), f"{name!r} arrived as {found[name]!r}")


class Twice(Numbers):
    """The sample has one tensor two times, and a view of it."""

    def __getitem__(self, index: int) -> Any:
        whole = torch.full((1000,), index)
        return [whole, whole[10:20], bytes([index % 256]) * 10_000]


@case()
def views_of_one_tensor(program: Program) -> None:
    """A sample with a tensor and a view of it: both have their elements."""
    loader = program.loader(Twice(100), batch_size=None, num_workers=2)
    for number, (whole, view, data) in enumerate(loader):
        right = bool((whole == number).all() and (view == number).all()) and data == bytes([number]) * 10_000
        must(right, f"batch {number} is wrong")


class Crowd(Numbers):
    def __getitem__(self, index: int) -> Any:
        return [torch.tensor([index, number]) for number in range(10_000)]


@case(limit=60)
def ten_thousand_tensors(program: Program) -> None:
    """Batches of 10,000 tensors each: they come."""
    loader = program.loader(Crowd(4), batch_size=None, num_workers=1)
    for number, batch in enumerate(loader):
        must(all(part.tolist() == [number, at] for at, part in enumerate(batch)), f"batch {number} is wrong")


class Text(Numbers):
    def __getitem__(self, index: int) -> str:
        return chr(65 + index) * 100_000_000


@case(limit=60)
def one_huge_text(program: Program) -> None:
    """A sample that is a text of 100 MB comes."""
    for number, text in enumerate(program.loader(Text(3), batch_size=None, num_workers=1)):
        must(len(text) == 10**8 and text[0] == text[-1] == chr(65 + number), "the text is wrong")


class Refills(Numbers):
    """Each sample is the same tensor, with other elements."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.buffer = torch.zeros(20_000, dtype=torch.int64)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.buffer.fill_(index)


@case()
def dataset_that_refills_a_buffer(program: Program) -> None:
    """Samples of a buffer that is filled again, stacked: each batch has its own elements."""
    check_all(program.loader(Refills(200), num_workers=2), 200)


@case()
def held_in_a_forked_child(program: Program) -> None:
    """A forked child holds batches while the parent drops its own: they keep their bytes."""
    iterator = iter(program.loader(Numbers(400, 20_000), num_workers=2))
    held = [next(iterator) for _ in range(10)]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writing)
            os.read(reading, 1)
            code = 0 if all(bool((batch == number).all()) for number, batch in enumerate(held)) else 2
        finally:
            os._exit(code)
    held.clear()
    for number in range(10, 400):
        check(next(iterator), number)
    os.close(writing)
    must(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child's batches have changed")


def _receive(queue: Any, answers: Any) -> None:
    for number in range(20):
        answers.put(bool((queue.get() == number).all()))


@case()
def sent_on_to_another_process(program: Program) -> None:
    """20 batches are sent on through a queue of torch: they arrive as they are."""
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_receive, args=(queue, answers))
    process.start()
    for batch in program.loader(Numbers(20), num_workers=2):
        queue.put(batch)
        must(answers.get(timeout=10), "a batch arrived changed")
    process.join()
