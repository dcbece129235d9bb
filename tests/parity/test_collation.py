"""torch's own collation, native in a worker: what comes out, what is raised, and which code does it."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from parity.batch_values import ALL
from parity.describe import describe
from parity.harness import Case, compare
from ringloader import DataLoader
from small_datasets import Made

FORMS = {
    "alone": lambda value, _: value,
    "in a dict": lambda value, number: {"value": value, "label": number},
    "in a tuple": lambda value, number: (value, 0.5 * number, "text"),
    "in a list": lambda value, number: [torch.tensor([number]), [value]],
    "after a number": lambda value, number: number if number == 0 else value,
    "before a tensor": lambda value, number: value if number == 0 else torch.tensor(number),
}
# The other containers take the code of these.
SOME_FORMS = [
    *("alone", "before a tensor"),
    *(
        pytest.param(form, marks=pytest.mark.slow)
        for form in ("in a dict", "in a tuple", "in a list", "after a number")
    ),
]
BATCH = 3
# For torch they end at the interpreter's limit, one call sooner than from Python.
KINDS = [name for name in ALL if "self-referencing" not in name]


class Kinds(Dataset):
    """Samples of each kind, ``many`` after each other."""

    def __init__(self, form, many=BATCH):
        self.form = FORMS[form]
        self.many = many

    def __len__(self):
        return self.many * len(KINDS)

    def __getitem__(self, index):
        return self.form(ALL[KINDS[index // self.many]](), index % self.many)


@pytest.mark.limit(300)
@pytest.mark.parametrize("form", SOME_FORMS)
def test_every_kind_is_collated_as_torch_does(loader_class, form):
    def build():
        return {"dataset": Kinds(form), "batch_size": BATCH, "num_workers": 2}

    expected, _ = compare(loader_class, Case(build, max_steps=2000))
    assert len(expected.steps) > len(KINDS)
    assert len(expected.delivered()) > 20


@pytest.mark.limit(300)
@pytest.mark.parametrize("form", ["alone", pytest.param("in a dict", marks=pytest.mark.slow)])
def test_every_kind_is_converted_as_torch_does(loader_class, form):
    """Sample by sample: what comes before or after one has no part in it."""

    def build():
        return {"dataset": Kinds(form, many=1), "batch_size": None, "num_workers": 2}

    expected, _ = compare(loader_class, Case(build, max_steps=2000))
    assert len(expected.delivered()) > 2 * len(KINDS) // 3


class OwnDict(dict):
    pass


Point = collections.namedtuple("Point", "x y")
IMAGE = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)

BATCHES = {
    "images": [IMAGE, IMAGE + 1, IMAGE.clone()],
    "one image": [IMAGE],
    "scalars": [torch.tensor(1.5), torch.tensor(2.5)],
    "bytes of an odd number": [torch.arange(5, dtype=torch.int8), torch.arange(5, dtype=torch.int8) + 5],
    "off a multiple of the element": [torch.arange(9, dtype=torch.int16)[n : n + 4] for n in (1, 2, 4)],
    "rows of one": list(torch.arange(12.0).reshape(4, 3)),
    "columns of one": list(torch.arange(12.0).reshape(4, 3).t()),
    "channels last": [IMAGE[None].to(memory_format=torch.channels_last)[0]] * 2,
    "one of them strided": [torch.arange(3), torch.arange(6)[::2]],
    "strides of size 1": [torch.arange(4.0).as_strided((1, 4, 1), (n, 1, n + 3)) for n in (7, 1)],
    "expanded": [torch.tensor(3).expand(4), torch.tensor(4).expand(4)],
    "over 1 MiB": [torch.arange(1 << 17, dtype=torch.float64)] * 2,
    "no elements": [torch.empty(0, 3), torch.empty(0, 3)],
    "the same twice": [IMAGE, IMAGE],
    "shapes differ": [torch.ones(2), torch.ones(3)],
    "sizes are equal, shapes are not": [torch.ones(2, 3), torch.ones(3, 2)],
    "types differ": [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    "types differ the other way": [torch.ones(2, dtype=torch.int64), torch.ones(2)],
    "negated second": [torch.ones(1), torch.tensor([1 + 2j]).conj().imag],
    "conjugated second": [torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()],
    "second requires grad": [torch.ones(2), torch.ones(2, requires_grad=True)],
    "second on meta": [torch.ones(2), torch.ones(2, device="meta")],
    "second a parameter": [torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)],
    "second sparse": [torch.eye(2), torch.eye(2).to_sparse()],
    "second not a tensor": [torch.ones(2), [1.0, 2.0]],
    "second a number": [torch.tensor(1), 2],
    "ints": [0, -1, 2**63 - 1, -(2**63)],
    "an int too large": [1, 2**63],
    "first int too large": [2**64, 1],
    "int, then float": [1, 2.5],
    "float, then int": [2.5, 1],
    "int, then bool": [1, True],
    "bool, then int": [True, 5],
    "bools": [True, False, True],
    "floats": [0.1, -0.0, float("nan"), float("inf")],
    "float, then text": [1.0, "a"],
    "int, then tensor": [1, torch.tensor(2)],
    "int, then None": [1, None],
    "float, then numpy": [1.0, np.float64(2.0)],
    "numpy, then float": [np.float64(2.0), 1.0],
    "numpy scalars": [np.int32(1), np.int32(2)],
    "arrays": [np.arange(4.0), np.arange(4.0) + 1],
    "arrays of a frame": list(np.arange(12, dtype=np.int16).reshape(3, 4)),
    "arrays, not writable": [np.frombuffer(b"12345678", dtype=np.uint8)] * 2,
    **{f"arrays of {letter}": [np.arange(3).astype(letter)] * 2 for letter in np.typecodes["All"]},
    "arrays, backwards": [np.arange(4)[::-1]] * 2,
    "arrays of one channel, backwards": [np.zeros((2, 2, 1), np.uint8)[:, :, ::-1]] * 2,
    "arrays of one row, between elements": [np.ndarray((1, 2), np.int32, np.zeros(8), strides=(6, 4))] * 2,
    "shapes of arrays differ": [np.arange(4.0), np.arange(5.0)],
    "text": ["a", "b"],
    "text, then number": ["a", 1],
    "bytes": [b"a", b"b"],
    "text in all forms": [{"t": "a", "u": ("b", ["c"])}, {"t": "d", "u": ("e", ["f"])}],
    "dicts": [{"b": 1, "a": IMAGE}, {"b": 2, "a": IMAGE}],
    "dicts in another order": [{"a": 1, "b": 2.0}, {"b": 3.0, "a": 4}],
    "dict with more": [{"a": 1}, {"a": 2, "b": 3}],
    "dict with less": [{"a": 1, "b": 3}, {"a": 2}],
    "dict with other keys": [{1: 2, (1, 2): 3}, {1: 4, (1, 2): 5}],
    "dict, then its subclass": [{"a": 1}, OwnDict(a=2)],
    "subclass of dict": [OwnDict(a=1), OwnDict(a=2)],
    "empty dicts": [{}, {}],
    "empty dict, then not": [{}, {"a": 1}],
    "tuples": [(IMAGE, 1), (IMAGE, 2)],
    "tuple, then longer": [(1, 2), (1, 2, 3)],
    "tuple, then shorter": [(1, 2), (1,)],
    "tuple, then list": [(1, 2), [3, 4]],
    "list, then tuple": [[1, 2], (3, 4)],
    "empty tuples": [(), ()],
    "empty tuple, then not": [(), (1,)],
    "empty lists": [[], []],
    "lists": [[1, 2.5], [3, 4.5]],
    "named tuples": [Point(1, IMAGE), Point(2, IMAGE)],
    "tuple, then named tuple": [(1, 2), Point(3, 4)],
    "nested": [{"a": [(1, {"b": torch.ones(2)})]}, {"a": [(2, {"b": torch.zeros(2)})]}],
    "an error at the end": [{"a": IMAGE, "b": torch.ones(2)}, {"a": IMAGE, "b": torch.ones(3)}],
    "unknown at the end": [{"a": IMAGE, "b": object}, {"a": IMAGE, "b": object}],
    "None": [None, None],
    "one of nothing": [[]],
}


class Batches(Dataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        return list(list(BATCHES.values())[indices[0]])


def conjugate(index):
    return torch.full((3,), complex(index, 1)).conj()


def negative(index):
    return torch.full((3,), complex(1, index)).conj().imag


VIEWS = {
    "conjugate": conjugate,
    "negative": negative,
    "both": lambda index: torch._neg_view(conjugate(index)),
    "the first": lambda index: conjugate(index) if index % 4 == 0 else torch.full((3,), complex(index)),
    "the second": lambda index: negative(index) if index % 4 == 1 else torch.full((3,), float(index)),
    "in a dict": lambda index: {"view": conjugate(index), "label": index, "pair": (negative(index), 0.5)},
    "not contiguous": lambda index: torch.full((3, 3), complex(index, 1)).T.conj()[:, 1],
    "of no dimension": lambda index: conjugate(index)[0],
    "large": lambda index: torch.full((100_000,), complex(index, 1)).conj(),
    "of other shapes": lambda index: conjugate(index)[: 1 + index],
}


@pytest.mark.rings_only
@pytest.mark.parametrize("option", [{}, {"worker_task": "sample"}, {"worker_method": "thread"}], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_stacked_as_without_workers(name, option):
    """torch's workers raise, or drop the signs."""

    def outcome(loader_class, **options):
        try:
            return [describe(batch) for batch in loader_class(Made(VIEWS[name], 8), batch_size=4, **options)]
        except RuntimeError as error:
            return "each tensor to be equal size" in str(error)

    expected = outcome(torch.utils.data.DataLoader)
    assert (expected is True) == (name == "of other shapes")
    assert outcome(DataLoader, num_workers=2, **option) == expected


# Without those whose signs torch loses on the way.
SENT = [batch for name, batch in BATCHES.items() if "negated" not in name and "conjugated" not in name]


def one_by_one(index):
    return SENT[index]


def test_batches_are_collated_as_torch_does(loader_class):
    expected, _ = compare(loader_class, Case(lambda: {"dataset": Batches(), "num_workers": 1}))
    errors = sum(kind == "error" for kind, *_ in expected.outcomes)
    assert errors > 15
    assert len(expected.delivered()) > 40


def test_batches_are_converted_as_torch_does(loader_class):
    def build():
        return {"dataset": Made(one_by_one, len(SENT)), "batch_size": None, "num_workers": 1}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) > 60


def collate_with_arrays(samples):
    """Two storages over the same bytes of the slot, which torch sends apart."""
    made = default_collate(samples)
    return [made, torch.from_numpy(made.numpy()[1:]), made[1:]]


def test_what_collate_made_and_an_array_over_it_arrive_apart(loader_class):
    def build():
        data = list(torch.arange(12.0).reshape(4, 3))
        return {"dataset": data, "batch_size": 2, "num_workers": 1, "collate_fn": collate_with_arrays}

    expected, _ = compare(loader_class, Case(build))
    assert len(expected.delivered()) == 2


def collate_theirs(batch, *, collate_fn_map):  # noqa: ARG001
    return f"{len(batch)} by theirs"


def replaced_map():
    torch_collate.default_collate_fn_map[int] = collate_theirs


def extended_map():
    torch_collate.default_collate_fn_map[dict] = collate_theirs


def replaced_stack():
    stack = torch.stack
    torch.stack = lambda *args, **named: stack(*args, **named) + 1


def replaced_tensor():
    tensor = torch.tensor
    torch.tensor = lambda *args, **named: tensor(*args, **named) + 1


def replaced_collate():
    torch_collate.collate = collate_theirs


def replaced_convert():
    torch_collate.default_convert = str


def other_device():
    torch.set_default_device("meta")


def counting_mode():
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            return made + 1 if function in (torch.stack, torch.tensor) else made

    Counting().__enter__()


def other_mode():
    class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            return made.mul_(2) if function is torch.ops.aten.stack.out else made

    Doubling().__enter__()


CHANGES = [
    replaced_map,
    extended_map,
    replaced_stack,
    replaced_tensor,
    replaced_collate,
    replaced_convert,
    other_device,
    counting_mode,
    other_mode,
]


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"row": torch.full((3,), float(index)), "label": index, "pair": (index, 0.5)}


class LaterChange(Rows):
    """Changed by the third sample: after a batch that was made natively."""

    def __init__(self, change):
        self.change = change

    def __getitem__(self, index):
        if index == 2:
            self.change()
        return super().__getitem__(index)


@pytest.mark.parametrize("batch_size", [2, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_who_changes_torch_in_a_worker_gets_what_he_changed(loader_class, change, batch_size):
    for dataset, init in ((Rows(), lambda _: change()), (LaterChange(change), None)):

        def build(dataset=dataset, init=init):
            return {
                "dataset": dataset,
                "batch_size": batch_size,
                "num_workers": 1,
                "worker_init_fn": init,
            }

        plain, _ = compare(loader_class, Case(lambda: build(Rows(), None)))
        expected, _ = compare(loader_class, Case(build))
        if change is not other_device or batch_size is not None:
            converts = change is replaced_convert
            assert (expected.outcomes != plain.outcomes) == (converts == (batch_size is None))


class Box:
    def __init__(self, number):
        self.number = number


def boxes(index):
    return {"box": Box(index), "plain": (torch.full((3,), index), True, {"deep": [index, 0.5]})}


def collate_boxes(batch, *, collate_fn_map):  # noqa: ARG001
    return torch.tensor([box.number for box in batch]), "by theirs"


@pytest.mark.parametrize("taught", [Box, bool, list, collections.abc.Mapping, tuple, torch.Tensor, object])
def test_types_that_torch_was_taught_before_the_workers_start(loader_class, monkeypatch, taught):
    fn_map = torch_collate.default_collate_fn_map
    monkeypatch.setitem(fn_map, Box, collate_boxes)
    if taught is not Box:
        monkeypatch.setitem(fn_map, taught, collate_theirs)
    expected, _ = compare(
        loader_class, Case(lambda: {"dataset": Made(boxes, 8), "batch_size": 2, "num_workers": 1})
    )
    assert "by theirs" in repr(expected.outcomes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 2, "worker_task": "sample"},
        {"num_workers": 2, "seeding": "sample"},
    ],
    ids=["none", "processes", "threads", "joint", "seeds"],
)
def test_another_map_in_the_place_of_torchs(monkeypatch, options):
    dataset = Made(boxes, 8)
    loader = DataLoader(dataset, collate_fn=default_collate, **options)
    # Whatever is kept of the first collation is there.
    with pytest.raises(TypeError):
        list(loader)
    plain = Made(plain_box, 8)
    list(DataLoader(plain, **options))
    torchs = dict(torch_collate.default_collate_fn_map)
    ours = {**torchs, Box: collate_boxes, bool: collate_theirs}
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", ours)
    for made in (dataset, plain):
        expected = repr(list(torch.utils.data.DataLoader(made, batch_size=4)))
        assert "by theirs" in expected
        assert repr(list(DataLoader(made, batch_size=4, **options))) == expected


def test_another_map_in_the_midst_of_an_epoch(monkeypatch):
    for options in ({}, {"num_workers": 1, "worker_method": "thread", "prefetch_factor": 1}):
        with monkeypatch.context() as patch:
            iterator = iter(DataLoader(Made(plain_box, 8), batch_size=2, **options))
            assert "by theirs" not in repr(next(iterator))
            ours = {**torch_collate.default_collate_fn_map, bool: collate_theirs}
            patch.setattr(torch_collate, "default_collate_fn_map", ours)
            assert "by theirs" in repr(list(iterator))


def plain_box(index):
    return boxes(index)["plain"]


def gaps(index):
    image = torch.full((2, 3), index)
    return None if index % 5 == 1 else collections.OrderedDict(image=image, label=Point(index, "name"))


def without_gaps(samples):
    return default_collate([sample for sample in samples if sample is not None])


def with_a_map_of_its_own(samples):
    samples = [sample["image"] for sample in samples if sample is not None]
    return torch_collate.collate(samples, collate_fn_map={torch.Tensor: collate_theirs})


def without_a_map(samples):
    return torch_collate.collate(samples)


def extended_on_the_way(samples):
    torch_collate.default_collate_fn_map[type(None)] = collate_theirs
    return default_collate([[None], [None]]), default_collate([len(samples)])


@pytest.mark.parametrize(
    "collate_fn", [default_collate, without_gaps, with_a_map_of_its_own, without_a_map, extended_on_the_way]
)
def test_functions_that_call_torchs(loader_class, collate_fn):
    def build():
        return {"dataset": Made(gaps, 12), "batch_size": 3, "num_workers": 2, "collate_fn": collate_fn}

    compare(loader_class, Case(build))


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="tensors have no names any more")
@pytest.mark.parametrize("batch_size", [1, None])
def test_names_are_no_less_refused(batch_size):
    class Named(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return torch.ones(2, names=("a",))

    with pytest.raises(RuntimeError, match=r"[Nn]amed"):
        next(iter(DataLoader(Named(), batch_size=batch_size, num_workers=1)))
