"""The options that a loader keeps, as attributes."""

from __future__ import annotations

from typing import Any

from ringloader._common import states
from ringloader._common.looking import has
from ringloader._options.table import TABLE, Options

# The attribute of a converted loader that names its own attributes which have an option's name.
THEIRS = "_ringloader_theirs"


def options_of(loader: object) -> Options:
    """Returns the options of ``loader`` as they are now."""
    return Options(**kept_on(loader))


def attribute(name: str) -> str:
    """Returns the name of the attribute of a loader that has an option.

    Private where a subclass is likely to have one of that name: ``device`` is the name of many.
    """
    return name if TABLE[name].is_read_again else f"_ringloader_{name}"


def kept_on(loader: object) -> dict[str, Any]:
    """Returns the options that ``loader`` has, by their names."""
    ours = (name for name in TABLE if name not in theirs(loader) and hasattr(loader, attribute(name)))
    return {name: getattr(loader, attribute(name)) for name in ours}


def put(loader: object, options: Options, before: Options | None = None) -> None:
    """Sets all options on ``loader``, but for those whose attribute is its own.

    Also sets an attribute with the name of each option, where code looks that makes such a loader anew:
    Lightning reads the constructor's arguments from there. One that a subclass or the program has set stays.

    Args:
        loader: The loader.
        options: The options that it has from now on.
        before: The options that it had, whose attributes are replaced.
    """
    own = vars(loader)
    for name in TABLE:
        if name in theirs(loader) or (TABLE[name].is_of_states and states.of(loader) is None):
            continue
        is_ours = before is not None and name in own and own[name] is getattr(before, name)
        has_other = not is_ours and _has(loader, name)
        setattr(loader, attribute(name), getattr(options, name))
        if not has_other:
            # Past `read_only`, and past a framework that replays what is set on a loader.
            own[name] = getattr(options, name)


def _has(loader: object, name: str) -> bool:
    """True if ``loader`` has an attribute of that name. A property of its class is not called.

    It may need what the constructor of a subclass sets later.
    """
    return has(loader, name)


def callables_of(loader: object) -> list[Any]:
    """Returns the functions among the options of ``loader`` that its workers call."""
    kept = kept_on(loader)
    return [
        kept[name] for name, about in TABLE.items() if about.is_called_in_workers and callable(kept.get(name))
    ]


def theirs(loader: object) -> tuple[str, ...]:
    """Returns the options of a converted loader whose attribute is another thing of its own."""
    found: tuple[str, ...] = getattr(loader, THEIRS, ())
    return found
