"""Ray Train: `prepare_data_loader` builds torch's class where it adds its sampler, else keeps ours."""

import secrets

import pytest

from frameworks import launch, loader_ways


@pytest.mark.slow
@pytest.mark.limit(300)
def test_two_workers(tmp_path):
    rays, users = tmp_path / "rays", tmp_path / "users"
    rays.mkdir()
    users.mkdir()
    # Without a token Ray writes one into the user's home.
    private = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = ["frameworks/script_ray.py", str(rays), str(users), "torch", *loader_ways.OURS]
    launch.run_program(command, seconds=270, environment=private)
    launch.check_ways(rays, names=("install",), unreached=("class",))
    launch.check_ways(users, names=loader_ways.OURS)
