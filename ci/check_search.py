#!/usr/bin/env python3
"""Searches the built site for words that people type, and fails if the right page is not the first result.

The theme searches in the browser with lunr.js; ``ci/check_search.py SITE`` does the same with Python's lunr.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from lunr import get_default_builder
from lunr.stop_word_filter import stop_word_filter

# The word: the page, and where it matters the section.
EXPECTED = {
    "adopt": "guides/production.html",
    "bottleneck": "guides/is_it_the_loader.html",
    "breakpoint": "troubleshooting.html#debug-a-dataset",
    "bug": "guides/production.html#report-a-bug-or-ask",
    "bus error": "troubleshooting.html#bus-error",
    "checkpoint": "guides/resuming.html",
    "cite": "guides/production.html#cite",
    "crash": "restarts.html",
    "ctrl-c": "troubleshooting.html#ctrl-c",
    "cuda fork": "troubleshooting.html#cuda-in-the-main-process-and-workers",
    "ddp": "frameworks/index.html#ddp-fsdp-and-torchrun",
    "deadlock": "watchdog.html",
    "debug": "troubleshooting.html#debug-a-dataset",
    "differences": "differences.html",
    "disable": "guides/production.html#rollback-ringloaderoff",
    "docker": "tuning.html#docker-and-other-containers",
    "hang": "watchdog.html",
    "how many workers": "tuning.html#how-many-workers",
    "how much memory": "guides/production.html#memory-how-much-a-loader-takes",
    "huggingface": "frameworks/datasets.html",
    "image": "images.html",
    "jpeg": "images.html",
    "jupyter": "guides/notebooks.html",
    "keyboardinterrupt": "troubleshooting.html#ctrl-c",
    "kubernetes": "tuning.html#docker-and-other-containers",
    "license": "index.html",
    "lightning": "frameworks/lightning.html",
    "max_shared_bytes": "tuning.html#max_shared_bytes",
    "memory leak": "troubleshooting.html",
    "mid-epoch": "guides/resuming.html",
    "notebook": "guides/notebooks.html",
    "oom": "troubleshooting.html#out-of-memory",
    "out of memory": "troubleshooting.html#out-of-memory",
    "overhead": "benchmarks.html",
    "padding": "batchify.html",
    "pdb": "troubleshooting.html#debug-a-dataset",
    "pin_memory": "accelerators.html",
    "production": "guides/production.html",
    "report bug": "guides/production.html#report-a-bug-or-ask",
    "restart_workers": "options.html#restart_workers",
    "resume": "guides/resuming.html",
    "rollback": "guides/production.html#rollback-ringloaderoff",
    "seed": "seeds.html",
    "shm": "limits.html#a-small-devshm-a-full-disk",
    "skip sample": "bad_samples.html",
    "slurm": "guides/resuming.html#stop-on-a-signal",
    "streaming": "dispatch.html",
    "timeout": "watchdog.html",
    "too many open files": "limits.html#too-many-open-files",
    "tqdm": "quickstart.html#progress-bars-tqdm",
    "windows": "installation.html",
}


class Search:
    """The search of mkdocs-material: its boosts for titles and pages, and a wildcard behind each word."""

    def __init__(self, index: dict[str, Any]) -> None:
        self._words = re.compile(index["config"]["separator"])
        # The theme's default; another one would need another search here.
        assert index["config"]["pipeline"] == ["stopWordFilter"]
        builder = get_default_builder()
        builder.pipeline.reset()
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline.reset()
        builder.b(0)
        builder.ref("location")
        for name in ("title", "text"):
            builder.field(name, index["config"]["fields"][name]["boost"])
        for page in index["docs"]:
            document = {name: self._split(re.sub("<[^>]*>", " ", page[name])) for name in ("title", "text")}
            builder.add({"location": page["location"], **document}, {"boost": page.get("boost", 1)})
        self._index = builder.build()

    def _split(self, text: str) -> list[str]:
        return [word for word in self._words.split(html.unescape(text).lower()) if word]

    def __call__(self, query: str) -> list[str]:
        """Returns the places of all results, the best first."""
        words = [word for word in self._split(query) if stop_word_filter(word)]
        scores = {}
        for found in self._index.search(" ".join(f"{word}*" for word in words)):
            matched = found["match_data"].metadata
            hits = sum(any(term.startswith(word) for term in matched) for word in words)
            boost = ("#" not in found["ref"]) + hits / len(words)
            scores[found["ref"]] = found["score"] * (1 + boost**2)
        return sorted(scores, key=lambda place: -scores[place])


def main(site: Path) -> int:
    """Prints each word that leads to another page, and returns the exit code."""
    search = Search(json.loads((site / "search" / "search_index.json").read_text()))
    wrong = 0
    for query, expected in EXPECTED.items():
        places = search(query)
        pages = [place.split("#")[0] for place in places[:1]]
        of_page = [place for place in places if place.split("#")[0] == expected.split("#")[0]]
        # The page is the first result. Of its sections, the one that is named comes first.
        if pages != [expected.split("#")[0]] or ("#" in expected and expected not in of_page[:2]):
            wrong += 1
            print(f"{query}: expected {expected}, found {places[:4]}")
    print(f"searched for {len(EXPECTED)} words: {wrong} lead to another page")
    return 1 if wrong or not EXPECTED else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
