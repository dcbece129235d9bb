#!/usr/bin/env python3
"""Writes what the table of options and the rules say into signatures, docstrings and pages.

``ci/generate.py`` writes; ``ci/generate.py --check`` fails if something would change, and says what.
``--root DIR`` works in another tree. Needs no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110
PACKAGE = "python/ringloader"
# torch's last argument, behind which the options stand in signatures.
_TORCHS_LAST = "        in_order: bool = True,\n"
# The lines around torch's argument `num_workers`, and the last line of torch's arguments, in `Args`.
_BEFORE_WORKERS = "        batch_sampler: torch's: lists of indices, one for each batch.\n"
_AFTER_WORKERS = "        collate_fn: torch's"
_TORCHS_LAST_LINE = (
    "        in_order: torch's: ``False`` to return each batch as soon as it is made (default: ``True``).\n"
)
_TYPE_ERROR = "        TypeError: If a value"


class Options:
    """The table of options and the rules of a tree, without torch.

    Args:
        root: The tree.
    """

    def __init__(self, root: Path) -> None:
        sys.path.insert(0, str(root / "python"))
        from ringloader._features import rules, table

        self.table = table.TABLE
        try:
            self.texts = rules.texts(self.table)
        except KeyError as error:
            raise SystemExit(f"generate: no texts.toml has {error}") from None
        self.rules = table.RULES
        self.defaults = table.DEFAULTS
        # By option: the type, as the table spells it.
        self.types = table.Options.__annotations__

    def of_class(self, has_states: bool) -> list[str]:
        """Returns the options of ``StatefulDataLoader``, or of ``DataLoader``."""
        return [
            name
            for name, about in self.table.items()
            if (has_states or not about.is_of_states) and not about.is_torchs
        ]

    def annotation(self, name: str) -> str:
        """Returns the type of an option, as signatures have it."""
        spelled = self.table[name].annotation or self.types[name]
        return spelled.replace("bad_samples.", "").replace("'", '"')

    def excluded(self, name: str, is_of: Callable[[Any], bool] = lambda _: True) -> dict[str | None, str]:
        """Returns what an option does not go with, in words, by the value that it must have for it.

        Args:
            name: The option.
            is_of: True for the rules to look at.
        """
        found: dict[str | None, list[str]] = {}
        for rule in self.rules:
            if rule.option == name and is_of(rule):
                found.setdefault(rule.value, []).append(rule.what)
        return {value: excluded(whats) for value, whats in found.items()}


def listed(words: Sequence[str], word: str) -> str:
    """Returns ``a``, ``a or b``, ``a, b or c``, for the word ``or``."""
    return f" {word} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def excluded(whats: Sequence[str]) -> str:
    """Returns phrases of rules as one, those with "with" together."""
    alone = [what for what in whats if not what.startswith("with ") or ", " in what]
    together = [what.removeprefix("with ") for what in whats if what not in alone]
    parts = ([f"with {listed(together, 'or')}"] if together else []) + alone
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, or {parts[-1]}"


def rst(text: str) -> str:
    """Returns Markdown as it stands in a docstring, with code in double backquotes."""
    return re.sub(r"`([^`]*)`", r"``\1``", text)


def wrapped(text: str, indent: int, hang: int = 4) -> str:
    """Returns the lines of a paragraph of a docstring. Code is not broken."""
    kept = re.sub(r"``[^`]*``", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        kept,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ") + "\n"


def argument(name: str, texts: Any) -> str:
    """Returns the entry of an option in ``Args``."""
    # Other types stand in the signature, other values in the line.
    values = f" Values: {texts.values}." if '"' in texts.values and '"' not in texts.line else ""
    line = f"{name}: {texts.line}{values} Default: {texts.without}."
    if texts.page is not None:
        line += f" More: {texts.page.partition('#')[0]}."
    return wrapped(rst(line), 8)


def arguments(options: Options, names: Sequence[str]) -> str:
    """Returns a section of ``Args`` for each topic of the page of options."""
    from ringloader._features.rules import TOPICS

    sections = ""
    for topic in TOPICS:
        entries = [
            argument(name, texts)
            for name, texts in options.texts.items()
            if texts.topic == topic and name in names
        ]
        if entries:
            sections += f"\n    Args: {topic.lower()}\n{''.join(entries)}"
    return sections


def parameters(options: Options, names: Iterable[str]) -> str:
    """Returns the options' part of a signature."""
    lines = []
    for name in names:
        value = options.defaults[name]
        default = f'"{value}"' if isinstance(value, str) else repr(value)
        lines.append(f"        {name}: {options.annotation(name)} = {default},\n")
    return "".join(lines)


def all_excluded(
    options: Options, indent: int, names: Iterable[str], is_of: Callable[[Any], bool] = lambda _: True
) -> str:
    """Returns the list of what options do not go with, for a docstring."""
    lines = [
        f"- `{name}` {what}" if value is None else f"- `{name}={value}` {what}"
        for name in names
        for value, what in options.excluded(name, is_of).items()
    ]
    return "".join(
        wrapped(rst(f"{line}{'.' if at == len(lines) else ';'}"), indent, 2)
        for at, line in enumerate(lines, start=1)
    )


def in_worker(options: Options, *fates: str) -> str:
    """Returns the options that are left out in workers, in words."""
    names = [f"`{name}`" for name, about in options.table.items() if about.in_worker in fates]
    return listed(names, "and")


def section(options: Options, name: str) -> str:
    """Returns the section of an option on the page of options."""
    about, texts = options.table[name], options.texts[name]
    text = " ".join(part for part in (texts.line, texts.details) if part)
    if about.is_of_states:
        text += " `ringloader.StatefulDataLoader` only."
    elif about.instead is not None:
        text += " `install` and `convert` do not accept it."
    if not about.is_text:
        text += " Python only."
    if texts.page is not None:
        text += f" [More]({texts.page})."
    text += "\n"
    if texts.example:
        text += f"\n```python\n{texts.example.strip()}\n```\n"
    bullets = [f"- **Values:** {texts.values}", f"- **Default:** {texts.without}"]
    rules = [(rule.value, rule.what) for rule in options.rules if rule.option == name]
    needed = [what.removeprefix("without ") for _, what in rules if what.startswith("without ")]
    if needed:
        bullets.append(f"- **Needs:** {listed(needed, 'and')}")
    others: dict[str | None, list[str]] = {}
    for value, what in rules:
        if not what.startswith("without "):
            others.setdefault(value, []).append(what.removeprefix("with "))
    if not isinstance(about.in_threads, str):
        others.setdefault(None, []).append('`worker_method="thread"`')
    for value, whats in others.items():
        subject = "Cannot" if value is None else f"`{value}` cannot"
        bullets += [f"- **{subject} be combined with:**", *(f"    - {what}" for what in whats)]
    return f"#### `{name}`\n\n{text}\n" + "\n".join(bullets) + "\n\n"


def _off_linux(about: Any) -> str:
    if about.is_of_states:
        return "`StatefulDataLoader` raises"
    return str(about.off_linux or about.on_torchs).replace(" with workers", "")


def where(options: Options) -> str:
    """Returns the table of where options work."""
    rows = [
        "| option | in threads | where torch's own loader runs "
        "| in a loader that the dataset makes in a worker | on macOS and Windows, with workers |"
    ]
    rows.append("|---|---|---|---|---|")
    for name, about in options.table.items():
        threads = about.in_threads if isinstance(about.in_threads, str) else f"raises: {about.in_threads.why}"
        worker = about.in_worker.replace("install", "`install`")
        rows.append(f"| `{name}` | {threads} | {about.on_torchs} | {worker} | {_off_linux(about)} |")
    text = "\n".join(rows).replace("is left out by `install`", "no effect with `install`")
    return text.replace("is left out", "no effect").replace("is an error", "raises") + "\n"


def between(text: str, begin: str, end: str, new: str) -> str:
    """Returns ``text`` with ``new`` between two parts, each the first one of its kind."""
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"generate: {begin!r} and then {end!r} are not there")
    return head + begin + new + end + tail


def dataloader(text: str, options: Options) -> str:
    """``DataLoader``: its arguments, its signature."""
    names = options.of_class(has_states=False)
    text = between(
        text, _BEFORE_WORKERS, _AFTER_WORKERS, argument("num_workers", options.texts["num_workers"])
    )
    text = between(text, _TORCHS_LAST_LINE, "\n    Raises:\n", arguments(options, names))
    return between(text, _TORCHS_LAST, "    ) -> None:\n", parameters(options, names))


def stateful_dataloader(text: str, options: Options) -> str:
    """``StatefulDataLoader``: the arguments that it has in addition, its signature."""
    added = [name for name, about in options.table.items() if about.is_of_states]
    entries = "".join(argument(name, options.texts[name]) for name in added)
    text = between(text, "\n    Args:\n", "\n    Raises:\n", entries)
    names = options.of_class(has_states=True)
    return between(text, _TORCHS_LAST, "    ) -> None:\n", parameters(options, names))


def install(text: str, options: Options) -> str:
    """``install``: which options do not reach which loaders."""
    begin = "These options are ignored:\n\n"
    end = "\n    Forked children inherit the change."
    device, others = in_worker(options, "is left out"), in_worker(options, "is left out by install")
    loaders = (
        f"A loader that a dataset makes in a worker process ignores {device}, because the main process "
        f"moves the worker's batches. It also ignores {others}, which are for loaders of the main process."
    )
    names = [name for name, about in options.table.items() if about.instead is None]
    aside = all_excluded(options, 4, names, lambda rule: bool(rule.is_left_aside))
    return between(text, begin, end, f"{aside}\n{wrapped(rst(loaders), 4, 0)}")


def given(text: str, options: Options) -> str:
    """The types of options that ``install`` and ``convert`` take."""
    names = [name for name, about in options.table.items() if about.instead is None]
    head, found, _ = text.partition('for type checkers."""\n\n')
    lines = [f"    {name}: {options.annotation(name)}\n" for name in names]
    return head + found + "".join(lines)


def page_of_options(text: str, options: Options) -> str:
    """``docs/options.md``: a section for each option, by topic, and where options work."""
    from ringloader._features.rules import TOPICS

    sections = ""
    for topic in TOPICS:
        names = [name for name, texts in options.texts.items() if texts.topic == topic]
        names.sort(key=lambda name: not options.table[name].is_torchs)
        sections += f"### {topic}\n\n" + "".join(section(options, name) for name in names)
    text = between(text, "\n## Options\n\n", "## Where options work\n", sections)
    return between(text, "has no effect.\n\n", "\n## Environment variables\n", where(options))


GENERATED: dict[str, Callable[[str, Options], str]] = {
    f"{PACKAGE}/dataloader.py": dataloader,
    f"{PACKAGE}/stateful_dataloader.py": stateful_dataloader,
    f"{PACKAGE}/_patch/install.py": install,
    f"{PACKAGE}/_patch/by_name.py": given,
    "docs/options.md": page_of_options,
}


def main() -> None:
    """Writes, or checks, all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="writes nothing, and fails if a file is stale")
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args()
    options = Options(given.root)
    stale = []
    for name, write in GENERATED.items():
        file = given.root / name
        before = file.read_text()
        now = write(before, options)
        if now != before:
            stale.append(name)
            if not given.check:
                file.write_text(now)
    if stale and given.check:
        raise SystemExit(f"stale, run `make generate`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
