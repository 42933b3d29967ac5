"""TCP ports for servers that bind theirs only after seconds of starting."""

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST_PORT = 20_000
"""Smallest port that is drawn. Ray gives the ports from 10,002 to 19,999 to its workers."""


def free_port(host: str) -> int:
    """Return a TCP port that is free on ``host``, an address of this machine, and likely to stay free.

    The port lies below the range from which the kernel takes the ports of outgoing connections and of
    whoever binds port 0, so that it is still free when a server binds it seconds later. Raises OSError
    when no port is free.
    """
    kernels_first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    # SystemRandom, because the seeds of a run make all ranks draw the same numbers from `random`.
    ports = random.SystemRandom().sample(range(FIRST_PORT, max(int(kernels_first), FIRST_PORT + 1000)), 100)
    for port in [*ports, 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return probe.getsockname()[1]
    raise OSError(f"no TCP port is free on {host}")
