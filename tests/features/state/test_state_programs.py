"""Random programs of ``state_programs.py``: what comes before a state and after it is the whole epoch."""

import pytest

from features.state import state_programs

# `make test` runs the first blocks.
FAST, SLOW, BLOCK = 3, 22, 14


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "block",
    [*range(FAST), *(pytest.param(block, marks=pytest.mark.slow) for block in range(FAST, FAST + SLOW))],
)
def test_a_stopped_epoch_goes_on(block):
    failures = {}
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        program = state_programs.made(number)
        failure = state_programs.failure_of(program)
        if failure is not None:
            failures[state_programs.text_of(program)] = failure
    assert not failures, "\n".join(f"{text}\n  {failure}" for text, failure in failures.items())


def broken(program):
    """Returns how a program fails whose resumed loader passes over one batch too many."""
    load = state_programs.ringloader.StatefulDataLoader.load_state_dict

    def loaded(self, state):
        load(self, state | {"_num_yielded": state["_num_yielded"] + 1})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_programs.ringloader.StatefulDataLoader, "load_state_dict", loaded)
        patch.setattr(state_programs.ringloader.StatefulDataLoader, "state_dict", given_back(load))
        return state_programs.failure_of(program)


def given_back(_load):
    state_dict = state_programs.ringloader.StatefulDataLoader.state_dict

    def given(self):
        state = state_dict(self)
        is_loaded = "_ringloader_loaded_state" in vars(self)
        return state | {"_num_yielded": state["_num_yielded"] - is_loaded}

    return given


def test_a_lost_batch_is_found():
    assert state_programs.failure_of(state_programs.Program()) is None
    assert broken(state_programs.Program()).startswith("Wrong rest")
