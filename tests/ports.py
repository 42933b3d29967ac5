"""Ports for servers that tests start later on."""

import socket

from slipstream.rollout.system.network import hold_port, port_of

_HELD: list[socket.socket] = []


def held_port() -> int:
    """Return a loopback port that only its server may bind as long as this process lives."""
    _HELD.append(hold_port("127.0.0.1"))
    return port_of(_HELD[-1])
