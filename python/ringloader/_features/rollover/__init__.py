"""``last_batch``: the samples that are left at the end of an epoch are kept, dropped or rolled over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringloader._features.rules import Conflict, Facts, option

if TYPE_CHECKING:
    from ringloader._torch.protocols import TorchLoader


def _check_last_batch(name: str, value: Any) -> None:
    if value not in (None, "keep", "discard", "rollover"):
        raise ValueError(f"{name} must be 'keep', 'discard', 'rollover' or None, not {value!r}")


LAST_BATCH = option(
    None,
    check=_check_last_batch,
    on_torchs="works",
    instead="give the loader a ringloader.RolloverBatchSampler",
)


def _differs_from_batch_sampler(options: Any, facts: Facts) -> object:
    loader = facts.loader
    return (
        loader.batch_sampler is not None
        and loader.batch_size is None
        and facts.last_batch != options.last_batch
    )


RULES = (
    Conflict(
        "last_batch",
        "with `batch_size=None`",
        "made",
        lambda _, facts: facts.loader.batch_sampler is None,
        "last_batch={options.last_batch!r} and batch_size=None do not go together: without batches there is "
        "no last one; pass a batch_size",
    ),
    Conflict(
        "last_batch",
        "with a `batch_sampler` that treats its last batch in another way",
        "made",
        _differs_from_batch_sampler,
        "last_batch={options.last_batch!r} and batch_sampler={facts.loader.batch_sampler!r:.200} do not go "
        "together: a batch sampler says itself what becomes of its last batch; leave last_batch out, or pass "
        "a ringloader.RolloverBatchSampler to roll over",
    ),
    Conflict(
        "last_batch",
        'with `drop_last`, unless `"discard"`',
        "made",
        lambda options, facts: facts.loader.drop_last and options.last_batch != "discard",
        "last_batch={options.last_batch!r} and drop_last={facts.loader.drop_last!r} do not go together: "
        "leave drop_last out",
    ),
    Conflict(
        "last_batch",
        "with an `IterableDataset`",
        "made",
        lambda options, facts: options.last_batch == "rollover" and facts.is_iterable,
        "last_batch='rollover' and an IterableDataset do not go together: its samples have no indices that "
        "could wait for the next epoch; use 'keep' or 'discard'",
        value='"rollover"',
    ),
)


def complete(loader: TorchLoader, options: Any, _has_default_prefetch: bool) -> None:
    """Sets the treatment of last batches in a loader of torch's that was just made and checked."""
    last_batch = options.last_batch
    if loader.batch_size is None:
        # The program's own batch sampler decides that.
        return
    if last_batch == "discard":
        # Past torch's `__setattr__`, which refuses it from now on. The batch sampler is the loader's own.
        vars(loader)["drop_last"] = True
        loader.batch_sampler.drop_last = True
    elif last_batch == "rollover":
        # Not before a loader asks for it: it needs torch.
        from ringloader._sources.rollover import RolloverBatchSampler

        vars(loader)["batch_sampler"] = RolloverBatchSampler(loader.sampler, loader.batch_size)
