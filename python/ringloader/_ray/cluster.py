"""The cluster: whether it can be used, what it has, and actors of it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

import ray

from ringloader._ray.actor import Worker


def connect() -> None:
    """Connects to a cluster, or starts one, if this program has none.

    Raises:
        RuntimeError: If the program uses Ray Client: it is not in the cluster.
    """
    from ray.util.client import ray as client

    if client.is_connected():
        raise RuntimeError(
            "Workers on a cluster cannot be used over Ray Client (ray://): workers connect to this program; "
            "run it in the cluster, such as by `ray job submit`"
        )
    if not ray.is_initialized():
        ray.init()


def connection() -> tuple[str, str] | None:
    """Returns the node and the job of this program; None if it is in no cluster.

    Ask before a call to Ray that must not connect: most calls do, and may start a cluster.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def address_of(host: str | None) -> str:
    """Returns the IP address at which the main process listens.

    Args:
        host: The address or name that was given; None for that of this node.

    Raises:
        ValueError: If there is no such host.
    """
    name = ray.util.get_node_ip_address() if host is None else host
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(
            f"host={host!r} is not known ({error}); pass an IP address of this machine"
        ) from error


def new_actor(options: Mapping[str, Any]) -> Any:
    """Returns the handle of a new actor, which starts once the cluster has room for it."""
    # After a restart Ray would run its tasks in any order, without the state of the loop.
    return ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **options).remote()


def resources_in_words(asked: Mapping[str, Any]) -> str:
    """Returns the resources that an actor asks for, and the amounts that are left in the cluster."""
    left = ray.available_resources()
    wanted = {"CPU": asked.get("num_cpus") or 0, **(asked.get("resources") or {})}
    if asked.get("num_gpus"):
        wanted["GPU"] = asked["num_gpus"]
    if asked.get("memory"):
        wanted["memory"] = asked["memory"]
    parts = [
        f"{name} {_number(amount)} ({_number(left.get(name, 0))} left)" for name, amount in wanted.items()
    ]
    return ", ".join(parts)


def _number(amount: float) -> str:
    return f"{amount:,.10g}"
