"""Addresses, interfaces and TCP ports of this machine."""

import os
import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

FIRST_PORT = 20_000
"""Smallest port that is drawn. Ray gives the ports from 10,002 to 19,999 to its workers."""


def hold_port(host: str) -> socket.socket:
    """Return a socket that holds a free TCP port of ``host``, an address of this machine, until it is closed.

    In the meantime a server may bind the port, as all do that set SO_REUSEADDR, but nobody draws it a second
    time: a server that has imported its libraries for half a minute still finds it free. The port lies below
    the range from which the kernel takes the ports of outgoing connections and of servers that bind port 0.
    Raises OSError when no port is free.
    """
    for port in [*_drawn_ports(), 0]:
        with suppress(OSError):
            return _holder(host, port)
    raise OSError(f"no TCP port is free on {host}")


def hold_ports(host: str, count: int) -> list[socket.socket]:
    """Return sockets that hold ``count`` consecutive ports, each as ``hold_port`` does. Raises OSError."""
    for first in _drawn_ports():
        holders: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                holders.append(_holder(host, port))
        except OSError:
            for holder in holders:
                holder.close()
        else:
            return holders
    raise OSError(f"no {count} consecutive TCP ports are free on {host}")


def _drawn_ports() -> list[int]:
    kernels_first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    # SystemRandom, because the seeds of a run make all ranks draw the same numbers from `random`.
    return random.SystemRandom().sample(range(FIRST_PORT, max(int(kernels_first), FIRST_PORT + 1000)), 100)


def _holder(host: str, port: int) -> socket.socket:
    holder = socket.socket()
    try:
        holder.bind((host, port))  # without SO_REUSEADDR, with which it would bind what another one holds
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder


def port_of(holder: socket.socket) -> int:
    """Return the port that a socket of ``hold_port`` holds."""
    return holder.getsockname()[1]


def interface_of(address: str) -> str:
    """Return the network interface that has ``address``, an address of this machine. Raises OSError."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise OSError(f"no network interface of this machine has the address {address}: {', '.join(interfaces)}")


def process_group_variables(address: str) -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL listen on the interface of ``address`` only.

    Without them gloo takes the address of the host name, and NCCL every interface. Between machines, the
    user's own choice of an interface is kept.
    """
    interface = interface_of(address)
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if ip_address(address).is_loopback:
        return variables
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def directly(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that let clients reach a host without the environment's HTTP proxy."""
    hosts = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, [hosts, host])))
