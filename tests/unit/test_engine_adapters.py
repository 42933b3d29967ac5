"""Adapters in an engine: its arguments, the names in requests, and what it has loaded."""

import ast
import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from slipstream.configs.installed import package_folder
from slipstream.rollout.engine import adapters, cpu
from slipstream.rollout.engine.adapters import POLICY, AdapterServing, leftover_adapters
from slipstream.rollout.engine.client import EngineError
from slipstream.rollout.engine.server_process import ServerSpec, _preparations, server_args
from tests.unit.test_engine_client import ask, serving
from tests.unit.test_engine_completion import REPLY

SERVING = AdapterServing(16, ("q_proj", "v_proj"))


def spec(device: str, which: AdapterServing | None = SERVING) -> ServerSpec:
    return ServerSpec(Path("model"), "float32", device, 1, "127.0.0.1", 1, version=0, seed=0, adapters=which)


def test_a_server_is_started_for_the_adapters_that_it_is_to_load():
    of_adapters = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_loras_per_batch": 2,
    }
    on_gpus, on_cpus = server_args(spec("cuda")), server_args(spec("cpu"))
    assert of_adapters.items() <= on_gpus.items() and "lora_backend" not in on_gpus
    assert (of_adapters | {"lora_backend": "torch_native"}).items() <= on_cpus.items()
    assert not of_adapters.keys() & server_args(spec("cpu", None)).keys()
    assert _preparations(spec("cuda")) == [adapters.PREPARE]
    assert _preparations(spec("cpu")) == [cpu.PREPARE, cpu.PREPARE_ADAPTERS, adapters.PREPARE]
    assert _preparations(spec("cpu", None)) == [cpu.PREPARE]
    assert _preparations(spec("cuda", None)) == []


def test_every_adapter_of_another_version_is_left_over_and_nothing_else():
    assert leftover_adapters(["policy-7", "policy-8", "policy-77", "mine"], 7) == ["policy-8", "policy-77"]


@pytest.mark.parametrize("adapter", [None, POLICY])
def test_requests_name_the_adapter_of_their_engine(adapter: str | None):
    async def main() -> None:
        async with serving(REPLY) as (server, client):
            client.address = replace(client.address, adapter=adapter)
            await ask(client, [1, 2], version=3)
            for question in (client.prompt_logprobs([1, 2]), client.score_tokens([1], [2])):
                with pytest.raises(EngineError):
                    await question  # the reply is that of another question
            assert [body.get("lora_path", None) for _, _, body in server.requests] == [adapter] * 3
            assert all(("lora_path" in body) == (adapter is not None) for _, _, body in server.requests)

    asyncio.run(main())


class Adapters:
    """The part of a server that holds adapters, which answers as SGLang does."""

    def __init__(self, version: int, *loaded: str) -> None:
        self.version, self.loaded = version, list(loaded)
        self.calls: list[tuple[str, object]] = []

    async def reply(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else {}
        answer: object = {"success": True}
        match request.path:
            case "/model_info":
                answer = {"weight_version": str(self.version)}
            case "/v1/models":
                cards = [{"id": name, "parent": "model"} for name in self.loaded]
                answer = {"data": [{"id": "policy-9", "parent": None}, *cards]}
            case "/update_weight_version":
                self.version = int(body["new_version"])
                self.calls.append(("state", self.version))
            case "/unload_lora_adapter":
                self.loaded.remove(body["lora_name"])
                self.calls.append(("unload", body["lora_name"]))
            case "/load_lora_adapter_from_tensors":
                self.loaded.append(body["lora_name"])
                self.calls.append(("load", body))
        return web.json_response(answer)


def test_an_adapter_is_loaded_beside_the_served_one_and_takes_its_place():
    async def main() -> None:
        server = Adapters(7, "policy-7", "policy-6", "mine")
        async with serving(server.reply) as (_, client):
            client.ranks = 2
            await client.load_adapter(8, {"r": 4}, b"tensors")
            (_, removed), (_, body) = server.calls
            assert removed == "policy-6", "of a publication that was cut off"
            assert body == {
                "lora_name": "policy-8",
                "config_dict": {"r": 4},
                "serialized_named_tensors": [base64.b64encode(b"tensors").decode()] * 2,
                "load_format": "flattened_bucket",
            }
            assert (server.version, server.loaded) == (7, ["policy-7", "mine", "policy-8"])
            await client.serve_adapter(8)
            # A scheduler may still hold requests whose clients are gone: the adapter of before stays.
            assert server.calls[2:] == [("state", 8)]
            assert (server.version, server.loaded) == (8, ["policy-7", "mine", "policy-8"])
            await client.load_adapter(9, {}, b"")
            assert (server.version, server.loaded) == (8, ["mine", "policy-8", "policy-9"])

    asyncio.run(main())


def test_the_adapter_of_a_version_that_is_published_once_more_is_loaded_anew():
    async def main() -> None:
        server = Adapters(7, "policy-7")
        async with serving(server.reply) as (_, client):
            await client.load_adapter(7, {}, b"")
            await client.serve_adapter(7)
            assert [call for call, _ in server.calls] == ["unload", "load", "state"]
            assert server.loaded == ["policy-7"]

    asyncio.run(main())


def test_a_server_that_does_not_load_an_adapter_says_why():
    async def main() -> None:
        server = Adapters(7)

        async def reply(request: web.Request) -> web.Response:
            if request.path == "/load_lora_adapter_from_tensors":
                return web.json_response({"success": False, "error_message": "rank 64"}, status=400)
            return await server.reply(request)

        async with serving(reply) as (_, client):
            with pytest.raises(EngineError, match="rank 64"):
                await client.load_adapter(8, {}, b"")

    asyncio.run(main())


# ---- what is changed of SGLang


class Lock:
    """The lock that requests hold from their start to their end."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager

    async def is_locked(self) -> bool:
        return self._manager.running > 0


class Manager:
    """The part of SGLang's TokenizerManager that is changed."""

    def __init__(self) -> None:
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.model_update_lock = Lock(self)
        self.running = 2
        self.paused: list[str] = []
        self.resolved: list[object] = []
        self.stated = "7"
        self.released: list[str] = []
        self.lora_registry = self

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all and self.is_pause, "a request that starts now would not be cut off"
        self.running = max(0, self.running - 1)

    async def pause_generation(self, obj: SimpleNamespace) -> None:
        self.paused.append(obj.mode)

    async def _resolve_lora_path(self, obj: SimpleNamespace) -> None:
        self.resolved.append(obj.lora_path)
        obj.lora_id = f"id of {obj.lora_path}"

    async def release(self, lora_id: str) -> None:
        self.released.append(lora_id)

    def config_value(self, name: str) -> str:
        return {"weight_version": self.stated}[name]


@pytest.fixture
def manager() -> type:
    """A class of its own for each test, changed as SGLang's is."""
    changed = type("Changed", (Manager,), {})
    adapters._resolve_policy(changed)
    adapters._cut_off_at_once(changed)
    return changed


def test_a_request_gets_the_adapter_of_the_version_that_the_server_states_when_it_starts(manager: type):
    async def main() -> None:
        server = manager()
        for stated in ("7", "8"):
            server.stated = stated
            request = SimpleNamespace(lora_path=POLICY)
            await server._resolve_lora_path(request)
            assert request == SimpleNamespace(lora_path=None, lora_id=f"id of policy-{stated}")
        other = SimpleNamespace(lora_path="mine")
        await server._resolve_lora_path(other)
        assert server.resolved == ["policy-7", "policy-8", "mine"]
        # SGLang releases what still has a path when it ends, and loses what is aborted in its queue.
        assert server.released == ["id of policy-7", "id of policy-8"] and other.lora_path == "mine"

    asyncio.run(main())


def test_a_pause_that_cuts_off_returns_when_nothing_runs_any_more_and_holds_new_requests(manager: type):
    async def main() -> None:
        server = manager()
        await server.pause_generation(SimpleNamespace(mode="abort"))
        assert (server.running, server.is_pause, server.paused) == (0, True, [])
        await server.pause_generation(SimpleNamespace(mode="retract"))
        assert server.paused == ["retract"]

    asyncio.run(main())


PAUSE = """
async def pause_generation(self, obj: PauseGenerationReqInput):
    async with self.is_pause_cond:
        self.is_pause = True
        if obj.mode != 'abort':
            await self._async_dispatch_to_scheduler(obj)
        else:
            while True:
                self.abort_request(abort_all=True)
                is_locked = await self.model_update_lock.is_locked()
                if not is_locked:
                    break
                await asyncio.sleep(1.0)
"""
"""What ``_cut_off_at_once`` does more often."""


def test_sglang_is_as_it_was_when_it_was_changed():
    folder = package_folder("sglang.srt.managers")
    assert folder is not None
    methods = {
        node.name: ast.unparse(node)
        for node in ast.walk(ast.parse((folder / "tokenizer_manager.py").read_text()))
        if isinstance(node, ast.AsyncFunctionDef)
    }
    assert methods["pause_generation"] == PAUSE.strip()
    assert methods["_resolve_lora_path"].startswith("async def _resolve_lora_path(self, obj: ")
    # A request is resolved behind the pause, and holds the lock until it has ended.
    request = methods["generate_request"]
    places = [
        request.index(each)
        for each in (
            "await self.is_pause_cond.wait_for(lambda: not self.is_pause)",
            "async with self.model_update_lock.reader_lock:",
            "await self._validate_and_resolve_lora(obj)",
            "self._wait_one_response(obj, request)",
        )
    ]
    assert places == sorted(places)
