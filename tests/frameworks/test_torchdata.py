"""torchdata: StatefulDataLoader has iterators and a worker loop of its own, and is left alone."""

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from frameworks import loader_ways, training
from parity.describe import describe


def resumed(take):
    """Two batches, the state, and from a new loader what follows it."""
    loader = StatefulDataLoader(training.Points(), batch_size=4, num_workers=2, shuffle=True)
    iterator = iter(loader)
    seen = [describe(next(iterator)) for _ in range(take)]
    state = loader.state_dict()
    again = StatefulDataLoader(training.Points(), batch_size=4, num_workers=2, shuffle=True)
    again.load_state_dict(state)
    rest = [describe(batch) for batch in again]
    assert len(seen) + len(rest) == 6
    return [seen, rest]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("way_name", ["install"])
@pytest.mark.parametrize("take", [0, 2, 6])
def test_it_is_left_alone_under_install(way_name, take):
    with loader_ways.use("torch"):
        expected = resumed(take)
    with loader_ways.use(way_name) as way:
        assert resumed(take) == expected
        assert way.made == []
        # install() is in force all the same.
        assert len(list(way.DataLoader(training.Points(), batch_size=12, num_workers=1))) == 2
    assert len(way.made) == 1
