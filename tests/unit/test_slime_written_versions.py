"""`custom_update_weight_post_write`: called with each version's whole folder, before an engine reads it."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from slipstream.backend.trainer.slime.named import HookError, NamedHook
from slipstream.backend.trainer.slime.rank_hooks import SlimeRankHooks
from slipstream.bridge.transport import disk
from slipstream.bridge.transport.disk import DiskTransport
from slipstream.rollout.compat.slime.arguments import SlimeArguments

SETTING = "custom_update_weight_post_write"


class Publication:
    """A publication to one engine that notes when it reads."""

    version = 7

    def __init__(self, calls: list) -> None:
        self._calls = calls
        self.report = SimpleNamespace(timed=lambda name: nullcontext(), bytes_sent=0)

    async def each(self, name, load, *, moves_weights):
        self._calls.append("load")


class Buckets:
    async def hand_over(self, write):
        return write(iter(()))


def published(hook, tmp_path, monkeypatch) -> list:
    """Publish a version to files with the hook, and return what has happened, in order."""
    calls: list = []

    def write_hf(buckets, source, folder, **_):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        calls.append("written")
        return 7

    monkeypatch.setattr(disk, "write_hf", write_hf)
    hooks = {SETTING: NamedHook(SETTING, "my.hook", lambda *given: calls.append(hook(*given)))}
    ranks = SlimeRankHooks(hooks, SlimeArguments(lr=0.5), per_token=True, device=torch.device("cpu"))
    ranks.publication_begins(["engine-0", "engine-1"])
    transport = DiskTransport(tmp_path / "weights", tmp_path, ranks.version_written)
    publication = Publication(calls)

    async def publish() -> None:
        await transport.prepare(publication, Buckets())
        await transport.update(publication, Buckets())

    asyncio.run(publish())
    return calls


def test_the_hook_sees_a_whole_version_before_an_engine_reads_it(tmp_path, monkeypatch):
    def hook(args, version_dir, rollout_engines):
        files = sorted(path.name for path in (tmp_path / "weights").glob("*/*"))
        return args.lr, version_dir, rollout_engines, files

    folder = str(tmp_path / "weights" / "version-00000007")
    seen = (0.5, folder, ["engine-0", "engine-1"], ["model.safetensors"])
    assert published(hook, tmp_path, monkeypatch) == ["written", seen, "load"]


def test_a_hook_that_raises_is_named_and_no_engine_reads_the_version(tmp_path, monkeypatch):
    def hook(args, version_dir, rollout_engines):
        raise OSError("no room")

    with pytest.raises(HookError, match=rf"rollout\.hooks\.{SETTING} \(my\.hook\) .* OSError: no room"):
        published(hook, tmp_path, monkeypatch)
