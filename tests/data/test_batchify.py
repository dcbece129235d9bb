"""``ringloader.batchify``: what comes out, beside torch's functions, and what is refused; in one process."""

from __future__ import annotations

import collections
import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from parity.describe import describe
from ringloader import _native, batchify
from ringloader.batchify import Append, AsList, Dict, Group, Pad, Stack

Point = collections.namedtuple("Point", "x y")
HAS_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def native(pad, samples):
    """Returns what the native code makes; None for what it leaves to torch."""
    return pad._native(samples, None, None)


def same(one, other):
    return describe(one) == describe(other)


def vectors(*lengths, dtype=torch.int64):
    return [torch.arange(1, length + 1).to(dtype) for length in lengths]


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("rest", [(), (3,), (2, 2)])
def test_equals_pad_sequence(dtype, value, rest):
    samples = [torch.ones(length, *rest).cumsum(0).to(dtype) for length in (3, 1, 0, 5) for _ in range(2)]
    expected = pad_sequence(samples, batch_first=True, padding_value=value)
    assert same(Pad(value)(samples), expected)
    assert same(Pad(value, axis=0)(samples), expected)
    assert same(Pad(value)._by_torch(samples), expected)
    if HAS_EXCHANGE:
        assert same(native(Pad(value), samples), expected)
    if dtype != torch.bfloat16:
        arrays = [sample.numpy() for sample in samples]
        assert same(native(Pad(value), arrays), expected)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.tensor(1.5), torch.tensor(2.5)],
        [torch.ones(2, 3), torch.zeros(2, 3)],
        [np.arange(4), np.arange(4)],
        [1, 2],
        [1.5, 2.5],
        [True, False],
        [np.float32(1), np.float32(2)],
        [torch.ones(1), torch.ones(1, dtype=torch.int64)],
    ],
    ids=str,
)
def test_of_equal_sizes_pad_stacks(samples):
    assert same(Pad()(samples), default_collate(samples))
    assert same(Stack()(samples), default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [["a", "b"], [{"a": 1, "b": torch.ones(2)}] * 2, [(1, "a")] * 2, [[1, 2], [3, 4]], [Point(1, 2)] * 2],
    ids=str,
)
def test_stack_is_default_collate(samples):
    assert same(Stack()(samples), default_collate(samples))


sizes = st.lists(st.integers(0, 4), min_size=3, max_size=3)
FORMS = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: (
        tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor
    ),
    "between others": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor,
    "in a larger one": lambda tensor: torch.nn.functional.pad(tensor, (1, 2) * tensor.dim())[
        tuple(slice(1, 1 + size) for size in tensor.shape)
    ],
    "expanded": lambda tensor: (
        tensor[..., :1].expand(tensor.shape) if tensor.dim() and tensor.numel() else tensor
    ),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(sizes, min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.sampled_from(list(FORMS)), min_size=4, max_size=4),
    st.sampled_from(
        [(torch.uint8, None), (torch.int64, None), (torch.float64, None), (torch.complex128, None)]
        + [
            (dtype, torch.int64)
            for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32)
        ]
    ),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.booleans(),
)
def test_native_code_does_what_torch_does(shapes, ndim, forms, dtypes, round_to, lengths, arrays):
    dtype, wanted = dtypes
    made = []
    for number, shape in enumerate(shapes):
        count = int(np.prod(shape[:ndim]))
        tensor = torch.arange(100 * number + 1, 100 * number + 1 + count).to(dtype).reshape(shape[:ndim])
        made.append(FORMS[forms[number]](tensor))
    samples = [tensor.numpy() for tensor in made] if arrays else made
    pad = Pad(7, wanted, round_to=round_to, lengths=lengths)
    expected = pad._by_torch(samples)
    assert same(pad(samples), expected)
    is_some = all((expected[0] if lengths else expected).shape) and not (lengths and ndim == 0)
    # An array without dimensions is torch's matter.
    if ndim if arrays else HAS_EXCHANGE:
        assert (native(pad, samples) is not None) == is_some


def test_the_value_stands_in_all_that_samples_leave():
    # Memory of this size is used again, and full of other bytes.
    for _ in range(20):
        torch.full((4, 6, 8), -1, dtype=torch.int64)
        samples = [torch.ones(size, 8 - size, dtype=torch.int64) for size in (1, 6, 3, 2)]
        batch = Pad(-100)(samples)
        assert batch.shape == (4, 6, 7)
        for row, sample in zip(batch, samples, strict=True):
            assert (row == 1).sum() == sample.numel() and (row == -100).sum() == row.numel() - sample.numel()
            assert (row[: sample.shape[0], : sample.shape[1]] == 1).all()


def test_strides_that_say_nothing_may_be_any_number():
    one = torch.arange(3.0)
    shapes = [((1, 3), (1 << 62, 1)), ((1, 1), (1 << 62, 1 << 61)), ((0, 2), ((1 << 62) - 1, 1 << 62))]
    samples = [one.as_strided(shape, strides) for shape, strides in shapes]
    expected = torch.full((3, 1, 3), 7.0)
    expected[0, 0], expected[1, 0, 0] = one, one[0]
    assert torch.equal(Pad(7)(samples), expected)
    nothing = torch.empty(0).as_strided((0, 1 << 40, 1 << 40), (1, 1, 1))
    with pytest.raises(RuntimeError):
        Pad()([nothing, one.as_strided((1, 1 << 40, 1 << 40), (0, 0, 0))])


def test_a_batch_shares_no_memory_with_samples():
    for samples in ([torch.zeros(4), torch.zeros(4)], [np.zeros(4), np.zeros(4)], [torch.zeros(4)]):
        batch = Pad()(samples)
        batch += 1
        assert not any(sample.any() for sample in samples)
        for sample in samples:
            sample[:] = 5
        assert (batch == 1).all()


def test_axes_and_round_to():
    samples = [torch.ones(3, 5), torch.ones(1, 5)]
    assert Pad(axis=0)(samples).shape == (2, 3, 5)
    assert Pad(axis=-2)(samples).shape == (2, 3, 5)
    assert Pad(axis=0, round_to=4)(samples).shape == (2, 4, 5)
    assert Pad(round_to=4)(samples).shape == (2, 4, 8)
    assert Pad(axis=(1, 0), round_to=8)(samples).shape == (2, 8, 8)
    assert Pad(round_to=8)([torch.ones(0)]).shape == (1, 0)
    assert Pad(round_to=8)([torch.ones(8)]).shape == (1, 8)
    assert Pad(round_to=8)([torch.ones(9)]).shape == (1, 16)
    # Bytes too: what is rounded up is filled.
    assert Pad(2, round_to=4)([[1], [1, 1]]).tolist() == [[1, 2, 2, 2], [1, 1, 2, 2]]


def test_lengths():
    batch, lengths = Pad(lengths=True)(vectors(2, 0, 3))
    assert batch.shape == (3, 3) and same(lengths, torch.tensor([2, 0, 3]))
    samples = [torch.ones(2, 3), torch.ones(4, 1)]
    assert same(Pad(lengths=True)(samples)[1], torch.tensor([[2, 3], [4, 1]]))
    assert same(Pad(axis=(1, 0), lengths=True)(samples)[1], torch.tensor([[3, 2], [1, 4]]))
    assert same(Pad(axis=(-1,), lengths=True)([torch.ones(2, 3), torch.ones(2, 1)])[1], torch.tensor([3, 1]))
    assert same(Pad(lengths=True)([1.5, 2.5])[1], torch.empty(2, 0, dtype=torch.int64))
    assert same(Pad(lengths=True)([[], []])[1], torch.tensor([0, 0]))
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        batch, lengths + 1, batch_first=True, enforce_sorted=False
    )
    assert packed.batch_sizes.sum() == 6 + 2


@pytest.mark.parametrize(
    ("lists", "arguments"),
    [
        ([[1, 2, 3], [4]], {}),
        ([(1, 2, 3), [4]], {}),
        ([[1, 2], []], {}),
        ([[], [1, 2]], {"dtype": torch.int32}),
        ([[1.5], [2, 3]], {}),
        ([[1, 2.5], [3]], {}),
        ([[0.1], [1e300, float("nan")]], {}),
        ([[0.1], [-0.0, 3.0]], {"dtype": torch.float64}),
        ([[0.1], [-0.0, 3.0]], {"dtype": torch.float16}),
        ([[True], [False, True]], {}),
        ([[True, 2], [3]], {}),
        ([[1, True], [3]], {}),
        ([[-(2**63), 2**63 - 1], [0]], {}),
        ([[1, 2], [3]], {"dtype": torch.float32}),
        ([[1, 2], [3]], {"dtype": torch.uint8}),
        ([[np.int32(1), np.int32(2)], [np.int32(3)]], {}),
    ],
    ids=str,
)
def test_lists_are_what_torch_makes_of_them(lists, arguments):
    dtype = arguments.get("dtype")
    tensors = [torch.tensor(numbers, dtype=dtype) for numbers in lists if numbers]
    dtype = dtype or torch.stack([tensor[0] for tensor in tensors]).dtype
    expected = pad_sequence([torch.tensor(numbers, dtype=dtype) for numbers in lists], batch_first=True)
    assert same(Pad(**arguments)(lists), expected)
    assert same(Pad(**arguments)._by_torch(lists), expected)


def test_floats_of_lists_have_torchs_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        assert Pad()([[0.1], [0.2, 0.3]]).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert Pad()([[0.1], [0.2, 0.3]]).dtype == torch.float32
    assert Pad()([[], []]).dtype == torch.float32


def test_a_number_of_another_kind_that_comes_late():
    lists = [[1, 2, 3], [4, 5, 6.5]]
    assert native(Pad(), lists) is None
    assert same(Pad()(lists), torch.tensor(lists))
    with pytest.raises(ValueError, match="sample 1, "):
        Pad()([[1, 2], [3, 2**64]])


def test_arrays_that_torch_takes_with_a_warning_or_not_at_all(recwarn, tmp_path):
    fixed = np.frombuffer(b"abcdef", np.uint8)
    assert Pad()([fixed, fixed[:2]]).tolist() == [[*b"abcdef"], [*b"ab", 0, 0, 0, 0]]
    assert same(Pad(lengths=True)._by_torch([fixed, fixed[:2]]), Pad(lengths=True)([fixed, fixed[:2]]))
    backwards = np.arange(4)[::-1]
    assert Pad()([backwards, backwards[:2]]).tolist() == [[3, 2, 1, 0], [3, 2, 0, 0]]
    assert same(Pad()([backwards]), Pad()._by_torch([backwards]))
    odd = np.ndarray((2,), np.int32, np.arange(8, dtype=np.uint8), strides=(3,))
    assert same(Pad()([odd]), Pad()._by_torch([odd]))
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", np.uint16, "r")
    samples = [tokens[:4], tokens[4:6]]
    assert Pad(dtype=torch.int64)(samples).tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert native(Pad(dtype=torch.int64), samples) is not None
    assert same(Append()([tokens[:4]]), [torch.arange(4).to(torch.uint16)[None]])
    assert not recwarn.list


def test_types_are_promoted_as_by_stack():
    samples = [torch.ones(2, dtype=torch.int32), torch.full((3,), 0.5)]
    assert same(Pad()(samples), torch.tensor([[1, 1, 0], [0.5, 0.5, 0.5]]))
    assert Pad()([torch.ones(1), torch.ones(2, dtype=torch.bfloat16)]).dtype == torch.float32
    assert Pad(dtype=np.float16)(samples).dtype == torch.float16
    assert Pad(dtype="int16")([torch.ones(1)]).dtype == torch.int16
    assert same(
        Pad(dtype=torch.int64)([torch.tensor([1.9]), torch.tensor([2.1, 3.0])]),
        torch.tensor([[1, 0], [2, 3]]),
    )


def test_gradients_go_to_the_samples():
    samples = [torch.ones(2, requires_grad=True), torch.ones(3)]
    Pad(5)(samples).mul(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    assert samples[0].grad.tolist() == [1.0, 2.0]


def test_tensors_of_other_kinds():
    class Sub(torch.Tensor):
        pass

    plain = vectors(2, 3, dtype=torch.float32)
    assert type(Pad()([tensor.as_subclass(Sub) for tensor in plain])) is Sub
    assert same(Pad()([torch.nn.Parameter(tensor, requires_grad=False) for tensor in plain]), Pad()(plain))
    assert Pad()([tensor.to("meta") for tensor in plain]).device.type == "meta"
    conjugated = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j, 3j])]
    assert same(Pad()(conjugated), pad_sequence(conjugated, batch_first=True))
    with FakeTensorMode():
        assert isinstance(Pad()([torch.ones(2), torch.ones(3)]), FakeTensor)
    batch, lengths = Pad(lengths=True)([tensor.to("meta") for tensor in plain])
    assert batch.device.type == "meta" and lengths.device.type == "cpu"


def test_a_default_device_has_its_say():
    with torch.device("meta"):
        assert Pad()([[1, 2], [3]]).device.type == "meta"
        assert Pad()([torch.ones(2, device="cpu"), torch.ones(1, device="cpu")]).device.type == "cpu"


def test_append_and_as_list():
    tensor = torch.ones(2)
    made = Append()([tensor, np.ones(3), [1, 2], 5])
    assert [tuple(one.shape) for one in made] == [(1, 2), (1, 3), (1, 2), (1,)]
    assert made[0].data_ptr() == tensor.data_ptr()
    assert Append(expand=False)([tensor])[0] is tensor
    anything = [object(), "a", None]
    assert AsList()(tuple(anything)) == anything


def test_group():
    samples = [([1, 2, 3], 0, "a"), ([4], 1, "b")]
    tokens, labels, texts = Group(Pad(), Stack(), AsList())(samples)
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]] and labels.tolist() == [0, 1] and texts == ["a", "b"]
    assert same(Group([Pad(), Stack(), AsList()])(samples), (tokens, labels, texts))
    assert Group(AsList(), AsList())([Point(1, 2), Point(3, 4)]) == Point([1, 3], [2, 4])
    assert isinstance(Group(AsList(), len)([[1, 2]]), tuple)


def test_dict():
    samples = [{"ids": [1, 2], "label": 0}, {"label": 1, "ids": [3]}]
    made = Dict(ids=Pad(lengths=True), label=Stack())(samples)
    assert list(made) == ["ids", "label"] and made["label"].tolist() == [0, 1]
    assert made["ids"][0].tolist() == [[1, 2], [3, 0]] and made["ids"][1].tolist() == [2, 1]
    assert Dict({("a", 1): AsList()})([{("a", 1): 5}]) == {("a", 1): [5]}
    nested = Dict(pair=Group(Pad(), Dict(x=Stack())))([{"pair": ([1], {"x": 2})}])
    assert nested["pair"][1]["x"].tolist() == [2]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Pad(value="a"), TypeError, "'value' .*'a'"),
        (lambda: Pad(dtype="none"), TypeError, "'dtype' .*'none'"),
        (lambda: Pad(dtype=np.dtype("S3")), TypeError, "'dtype' .*S3"),
        (lambda: Pad(axis=1.0), TypeError, r"'axis' .*1\.0"),
        (lambda: Pad(axis="01"), TypeError, "'axis' .*'01'"),
        (lambda: Pad(axis=True), TypeError, "'axis' .*True"),
        (lambda: Pad(axis=()), ValueError, r"'axis' .*\(\)"),
        (lambda: Pad(axis=(0, 0)), ValueError, r"'axis' .*\(0, 0\)"),
        (lambda: Pad(round_to=0), ValueError, "'round_to' .*0"),
        (lambda: Pad(round_to=2.0), TypeError, r"'round_to' .*2\.0"),
        (lambda: Pad(lengths=[1]), TypeError, r"'lengths' .*\[1\]"),
        (lambda: Pad(0.5, torch.int64), ValueError, r"'dtype' torch\.int64 .*'value' 0\.5"),
        (lambda: Pad(-1, np.uint8), ValueError, r"'dtype' torch\.uint8 .*'value' -1"),
        (lambda: Pad(float("nan"), torch.int8), ValueError, "'value' nan"),
        (lambda: Pad(2, torch.bool), ValueError, "'value' 2"),
        (lambda: Pad(1e6, torch.float16), ValueError, "'value' 1000000"),
        (lambda: Pad(1j, torch.float32), ValueError, "'value' 1j"),
        (lambda: Append(expand=0), TypeError, "'expand' .*0"),
        (lambda: Group(), ValueError, "needs a function"),
        (lambda: Group(Pad(), 3), TypeError, "function 1 .*3"),
        (lambda: Dict(), ValueError, "needs a function"),
        (lambda: Dict(a=3), TypeError, "'a' .*3"),
        (lambda: Dict([Pad()]), TypeError, "by key"),
    ],
)
def test_wrong_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("function", "samples", "error", "words"),
    [
        (Pad(), [], ValueError, "no samples"),
        (Pad(), ["a"], TypeError, "sample 0 .*'str'.*AsList"),
        (Pad(), [1, None], TypeError, "sample 1 .*'NoneType'"),
        (Pad(), [(1, {})], ValueError, "sample 0, "),
        (Pad(), [[[1, 2], [3]]], ValueError, "sample 0, "),
        (Pad(), [np.array(["a"])], TypeError, "sample 0 .*'ndarray'"),
        (Pad(), [torch.ones(1), torch.ones(1, 1)], ValueError, r"samples 0 and 1 .*\(1,\) and \(1, 1\)"),
        (
            Pad(axis=0),
            [torch.ones(2, 3)] * 2 + [torch.ones(1, 4)],
            ValueError,
            r"samples 0 and 2 .*\(2, 3\) and \(1, 4\).*axis 1",
        ),
        (Pad(axis=1), [[1], [2]], ValueError, r"Pad\(axis=1\) needs more axes"),
        (Pad(axis=-2), [[1], [2]], ValueError, r"Pad\(axis=-2\) needs more axes"),
        (Pad(axis=(0, -1)), [[1], [2]], ValueError, "names an axis twice"),
        (Pad(0.5), [[1], [2, 3]], ValueError, r"'dtype' torch\.int64 .*'value' 0\.5"),
        (Pad(), [torch.ones(1), torch.ones(1, device="meta")], ValueError, "cpu and meta"),
        (Pad(), [torch.eye(2).to_sparse()], ValueError, "sample 0 .*sparse"),
        (Group(Pad(), Stack()), [(1, 2), (1, 2, 3)], ValueError, "2 functions, but sample 1 has 3 fields"),
        (Group(Pad()), [{"a": 1}], TypeError, "sample 0 must be a tuple or list"),
        (Dict(a=Stack()), [{"a": 1}, {"b": 1}], KeyError, "sample 1 has no key 'a'"),
        (Dict(a=Stack()), [{"a": 1, "b": 2}], KeyError, "sample 0 has the key 'b'"),
        (Dict(a=Stack()), [(1,)], TypeError, "sample 0 must be a dict"),
    ],
)
def test_wrong_samples(function, samples, error, words):
    with pytest.raises(error, match=words):
        function(samples)


ALL = [
    Stack(),
    Pad(),
    Pad(value=-100, dtype=torch.int64, axis=(0, -1), round_to=8, lengths=True),
    Pad(value=-0.0),
    Pad(axis=1),
    Append(),
    Append(expand=False),
    AsList(),
    Group(Pad(), Stack()),
    Dict(ids=Pad(round_to=8), label=Stack()),
    Dict({"a b": AsList()}),
]


@pytest.mark.parametrize("function", ALL, ids=repr)
def test_copies_and_repr(function):
    for twin in (
        pickle.loads(pickle.dumps(function)),
        copy.deepcopy(function),
        copy.copy(function),
        eval(repr(function), {**vars(batchify), "torch": torch}),
    ):
        assert repr(twin) == repr(function) and type(twin) is type(function)
    assert type(function).__module__ == "ringloader.batchify"


def test_copies_do_the_same():
    samples = vectors(2, 3)
    for function in (Pad(3, lengths=True), Group(Pad(3), Pad())):
        given = [samples] * 2 if isinstance(function, Group) else samples
        assert same(pickle.loads(pickle.dumps(function))(given), function(given))
    assert native(pickle.loads(pickle.dumps(Pad(3))), [[1], [1, 2]]) is not None


def test_pad_is_gone_with_its_last_user():
    import gc
    import weakref

    gc.disable()
    try:
        pad = Pad()
        pad(vectors(1, 2))
        gone = weakref.ref(pad)
        del pad
        assert gone() is None
    finally:
        gc.enable()


def test_without_native_code(monkeypatch):
    monkeypatch.setattr(_native, "SUPPORTED", False)
    pad = Pad(9)
    assert pad._native is None
    assert pad([[1], [2, 3]]).tolist() == [[1, 9], [2, 3]]


def test_the_package_does_not_import_torch_for_it():
    code = (
        "import sys, ringloader; assert 'torch' not in sys.modules; ringloader.batchify.Pad(); import torch"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_a_module_like_any_other():
    import ringloader

    assert ringloader.batchify is sys.modules["ringloader.batchify"]
    assert set(batchify.__all__) == {"Append", "AsList", "Dict", "Group", "Pad", "Stack"}
