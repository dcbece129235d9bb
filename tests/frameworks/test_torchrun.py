"""torchrun with DistributedSampler: two gloo ranks, DDP on the CPU."""

import pytest

from frameworks import launch


@pytest.mark.slow
@pytest.mark.limit(300)
def test_two_ranks_train_the_same(tmp_path):
    launch.run_ranks("script_torchrun.py", tmp_path)
