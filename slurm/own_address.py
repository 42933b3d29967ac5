"""Print the address under which this node talks to another one.

    own_address.py HOST                          where the route to HOST starts; sends nothing
    own_address.py HOST --port P --timeout-s S   the same, once HOST accepts connections on port P; the end
                                                 of stdin ends the wait too (contain.py: who closes it)

A node of a cluster has several addresses, and `hostname --ip-address` may well give 127.0.1.1, a container
bridge or a management network. The source address of the route to a peer is one that the peer can answer to.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
import time
from typing import BinaryIO

CONNECT_S = 5.0
"""Longest wait for one connection: a firewall that answers nothing must not hide that the job has ended."""

RETRY_S = 0.2
"""A port that nobody listens on yet offers nothing to wait for."""


def route_source(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # a datagram socket only looks up the route; the port is arbitrary
        return str(sock.getsockname()[0])


def await_port(host: str, port: int, timeout_s: float, lifeline: BinaryIO | None = None) -> str:
    """Source address of the first connection that `host` accepts.

    Raises TimeoutError, naming the peer, after `timeout_s` or at the end of `lifeline`.
    """
    watched = [lifeline] if lifeline else []
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            patience_s = max(RETRY_S, min(CONNECT_S, deadline - time.monotonic()))
            with socket.create_connection((host, port), timeout=patience_s) as sock:
                return str(sock.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                message = f"{host}:{port} accepted no connection in {timeout_s:.0f} s: {error}"
                raise TimeoutError(message) from None
        ready, _, _ = select.select(watched, [], [], RETRY_S)
        if lifeline and ready and not lifeline.read(1):
            raise TimeoutError(f"the job ended before {host}:{port} accepted a connection")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print this node's address as a peer sees it.")
    parser.add_argument("host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    options = parser.parse_args()
    try:
        if options.port is None:
            print(route_source(options.host))
        else:
            print(await_port(options.host, options.port, options.timeout_s, lifeline=sys.stdin.buffer))
    except OSError as error:
        print(f"own_address.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
