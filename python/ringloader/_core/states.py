"""The states of a loader, as iterators see them: a class of loaders has them, or its iterators know none.

Only ``StatefulDataLoader`` has states. Iterators find them by the loader's class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import ringloader._native as _native
    from ringloader._common.protocols import OurIterator
    from ringloader._torch.protocols import TorchIterator, TorchLoader

# The attribute of a class of loaders that has its states.
ATTRIBUTE = "_ringloader_states"


class Rest(NamedTuple):
    """The rest of an epoch that resumes from a state, for the places of its samples.

    Attributes:
        number: The number by which the samples' keys are made.
        passed: Ranges of samples that are passed over, each from its first to the one after its last.
        start: The place where the epoch began for the present number of ranks.
    """

    number: int
    passed: Sequence[tuple[int, int]]
    start: int


class Epoch(Protocol):
    """An epoch whose state can be asked for."""

    # The seed of the workers, which the iterator then does not draw.
    given_seed: int | None
    # The sampler that the loader gave for this epoch; None: torch's iterator asks the loader.
    index_sampler: Any
    # The states of its dataset (`_features/state/dataset_state.py::DatasetState`), if it may have any.
    dataset: Any

    @property
    def is_drawn(self) -> bool:
        """True if the epoch resumes, and has drawn before all that ``iter`` draws."""

    @property
    def rest(self) -> Rest | None:
        """The part that is still to be read; None for an epoch that begins."""

    def start_of(self, worker: int) -> Any:
        """Returns where a worker begins; None: at the beginning of the epoch."""

    def begin(self, iterator: TorchIterator, drawn: bool) -> None:
        """Records the seeds of an iterator, and whether this epoch has drawn them."""

    def index_source(self, iterator: TorchIterator, places: _native.Places | None) -> _native.IndexSource:
        """Returns the source of the tasks of an iterator with workers."""

    def read(self, iterator: TorchIterator, options: Sequence[Any]) -> None:
        """Makes an iterator without workers, which has these options, read the epoch from where it is."""

    def next_index(self, read: Callable[[], Any]) -> Any:
        """Returns the index that ``read`` gives an iterator without workers."""

    def count_errors(self, collecting: Any) -> None:
        """Makes ``Collecting`` count the bad samples from where the epoch begins."""

    def record_error(self, iterator: OurIterator, error: BaseException) -> None:
        """Records that ``next`` has raised."""


class TorchsEpoch(Protocol):
    """An epoch that torch's own loader runs whole, whose state can be asked for."""

    @property
    def epoch(self) -> Epoch:
        """The epoch."""

    def attach(self, iterator: OurIterator) -> None:
        """Makes this the epoch of an iterator, whose ``_batches_returned`` says what the caller has."""

    def make(self, loader: TorchLoader, get_iterator: Callable[[Any], Any]) -> Any:
        """Returns torch's iterator, which reads the sampler through this epoch."""

    def reset(self, iterator: TorchIterator, loader: TorchLoader) -> None:
        """Begins this epoch with the workers of an iterator of torch's that has had one."""

    def next(self, iterator: TorchIterator) -> Any:
        """Returns the next batch of an iterator of torch's."""


class States(Protocol):
    """The states of a class of loaders."""

    def begin(
        self,
        loader: TorchLoader,
        iterator: OurIterator,
        number: int,
        loaded: Any,
        are_same: bool = False,
    ) -> Epoch:
        """Begins an epoch, before anything is drawn for it. :meth:`has_begun` makes its state the loader's.

        Args:
            loader: The loader.
            iterator: Its iterator, which the epoch does not keep alive.
            number: The number of the epoch.
            loaded: The state from which it resumes; None: it begins.
            are_same: True if the workers are those of the epoch before.
        """

    def begin_torchs(
        self, loader: TorchLoader, reason: str, get_iterator: Any, are_same: bool = False
    ) -> TorchsEpoch | None:
        """Begins an epoch that torch's own loader runs whole. None: it has no state."""

    def has_begun(self, loader: TorchLoader, epoch: Any) -> None:
        """Makes an epoch that has begun the loader's: the last step of ``iter``."""

    def loaded_of(self, loader: TorchLoader) -> Any:
        """Returns the state with which the next epoch begins, if one was loaded."""

    def ask_dataset(self, loader: TorchLoader) -> bool:
        """True if the dataset of a loader has, or may have, a part in the loader's state."""

    def worker_option(self, loader: TorchLoader) -> Any:
        """Returns the option that takes the states of a loader's dataset, if it may have one."""


def of(loader: object) -> States | None:
    """Returns the states of a loader's class; None for a class that has none."""
    found: States | None = getattr(type(loader), ATTRIBUTE, None)
    return found


def loaded_of(loader: TorchLoader) -> Any:
    """Returns the state with which the next epoch of a loader begins, if one was loaded."""
    states = of(loader)
    return None if states is None else states.loaded_of(loader)
