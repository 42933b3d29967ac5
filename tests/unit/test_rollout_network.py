"""Ports for servers: free now, and out of reach of the kernel. Interfaces, found by their addresses."""

import random
import socket
from pathlib import Path

import pytest

from slipstream.rollout.system.network import (
    hold_port,
    hold_ports,
    interface_of,
    port_of,
    process_group_variables,
)


def test_a_held_port_is_for_its_server_and_for_nobody_else():
    with hold_port("127.0.0.1") as holder, socket.socket() as other:
        address = ("127.0.0.1", port_of(holder))
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address) as server, socket.create_connection(address, timeout=60) as client:
            accepted, _ = server.accept()
            accepted.sendall(b"here")
            assert client.recv(4) == b"here"
            accepted.close()


def test_a_held_port_is_drawn_once(monkeypatch):
    """Everybody draws the same numbers; those that are held are passed over."""
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [*ports][:count])
    with hold_port("127.0.0.1") as first, hold_port("127.0.0.1") as second:
        assert port_of(first) < port_of(second)


def test_a_held_port_is_none_that_the_kernel_gives_away():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        with hold_port("127.0.0.1") as holder:
            assert port_of(holder) < lowest


def test_consecutive_ports_are_held_together_or_none_of_them(monkeypatch):
    draw = random.SystemRandom.sample
    holders = hold_ports("127.0.0.1", 8)
    first = port_of(holders[0])
    assert [port_of(holder) for holder in holders] == [*range(first, first + 8)]
    for holder in holders:
        holder.close()
    with socket.create_server(("127.0.0.1", first + 3)):
        # Other programs of the machine may hold any port: what is drawn next is left to chance.
        monkeypatch.setattr(
            random.SystemRandom, "sample", lambda self, ports, count: [first, *draw(self, ports, count)]
        )
        holders = hold_ports("127.0.0.1", 8)
        second = port_of(holders[0])
        assert [port_of(holder) for holder in holders] == [*range(second, second + 8)]
        assert not set(range(first, first + 4)) & set(range(second, second + 8))
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [first, second])
        with pytest.raises(OSError, match="no 8 consecutive TCP ports"):
            hold_ports("127.0.0.1", 8)
        with socket.create_server(("127.0.0.1", first)):
            """The ports before the one in use are free again."""
    for holder in holders:
        holder.close()


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_is_an_error_that_names_the_interfaces():
    with pytest.raises(OSError, match=r"198\.51\.100\.7: .*lo"):
        interface_of("198.51.100.7")


def test_process_groups_of_one_machine_stay_on_loopback_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert process_group_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_between_machines_the_users_choice_of_an_interface_counts(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setattr("slipstream.rollout.system.network.interface_of", lambda address: "eth0")
    variables = process_group_variables("10.77.0.11")
    assert variables == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
