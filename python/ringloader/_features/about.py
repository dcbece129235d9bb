"""The columns of the table of options. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from ringloader._features.checks import Check

Topic = Literal["Speed", "Order and randomness", "Errors", "Memory", "Devices", "Watching", "Resume"]
# In the order of the page of options.
TOPICS: tuple[Topic, ...] = get_args(Topic)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of an option, in Markdown.

    Attributes:
        topic: The heading of the page of options under which it stands.
        values: The values that it takes.
        without: The default, and what it means.
        line: One sentence: what it does.
        details: Another sentence for the page of options.
        example: Lines of Python for the page of options, which has ``DataLoader`` and ``dataset``.
        page: The page, and its section, that has the rest.
    """

    topic: Topic
    values: str
    without: str
    line: str
    details: str = ""
    example: str = ""
    page: str | None = None


def texts(names: Iterable[str]) -> dict[str, Texts]:
    """Returns the texts of options, for help and pages, in the order of their names.

    Raises:
        KeyError: If one has no texts.
    """
    import tomllib

    files = Path(__file__).parent.rglob("texts.toml")
    found = {name: one for file in files for name, one in tomllib.loads(file.read_text("utf-8")).items()}
    return {name: Texts(**found[name]) for name in names}


@dataclasses.dataclass(frozen=True)
class Never:
    """Says that an option raises there.

    Attributes:
        why: The reason, for the error.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class About:
    """The row of an option. Its texts stand in ``texts.toml`` of the same folder.

    Attributes:
        check: Raises for a value of the wrong type or out of range; is called with the name and the value.
        on_torchs: What happens to the option where torch's own loader runs whole.
        in_threads: What happens to it where workers are threads.
        in_worker: What happens to the option of a loader that a dataset has, in a worker process.
        off_linux: What happens to it on other systems, if not what ``in_threads`` and the like say: without
            workers it works there, and with workers torch's own loader runs.
        annotation: Its type in signatures, where the table cannot name it without torch.
        instead: For an option of the constructor only, what to do where there is no constructor.
        is_text: False for an option that no text can give.
        is_called_in_workers: True for a function that workers call: the processes of a pool hold it.
        is_of_states: True for an option that only ``StatefulDataLoader`` has.
        is_torchs: True for an argument of torch's, which takes the option's values too.
        as_default: Values that mean what the default means, where no rule says otherwise.
    """

    check: Check
    on_torchs: Literal["works", "is an error", "is an error with workers", "is left out"]
    in_threads: Literal["works"] | Never = "works"
    in_worker: Literal["works", "is left out", "is left out by install"] = "works"
    off_linux: Literal["is left out", "is an error with workers"] | None = None
    annotation: str | None = None
    instead: str | None = None
    is_text: bool = True
    is_called_in_workers: bool = False
    is_of_states: bool = False
    is_torchs: bool = False
    as_default: tuple[object, ...] = ()


def option(default: Any, **about: Any) -> Any:
    """Returns the field of an option, with its default and its row."""
    return dataclasses.field(default=default, metadata={"about": About(**about)})
