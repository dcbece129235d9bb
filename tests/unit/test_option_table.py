"""The table of options: what is written elsewhere agrees with it."""

import inspect
import re
from pathlib import Path

import pytest

import ringloader
from ringloader._options.table import TABLE, Options

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.rings_only


def section(name):
    about = TABLE[name]
    return f"### `{name}`\n\n{about.line}\n\n- **Values:** {about.values}\n- **Default:** {about.without}\n\n"


def test_the_constructor_has_the_options_of_the_table():
    """Names, order, defaults and types, behind torch's arguments."""
    parameters = list(inspect.signature(ringloader.StatefulDataLoader.__init__).parameters.values())
    ours = parameters[-len(TABLE) :]
    assert [one.name for one in ours] == list(TABLE)
    stateless = [one for one in parameters if one.name != "snapshot_every_n_steps"]
    assert list(inspect.signature(ringloader.DataLoader.__init__).parameters.values()) == stateless
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in ours)
    assert [one.default for one in ours] == [getattr(Options, name) for name in TABLE]
    written = {one.name: str(one.annotation).replace("rollover.", "") for one in ours}
    for name, annotation in Options.__annotations__.items():
        # A pool's module, and the words of `last_batch`, need torch.
        if name not in ("worker_pool", "last_batch"):
            assert written[name] == annotation.replace("bad_samples.", ""), name


def test_the_page_of_options_has_the_sections_of_the_table():
    page = (ROOT / "docs" / "options.md").read_text()
    options = page.split("## Options\n\n")[1].split("## Environment variables")[0]
    assert re.findall(r"^### .*\n(?:(?!###).*\n)*", options, re.M) == [section(name) for name in TABLE]


def test_each_option_is_described_in_the_docstring():
    documented = re.findall(r"^            (\w+): ", inspect.getdoc(ringloader.DataLoader) or "", re.M)
    documented = documented or re.findall(r"^    (\w+): ", inspect.getdoc(ringloader.DataLoader) or "", re.M)
    of_states = [name for name, about in TABLE.items() if about.is_of_states]
    assert [name for name in documented if name in TABLE] == [name for name in TABLE if name not in of_states]
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(ringloader.StatefulDataLoader) or "", re.M)
    assert [name for name in documented if name in TABLE] == of_states
