"""The broadcast group between processes over gloo. The engine's side is built as SGLang builds it."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.transport.distributed import DistributedTransport
from slipstream.bridge.transport.rendezvous import BroadcastFailed, BroadcastGroup, Rendezvous
from tests.ranks import run_ranks

PATIENCE = timedelta(seconds=60)


def join_like_sglang(request: dict):
    """Join as ``sglang.srt.utils.init_custom_process_group`` does, with its default time-out."""
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        default_pg_timeout,
        rendezvous,
    )

    url, size = f"tcp://{request['address']}:{request['port']}", request["world_size"]
    store, rank, size = next(rendezvous(url, request["rank_offset"], size, timeout=default_pg_timeout))
    store.set_timeout(default_pg_timeout)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(request["backend"]),
        PrefixStore(request["group"], store),
        group_name=request["group"],
        backend_options=None,
        timeout=default_pg_timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def serve_engine(wire: TCPStore) -> list[tuple[str, float]]:
    """Answer the other rank's requests like an engine until it sends ``finish``. Returns what it received."""
    groups, received = {}, []
    for number in itertools.count():
        request = json.loads(wire.get(f"request-{number}"))
        error = None
        try:
            match request.pop("what"):
                case "join_group":
                    groups[request["group"]] = join_like_sglang(request)
                case "leave_group":
                    dist.destroy_process_group(groups.pop(request["group"]))
                case "receive":
                    flat = torch.empty(sum(map(torch.Size.numel, map(torch.Size, request["shapes"]))))
                    dist.broadcast(flat, group=groups[request["group"]], group_src=0)
                    received.append((request["names"][0], flat.sum().item()))
                case "finish":
                    wire.set(f"answer-{number}", "null")
                    return received
        except Exception as failure:
            error = type(failure).__name__
        wire.set(f"answer-{number}", json.dumps(error))


class RemoteEngine:
    """The ``EngineEndpoint`` of the engine on the other rank; requests and answers travel through a store."""

    name = address = "remote"
    ranks = 1

    def __init__(self, wire: TCPStore) -> None:
        self._wire = wire
        self._numbers = itertools.count()
        self.answers: list[tuple[str, str | None]] = []

    async def ask(self, what: str, **request) -> None:
        number = next(self._numbers)
        self._wire.set(f"request-{number}", json.dumps({"what": what, **request}))
        error = json.loads(await asyncio.to_thread(self._wire.get, f"answer-{number}"))
        self.answers.append((what, error))
        if error:
            raise RuntimeError(error)

    async def join_group(self, **request) -> None:
        await self.ask("join_group", **request)

    async def leave_group(self, group) -> None:
        await self.ask("leave_group", group=group)

    async def receive(self, *, names, shapes, dtype, group, flush_cache, version) -> None:
        await self.ask("receive", names=names, shapes=shapes, group=group)

    async def respond(self) -> None: ...
    async def pause(self, mode) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def resume(self) -> None: ...


class RefusingEngine(RemoteEngine):
    name = address = "refusing"

    def __init__(self) -> None: ...
    async def join_group(self, **request) -> None:
        await asyncio.sleep(0.5)
        raise ConnectionRefusedError("nobody there")


def publish_twice(wire: TCPStore) -> dict:
    """Publish beside an engine that refuses to join, and then again to the group that was made."""
    engine = RemoteEngine(wire)
    timeouts = Timeouts(30, 30)
    transport = DistributedTransport(address="127.0.0.1", backend="gloo", timeouts=timeouts, label="weights")
    publisher = Publisher(transport, interrupt="retract", timeouts=timeouts)

    def buckets(version: int):
        for i in range(2):
            flat = torch.full((6,), float(10 * version + i))
            yield FlatBucket((f"v{version}.{i}",), ((2, 3),), flat, i == 1)

    start = time.monotonic()
    first = asyncio.run(publisher.publish(1, [engine, RefusingEngine()], buckets(1)))
    first_s = time.monotonic() - start
    second = asyncio.run(publisher.publish(2, [engine], buckets(2)))
    asyncio.run(engine.ask("finish"))
    return {"first": first, "first_s": first_s, "second": second, "answers": engine.answers}


DOOMED = """
import json, sys
from tests.unit.test_bridge_transport import join_like_sglang
group = join_like_sglang(json.loads(sys.argv[1]))
print("joined", flush=True)
sys.stdin.read()
"""


def lose_a_member(rank) -> float | str:
    """Kill the first of two engines in a group.

    Returns, on the sender, the seconds from when it left the group until the other engine failed, and on that
    engine how its broadcast ended.
    """
    wire = TCPStore("127.0.0.1", rank.port, 2, rank.rank == 0, PATIENCE)
    if rank.rank:
        group = join_like_sglang(json.loads(wire.get("request")))
        try:
            dist.broadcast(torch.zeros(1 << 20), group=group, group_src=0)
        except RuntimeError as error:
            wire.set("failed", str(error))
            return "failed"
        return "received"
    rendezvous = Rendezvous("127.0.0.1", 3, 30)
    request = {
        "address": "127.0.0.1",
        "port": rendezvous.port,
        "rank_offset": 1,
        "world_size": 3,
        "group": "g",
        "backend": "gloo",
    }
    doomed = subprocess.Popen(
        [sys.executable, "-c", DOOMED, json.dumps(request)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    wire.set("request", json.dumps(request | {"rank_offset": 2}))
    group = BroadcastGroup("gloo", rendezvous, "g", 30)
    doomed.stdout.readline()
    doomed.kill()
    doomed.wait()
    with pytest.raises(BroadcastFailed) as failure:
        group.send(torch.zeros(1 << 20))
    group.close()
    began = time.monotonic()
    wire.get("failed")
    del failure  # a caller holds the error all the time, as here
    return time.monotonic() - began


def test_when_the_sender_leaves_a_broken_group_its_other_members_fail_at_once():
    seconds, outcome = run_ranks(2, lose_a_member)
    assert outcome == "failed"
    assert seconds < 10


def one_rank(rank):
    wire = TCPStore("127.0.0.1", rank.port, 2, rank.rank == 0, PATIENCE)
    return publish_twice(wire) if rank.rank == 0 else serve_engine(wire)


def test_weights_reach_an_engine_although_another_engine_refuses_to_join():
    sender, received = run_ranks(2, one_rank)
    assert sender["first"].updated == ["remote"]
    assert sender["first"].failed == {"refusing": "join for version 1: ConnectionRefusedError: nobody there"}
    assert sender["first_s"] < 10, "the join was called off, not waited for"
    assert sender["second"].updated == ["remote"]
    assert received == [("v1.0", 60.0), ("v1.1", 66.0), ("v2.0", 120.0), ("v2.1", 126.0)]
    joins = [error for what, error in sender["answers"] if what == "join_group"]
    assert len(joins) == 2
    assert joins[0] is not None
    assert joins[1] is None


def test_a_rendezvous_listens_on_its_own_address_and_no_other():
    rendezvous = Rendezvous("127.0.0.1", 2, 30)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    ]
    assert listening == ["127.0.0.1"]
    rendezvous.connect().set("key", "value")
    assert rendezvous.connect().get("key") == b"value"


def test_a_sender_that_waits_for_its_peers_gives_up_when_the_rendezvous_is_closed():
    async def called_off() -> float:
        rendezvous = Rendezvous("127.0.0.1", 2, 30)
        waiting = asyncio.ensure_future(asyncio.to_thread(BroadcastGroup, "gloo", rendezvous, "lonely", 30))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        start = time.monotonic()
        rendezvous.close()
        _, pending = await asyncio.wait([waiting], timeout=20)
        assert not pending
        assert isinstance(waiting.exception(), RuntimeError)
        return time.monotonic() - start

    assert asyncio.run(called_off()) < 5


def test_a_sender_waits_for_its_peers_no_longer_than_the_time_out():
    rendezvous = Rendezvous("127.0.0.1", 2, 0.5)
    start = time.monotonic()
    try:
        BroadcastGroup("gloo", rendezvous, "late", 0.5)
    except RuntimeError:
        assert 0.3 < time.monotonic() - start < 10
    else:
        raise AssertionError("a group of one was made")
