"""Where torch's own loader runs there are no states; and the states of DataPipes."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.utils.data.datapipes.map import SequenceWrapper

import ringloader
from ringloader._torch import select_path

N = 23


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_torchs_own_loader_has_no_state(options, monkeypatch, caplog):
    loader = ringloader.StatefulDataLoader(range(N), 4, True, collate_fn=list, **options)
    next(iter(loader))
    state = loader.state_dict()
    assert state["_num_yielded"] == 1
    monkeypatch.setattr(select_path, "_logged", set())
    monkeypatch.setenv("RINGLOADER", "off")
    torch.manual_seed(7)
    epochs = [list(torch.utils.data.DataLoader(range(N), 4, True, collate_fn=list, **options))]
    loader = ringloader.StatefulDataLoader(range(N), 4, True, collate_fn=list, **options)
    torch.manual_seed(7)
    assert [list(loader)] == epochs
    assert loader.state_dict() == {}
    assert loader.fingerprint() is None
    assert "state_dict() returns {}" in caplog.text and "RINGLOADER=off" in caplog.text
    # With what accelerate adds to any state.
    for empty in ({}, {"_iterator_finished": True}):
        loader.load_state_dict(empty)
        assert sorted(itertools.chain(*loader)) == list(range(N))
    loader.load_state_dict(state)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="cannot take effect: torch's own loader runs: RINGLOADER=off"):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), before)
    # The state is kept for a loader of ours.
    monkeypatch.delenv("RINGLOADER")
    resumed = ringloader.StatefulDataLoader(range(N), 4, True, collate_fn=list, **options)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 5


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "in_order": False}])
def test_map_style_pipes(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = SequenceWrapper(range(N))

    def loader_of():
        return ringloader.StatefulDataLoader(pipe, batch_size=4, collate_fn=list, shuffle=True, **options)

    loader = loader_of()
    iterator = iter(loader)
    got = list(itertools.islice(iterator, 2))
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert sorted(itertools.chain(*got, *rest)) == list(range(N))
    if options.get("in_order", True):
        assert rest == list(iterator)
