"""A torch loader that exists, made ringloader's: in place, by its class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

import ringloader._features.all as features
import ringloader.bad_samples as bad_samples
from ringloader._features.devices import resolve
from ringloader._features.table import TABLE, Options, values_of
from ringloader._patch import by_name
from ringloader._patch.by_name import GivenOptions
from ringloader._torch import hook, internals
from ringloader.dataloader import DataLoader

_Ours = TypeVar("_Ours", bound=DataLoader[Any])
_T = TypeVar("_T")


@overload
def convert(loader: _Ours, **options: Unpack[GivenOptions]) -> _Ours: ...
@overload
def convert(loader: internals.Loader[_T], **options: Unpack[GivenOptions]) -> DataLoader[_T]: ...
def convert(loader: object, **options: Unpack[GivenOptions]) -> Any:
    """Makes an existing loader use ringloader, and returns the same object.

    The class changes. Dataset, sampler, generator and all other attributes stay. A plain
    ``torch.utils.data.DataLoader`` becomes a ``ringloader.DataLoader``. A loader of another class gets a new
    class with the same name, a subclass of its class and of ``ringloader.DataLoader``. Copies and pickles
    have the new class, too. A running iterator does not change.

    For type checkers, the result is a ``ringloader.DataLoader``. If your class has more attributes, use your
    own variable: it is the same object.

    Args:
        loader: A ``torch.utils.data.DataLoader``. For a ``ringloader.DataLoader`` only options change.
        **options: The keyword-only arguments of ``ringloader.DataLoader``. Options that are not given stay as
            they are.

    Raises:
        TypeError: If ``loader`` is not a loader, or makes its iterator without torch's ``_get_iterator``
            (torchdata's ``StatefulDataLoader``); if an option is unknown, or has the wrong type.
        ValueError: If an option is out of range, or its device does not exist.
        RuntimeError: If the loader's persistent workers already run: convert it before its first ``iter``.
    """
    by_name.check_names("convert()", options, ())
    # Not isinstance: accelerate's loaders name another class as theirs.
    cls = type(loader)
    if not issubclass(cls, internals.Loader):
        raise TypeError(
            f"convert() takes a torch.utils.data.DataLoader, not {loader!r:.200}"
            + (": convert the loader it stands in front of" if isinstance(loader, internals.Loader) else "")
        )
    reason = hook.reason_not_reached(loader, internals.Loader)
    if reason is not None:
        raise TypeError(f"convert() cannot reach it: {reason}")
    if getattr(loader, "_iterator", None) is not None:
        raise RuntimeError(
            "the loader's persistent workers run already: convert() it before its first iter(), or end them "
            "before, with loader._iterator = None"
        )
    was_ours = issubclass(cls, DataLoader)
    before = values_of(loader) if was_ours else {}
    bad_samples.forget_limit(before, options)
    # All of them together, before the first is set.
    now = Options(**{**before, **options})
    resolve(now.device)
    at: Any = loader
    features.check_made(at, now, options)
    vars(at).update(features.arguments_for(at, now, options, at.num_workers))
    if at.num_workers:
        at.prefetch_factor = at.prefetch_factor or _TORCHS_PREFETCH
    if not was_ours:
        _set_class(loader, _converted(cls))
    features.complete(at, now, options, at.prefetch_factor == _TORCHS_PREFETCH)
    return loader


# The `prefetch_factor` that torch sets for a loader with workers that was given none.
_TORCHS_PREFETCH = 2


def _converted(cls: Any) -> Any:
    """``cls``, with ringloader's class between it and torch's."""
    if cls is internals.Loader:
        return DataLoader
    for made in cls.__subclasses__():
        if made.__dict__.get("_ringloader_converted") is cls:
            return made
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__init__": _init_of(cls),
        "__reduce_ex__": _reduce,
        "_ringloader_converted": cls,
    }
    return type(cls)(cls.__name__, (cls, DataLoader), names)


def _init_of(cls: Any) -> Callable[..., None]:
    """The constructor of a converted class: that of ``cls``, and the options that ``cls`` does not take.

    Lightning makes a loader anew with the arguments that the signature names.
    """
    signature = inspect.signature(cls.__init__)
    parameters = list(signature.parameters.values())
    options = {
        name: parameter
        for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
        if name in TABLE
        and TABLE[name].instead is None
        and not TABLE[name].is_torchs
        and name not in signature.parameters
    }
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    signature = signature.replace(parameters=[*parameters[:at], *options.values(), *parameters[at:]])

    @functools.wraps(cls.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in options if name in kwargs}
        super(_converted(cls), self).__init__(*args, **kwargs)
        # `cls` may have passed some of its own on.
        others = {name: value for name, value in given.items() if value != getattr(Options, name)}
        if others:
            convert(self, **others)

    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


def _set_class(loader: object, cls: Any) -> None:
    # Not through the loader's own __setattr__.
    object.__setattr__(loader, "__class__", cls)


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickles a loader as the class that it had before, which others can import, to be converted again."""
    made = type(self)
    cls = made._ringloader_converted
    reduced = super(made, self).__reduce_ex__(protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *state = reduced
    plain = tuple(cls if argument is made else argument for argument in arguments)
    return _rebuild, (cls if function is made else function, plain), *state


def _rebuild(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    loader = function(*arguments)
    _set_class(loader, _converted(type(loader)))
    return loader
