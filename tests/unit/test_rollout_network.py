"""Ports for servers: free now, and out of reach of the kernel."""

import socket
from pathlib import Path

from slipstream.rollout.network import free_port


def test_a_free_port_can_be_bound():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port("127.0.0.1")))


def test_a_free_port_is_none_that_the_kernel_gives_away():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port("127.0.0.1") < lowest for _ in range(20))
