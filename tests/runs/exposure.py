"""What other users and other machines could reach of running processes, as the kernel tells it."""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil


def listening(pids: Iterable[int]) -> list[str]:
    """Return the TCP sockets on which processes listen, as ``address:port program``."""
    sockets: list[str] = []
    for pid in pids:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    sockets.append(f"{connection.laddr.ip}:{connection.laddr.port} {process.name()}")
    return sockets


def beyond_loopback(sockets: Iterable[str]) -> list[str]:
    """Return those of ``sockets`` that other machines may reach."""
    return [entry for entry in sockets if not _is_loopback(entry.split()[0].rpartition(":")[0])]


def _is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None  # ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback


def unix_sockets(pids: Iterable[int]) -> set[Path]:
    """Return the paths of the Unix sockets that processes hold."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("unix")
            paths |= {Path(entry.laddr) for entry in connections if str(entry.laddr).startswith("/")}
    return {path for path in paths if path.exists()}


def is_private(path: Path) -> bool:
    """Return whether this user alone can open a path: it, or a folder above it, is closed to others."""
    return any(
        step.exists() and step.stat().st_uid == os.geteuid() and not stat.S_IMODE(step.stat().st_mode) & 0o077
        for step in (path, *path.parents)
    )


def variables(pids: Iterable[int], name: str) -> set[str]:
    """Return the values of an environment variable of processes."""
    values: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                key, _, value = entry.decode(errors="replace").partition("=")
                if key == name:
                    values.add(value)
    return values


def command_lines(pids: Iterable[int]) -> str:
    """Return the command lines of processes, which every user of the machine can read."""
    lines: list[str] = []
    for pid in pids:
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " "))
    return "\n".join(lines)
