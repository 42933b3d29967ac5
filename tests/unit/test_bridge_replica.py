"""The replica of the weights beside an engine, alone and behind HTTP, and the delta transport."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.index import stored_tensors
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication, Timeouts
from slipstream.bridge.transport import patches
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.replica import ROUTE, Opening, Replica, ReplicaFile, StartingWeights, mount

FILES = [
    ReplicaFile(("a", "b"), ((3, 5), (7,)), "bfloat16"),
    ReplicaFile(("bias",), ((4,),), "float32"),
]


def weights(seed: int) -> list[torch.Tensor]:
    """Return flat buckets for ``FILES``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(22, generator=generator).bfloat16(),
        torch.randn(4, generator=generator),
    ]


def raw(flat: torch.Tensor) -> np.ndarray:
    return flat.view(torch.uint8).numpy()


GO_ON, AFRESH = (Opening(tuple(FILES), afresh) for afresh in (False, True))


def new_replica(folder: Path, model: Path = Path("/nowhere")) -> Replica:
    return Replica(folder, StartingWeights(model))


def checkpoint(folder: Path, seed: int) -> Path:
    """Write a checkpoint with these weights, and return its folder."""
    folder.mkdir()
    a, bias = weights(seed)
    save_file({"a": a[:15].view(3, 5), "b": a[15:], "bias": bias}, folder / "model.safetensors")
    return folder


def fill(replica: Replica, version: int) -> None:
    replica.begin(GO_ON)
    for number, flat in enumerate(weights(version)):
        replica.patch(number, patches.whole(raw(flat), flat.itemsize))
    replica.commit(version)


def holds(folder: Path, seed: int) -> bool:
    """True if a program that loads checkpoints finds these weights."""
    a, bias = weights(seed)
    loaded = {name: load_file(stored.file)[name] for name, stored in stored_tensors(folder).items()}
    return loaded.keys() == {"a", "b", "bias"} and all(
        torch.equal(loaded[name], expected)
        for name, expected in {"a": a[:15].view(3, 5), "b": a[15:], "bias": bias}.items()
    )


def test_a_replica_is_a_checkpoint_of_the_committed_version(tmp_path):
    replica = new_replica(tmp_path / "copy")
    assert replica.version() is None
    fill(replica, 3)
    assert replica.version() == 3
    assert holds(tmp_path / "copy", 3)


def test_patches_bring_a_replica_to_the_next_version(tmp_path):
    replica = new_replica(tmp_path)
    fill(replica, 3)
    replica.begin(GO_ON)
    assert replica.version() is None, "neither version"
    for number, (old, new) in enumerate(zip(weights(3), weights(4), strict=True)):
        replica.patch(number, patches.difference(raw(old), raw(new), new.itemsize))
    replica.commit(4)
    assert replica.version() == 4
    assert holds(tmp_path, 4)


def test_new_files_replace_the_old_ones(tmp_path):
    replica = new_replica(tmp_path)
    fill(replica, 3)
    replica.begin(Opening((ReplicaFile(("c",), ((2, 2),), "float32"),), afresh=False))
    replica.patch(0, patches.whole(np.arange(16, dtype=np.uint8), 4))
    replica.commit(4)
    assert set(stored_tensors(tmp_path)) == {"c"}
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_file_that_was_not_announced_is_refused(tmp_path):
    replica = new_replica(tmp_path)
    with pytest.raises(patches.PatchError, match="file 0 was not announced"):
        replica.patch(0, patches.whole(np.zeros(4, np.uint8), 4))
    replica.begin(GO_ON)
    for number in (-1, 2):
        with pytest.raises(patches.PatchError, match="there are 2 files"):
            replica.patch(number, patches.whole(np.zeros(4, np.uint8), 4))


def test_missing_room_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left .* in {tmp_path} \(weights.transport.memory\)"):
        new_replica(tmp_path / "copy").begin(GO_ON)


def test_patches_can_start_from_the_weights_that_the_engine_has_started_with(tmp_path):
    replica = new_replica(tmp_path / "copy", checkpoint(tmp_path / "model", 0))
    fill(replica, 3)
    replica.begin(AFRESH)
    for number, (old, new) in enumerate(zip(weights(0), weights(4), strict=True)):
        replica.patch(number, patches.difference(raw(old), raw(new), new.itemsize))
    replica.commit(4)
    assert holds(tmp_path / "copy", 4)


def test_what_the_checkpoint_lacks_or_has_in_another_shape_begins_as_zeros_and_another_dtype_is_converted(
    tmp_path,
):
    a, bias = weights(0)
    save_file({"a": a[:15].view(5, 3), "b": a[15:].float()}, tmp_path / "model.safetensors")
    initial = StartingWeights(tmp_path)
    for file, expected in zip(
        FILES, (torch.cat([torch.zeros(15).bfloat16(), a[15:]]), torch.zeros_like(bias)), strict=True
    ):
        target = np.full(file.size, 7, np.uint8)
        initial.copy_into(target, file)
        assert np.array_equal(target, raw(expected))


def test_a_version_of_which_a_file_has_not_come_is_not_committed(tmp_path):
    replica = new_replica(tmp_path)
    fill(replica, 3)
    replica.begin(GO_ON)
    replica.patch(0, patches.whole(raw(weights(4)[0]), 2))
    with pytest.raises(patches.PatchError, match="no patch has come for file 1 of 2"):
        replica.commit(4)
    assert replica.version() is None


def test_a_replica_that_is_damaged_is_neither_committed_nor_loaded(tmp_path):
    replica = new_replica(tmp_path)
    fill(replica, 3)
    replica.check(3)
    with pytest.raises(patches.PatchError, match="version 4 is to be loaded, and the replica holds 3"):
        replica.check(4)
    file = tmp_path / "model-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for refused in (replica.commit, replica.check):
        with pytest.raises(patches.PatchError, match=f"{file} was changed since its patch"):
            refused(3)


@pytest.fixture
def server(tmp_path) -> TestClient:
    app = FastAPI()
    mount(app, str(tmp_path / "copy"), str(tmp_path / "model"))
    return TestClient(app)


def test_over_http_a_replica_reports_its_version_and_refuses_with_the_reason(server, tmp_path):
    assert server.get(ROUTE).json() == {"folder": str(tmp_path / "copy"), "version": None}
    assert server.post(f"{ROUTE}/begin", content=msgspec.msgpack.encode(GO_ON)).status_code == 200
    for number, flat in enumerate(weights(1)):
        body = patches.encoded(patches.whole(raw(flat), flat.itemsize))
        assert server.post(f"{ROUTE}/patch/{number}", content=body).status_code == 200
    assert server.post(f"{ROUTE}/commit/1").status_code == 200
    assert server.get(ROUTE).json()["version"] == 1
    assert holds(tmp_path / "copy", 1)
    assert server.post(f"{ROUTE}/check/1").json()["folder"] == str(tmp_path / "copy")
    for path, body, reason in (
        ("check/2", b"", "version 2 is to be loaded, and the replica holds 1"),
        ("begin", b"\xff", "Expected `array`"),
        ("patch/0", b"\xff", "not a patch"),
        ("patch/9", patches.encoded(patches.whole(np.zeros(4, np.uint8), 4)), "not announced"),
    ):
        refused = server.post(f"{ROUTE}/{path}", content=body)
        assert refused.status_code == 409
        assert reason in refused.json()["message"]
    assert server.post(f"{ROUTE}/commit/x").status_code == 422


class Refused(RuntimeError):
    pass


class Engine:
    """An engine whose replica is called directly. ``corrupts``: numbers of the patches that it damages."""

    ranks = 1

    def __init__(self, name: str, folder: Path, corrupts: set[int] | None = None, lost_at: int = -1) -> None:
        self.name = self.address = name
        self.replica = new_replica(folder / name, folder / "model")
        self.folder = folder / name
        self.corrupts = corrupts or set()
        self.lost_at = lost_at
        self.received: list[int] = []
        self.loaded: list[int] = []

    async def replica_version(self):
        return self.replica.version()

    async def replica_begin(self, files):
        self.replica.begin(msgspec.msgpack.decode(files, type=Opening))

    async def replica_patch(self, number, patch):
        count = len(self.received)
        self.received.append(len(patch))
        if count == self.lost_at:
            raise ConnectionResetError("gone")
        message = patches.decoded(patch)
        if count in self.corrupts:
            message.checksum = bytes(16)
        try:
            self.replica.patch(number, message)
        except patches.PatchError as error:
            raise Refused(str(error)) from error

    async def replica_commit(self, version):
        self.replica.commit(version)

    async def load_replica(self, *, version):
        self.replica.check(version)
        self.loaded.append(version)


@dataclass(frozen=True)
class PlannedBucket:
    """The attributes of a planned bucket that the transport reads."""

    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    float32: bool


PLAN = SimpleNamespace(
    buckets=[PlannedBucket(file.names, file.shapes, file.dtype == "float32") for file in FILES]
)


def publish(transport: DeltaTransport, version: int, engines: list[Engine]) -> Publication:
    buckets = (
        FlatBucket(file.names, file.shapes, flat, number == 1)
        for number, (file, flat) in enumerate(zip(FILES, weights(version), strict=True))
    )

    async def run() -> Publication:
        publication = Publication(version, engines, Timeouts(60, 60))
        with ThreadPoolExecutor(1) as thread:
            stream = BucketStream(buckets, thread)
            await transport.prepare(publication, stream)
            await transport.update(publication, stream)
        return publication

    return asyncio.run(run())


@pytest.fixture
def transport(tmp_path) -> DeltaTransport:
    return DeltaTransport(PLAN, tmp_path / "model", "bfloat16")


def test_a_first_version_costs_what_differs_from_the_initial_weights(tmp_path):
    model = checkpoint(tmp_path / "model", 1)
    engine = Engine("engine", tmp_path)
    transport = DeltaTransport(PLAN, model, "bfloat16")
    publish(transport, 1, [engine])
    nothing = [len(patches.encoded(patches.difference(raw(w), raw(w), w.itemsize))) for w in weights(1)]
    assert engine.received == nothing
    assert holds(engine.folder, 1)
    publish(transport, 2, [engine])
    late = Engine("late", tmp_path)
    publish(transport, 3, [engine, late])
    assert holds(late.folder, 3)
    assert holds(engine.folder, 3)


def test_an_engine_whose_initial_weights_are_others_gets_whole_buckets(tmp_path):
    """A checkpoint of the same name on its node may not be the trainer's."""
    checkpoint(tmp_path / "model", 5)
    engine = Engine("engine", tmp_path)
    transport = DeltaTransport(PLAN, checkpoint(tmp_path / "trainers", 1), "bfloat16")
    assert publish(transport, 1, [engine]).report.failed == {}
    refused, whole, _ = engine.received  # the last patch was no shorter than its bucket
    assert refused < whole
    assert holds(engine.folder, 1)


def test_engines_follow_from_version_to_version_and_a_new_engine_gets_whole_buckets(transport, tmp_path):
    first, late = Engine("first", tmp_path), Engine("late", tmp_path)
    publish(transport, 1, [first])
    publish(transport, 2, [first])
    report = publish(transport, 3, [first, late]).report
    assert report.failed == {}
    assert first.loaded == [1, 2, 3]
    assert holds(first.folder, 3)
    assert holds(late.folder, 3)


def test_the_same_version_can_be_published_again(transport, tmp_path):
    """An engine that restarts without a training step in between needs that."""
    first, again = Engine("first", tmp_path), Engine("again", tmp_path)
    publish(transport, 1, [first])
    publish(transport, 1, [again])
    assert holds(again.folder, 1)
    publish(transport, 2, [first, again])
    assert holds(first.folder, 2)
    assert holds(again.folder, 2)


def test_an_engine_that_missed_a_version_gets_whole_buckets(transport, tmp_path):
    steady, away = Engine("steady", tmp_path), Engine("away", tmp_path)
    publish(transport, 1, [steady, away])
    publish(transport, 2, [steady])
    publish(transport, 3, [steady, away])
    assert holds(away.folder, 3)
    assert holds(steady.folder, 3)


def test_a_damaged_patch_is_replaced_by_the_whole_bucket(transport, tmp_path):
    engine = Engine("engine", tmp_path, corrupts={2})
    publish(transport, 1, [engine])
    report = publish(transport, 2, [engine]).report
    assert report.failed == {}
    assert len(engine.received) == 5
    assert holds(engine.folder, 2)


def test_an_engine_that_damages_whole_buckets_as_well_drops_out(transport, tmp_path):
    bad, good = Engine("bad", tmp_path, corrupts={2, 3}), Engine("good", tmp_path)
    publish(transport, 1, [bad, good])
    report = publish(transport, 2, [bad, good]).report
    assert report.failed == {"bad": "send for version 2: Refused: the result has another checksum"}
    assert bad.loaded == [1]
    assert bad.replica.version() is None
    assert holds(good.folder, 2)


def test_an_engine_that_is_lost_drops_out_and_the_others_go_on(transport, tmp_path):
    lost, good = Engine("lost", tmp_path, lost_at=1), Engine("good", tmp_path)
    report = publish(transport, 1, [lost, good]).report
    assert report.failed == {"lost": "send for version 1: ConnectionResetError: gone"}
    assert good.loaded == [1]


def test_whole_buckets_are_sent_after_the_sender_failed_halfway(transport, tmp_path, monkeypatch):
    engine = Engine("engine", tmp_path)
    publish(transport, 1, [engine])
    with monkeypatch.context() as patched:
        patched.setattr(patches, "difference", lambda *args: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            publish(transport, 2, [engine])
    publish(transport, 3, [engine])
    assert holds(engine.folder, 3)
