"""The options of a device: what is refused, when, and in which words; where they can come from."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch

import ringloader
from ringloader._features import devices as features_devices
from ringloader._features import table
from ringloader._features.table import Options
from ringloader._patch import by_name
from ringloader._torch import devices

pytestmark = pytest.mark.rings_only


def scaled(batch):
    return batch / 255


class OneOf:
    """Stands for the module of a device of which there are some."""

    def __init__(self, count):
        self.count = count

    def device_count(self):
        return self.count


@pytest.fixture
def machine(monkeypatch):
    """Says how many `cuda` devices this machine has; None: torch has no accelerator."""

    def have(count):
        accelerator = None if count is None else torch.device("cuda")
        monkeypatch.setattr(features_devices, "_known", set())
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: accelerator)
        monkeypatch.setattr(torch, "get_device_module", lambda _: OneOf(count))

    return have


WRONG = [
    ({"device": 1.5}, TypeError, r"device must be a torch.device, .* an index or None, not 1.5"),
    ({"device": True}, TypeError, "device must be a torch.device, .* not True"),
    ({"device": 2**70}, ValueError, f"device must be an index below 128, as torch has them, not {2**70}"),
    ({"device": 200}, ValueError, "device must be an index below 128"),
    *(
        ({name: 2**value}, ValueError, f"{name} must be less than {2**63}, not {2**value}")
        for name, value in [
            ("max_shared_bytes", 64),
            ("main_prefetch", 70),
            ("device_prefetch", 63),
            ("restart_workers", 99),
        ]
    ),
    ({"device": -1}, ValueError, "device must be an index of 0 or more, not -1"),
    ({"device": "cpu", "device_prefetch": -1}, ValueError, "device_prefetch must be 0 or more, not -1"),
    ({"device": "cpu", "device_prefetch": 1.0}, TypeError, "device_prefetch must be an int, not 1.0"),
    ({"device": "cpu", "device_prefetch": True}, TypeError, "device_prefetch must be an int, not True"),
    (
        {"device": "cpu", "device_transform": 1},
        TypeError,
        "must be a callable or None, not 1",
    ),
    (
        {"device": "cpu", "device_transform": "f"},
        TypeError,
        "must be a callable or None, not 'f': pass the function itself",
    ),
    ({"device_transform": scaled}, ValueError, "device_transform needs device: pass the device"),
    ({"device": "gpu"}, ValueError, "device 'gpu' is unknown to torch, and is not 'auto': "),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
@pytest.mark.parametrize("taken_by", ["class", "install", "installed", "convert"])
def test_what_is_wrong_is_said_at_once(options, error, text, taken_by):
    dataset = list(range(4))
    loader = torch.utils.data.DataLoader(dataset)
    with pytest.raises(error, match=text):
        if taken_by == "class":
            ringloader.DataLoader(dataset, **options)
        elif taken_by == "convert":
            ringloader.convert(loader, **options)
        else:
            getattr(ringloader, taken_by)(**options)
    assert type(loader) is torch.utils.data.DataLoader


@pytest.mark.parametrize(
    ("count", "device", "text"),
    [
        (None, 0, "device 0 does not exist: torch has no accelerator here; pass 'auto' or None"),
        (None, "cuda", r"device 'cuda' is not of the current accelerator \(there is none\); pass 'auto'"),
        (0, "cuda", "device 'cuda' does not exist: torch finds no 'cuda' device; pass 'auto'"),
        (0, 0, "device 0 does not exist: torch finds no 'cuda' device"),
        (2, 2, r"device 2 does not exist: torch finds 2 'cuda' device\(s\); pass an index below 2"),
        (2, "cuda:3", "device 'cuda:3' does not exist: torch finds 2"),
        (2, torch.device("cuda:3"), r"device device\(type='cuda', index=3\) does not exist: torch finds 2"),
        (2, "xpu", r"device 'xpu' is not of the current accelerator \(which is 'cuda'\)"),
        (2, "meta", "device 'meta' is not of the current accelerator"),
    ],
)
def test_a_device_that_is_not_there(machine, count, device, text):
    machine(count)
    with pytest.raises(ValueError, match=text):
        ringloader.DataLoader([1, 2], device=device)


@pytest.mark.parametrize(
    ("count", "device", "found"),
    [
        (2, None, None),
        (2, "auto", torch.device("cuda")),
        (0, "auto", None),
        (None, "auto", None),
        (2, "cpu", None),
        (None, torch.device("cpu"), None),
        (2, "cuda", torch.device("cuda")),
        (2, 1, torch.device("cuda:1")),
        (2, torch.device("cuda:1"), torch.device("cuda:1")),
    ],
)
def test_which_device_is_meant(machine, count, device, found):
    machine(count)
    assert features_devices.resolve(device) == found


def test_a_device_of_which_the_older_torch_says_that_there_is_none(monkeypatch):
    def raises():
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert features_devices.resolve("auto") is None


def test_checking_initialises_no_device():
    code = (
        "import torch, ringloader\n"
        "asked = []\n"
        "torch._C._cuda_getDeviceCount = lambda: asked.append('driver') or 0\n"
        "torch.cuda._device_count_nvml = lambda: 2\n"
        "ringloader.DataLoader([1, 2], device='cuda:1', device_prefetch=1)\n"
        "ringloader.install(device='auto')\n"
        "assert not torch.cuda.is_initialized() and not asked, asked\n"
    )
    if devices.current_accelerator() != torch.device("cuda"):
        pytest.skip("torch was built without cuda, or is one that looks for a device to tell")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("device=cuda:1", {"device": "cuda:1"}),
        ("device=auto, device_prefetch=0", {"device": "auto", "device_prefetch": 0}),
        ("device=1", {"device": 1}),
    ],
)
def test_options_as_text(text, options):
    made = by_name.from_text(text)
    assert made == (Options(**options), False)
    assert by_name.from_text(f"{text},stateful=True") == (made[0], True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GB", 10**9), ("512MiB", 512 << 20), ("1.5 KiB", 1536), ("64kB", 64_000), ("2TiB", 2 << 40), ("7", 7)],
)
def test_a_size_as_text(text, size):
    assert by_name.from_text(f"max_shared_bytes={text}") == (Options(max_shared_bytes=size), False)


@pytest.mark.parametrize("text", ["1gb", "GB", "1 GB of", "-1GB", "1B", "1e3MB", "٣GB"])
def test_what_is_no_size(text):
    with pytest.raises(TypeError, match="max_shared_bytes must be an int or None"):
        by_name.from_text(f"max_shared_bytes={text}")


def test_no_text_names_a_function():
    with pytest.raises(TypeError, match="device_transform must be"):
        by_name.from_text("device=cuda,device_transform=scaled")


def test_copies_and_pickles_have_the_options():
    options = {"device": "cpu", "device_prefetch": 5, "device_transform": scaled}
    loader = ringloader.DataLoader([1.0, 2.0], **options)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert table.options_of(other) == Options(**options)


def test_other_attributes_are_frozen_and_options_are_converted():
    loader = ringloader.DataLoader([1.0, 2.0], device="cpu")
    ringloader.convert(loader, device=None, max_shared_bytes=1 << 24)
    assert table.options_of(loader) == Options(max_shared_bytes=1 << 24)
    assert list(loader) == [torch.tensor([1.0]), torch.tensor([2.0])]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 2


def test_what_makes_a_loader_anew_finds_its_options():
    """By the names in the signature, as Lightning does."""
    given = {"device": "cpu", "device_prefetch": 1, "max_shared_bytes": 1 << 20}
    loader = ringloader.DataLoader([1, 2], **given)
    names = inspect.signature(type(loader).__init__).parameters
    found = {name: value for name, value in vars(loader).items() if name in given and name in names}
    again = ringloader.DataLoader([3], **found)
    assert table.options_of(again) == table.options_of(loader)
    assert table.options_of(again).device_prefetch == 1
