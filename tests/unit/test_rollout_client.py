"""The engine client against a small server that answers in SGLang's format."""

import asyncio
import copy
import inspect
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from bridge.publish import EngineEndpoint
from configs.schema import SamplingConfig
from rollout.engine.client import (
    Aborted,
    EngineAddress,
    EngineClient,
    EngineError,
    EngineLost,
    InvalidRequest,
    parse_completion,
    parse_prompt_logprobs,
)
from rollout.trajectory import Completion, Finish, Span

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4)

ANSWER = {
    "text": "not used",
    "output_ids": [11, 12, 13],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 13},
        "prompt_tokens": 2,
        "weight_version": "4",
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2},
            {"version": "4", "start": 2, "end": 3},
        ],
        "num_retractions": 1,
        "completion_tokens": 3,
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None], [-2.5, 13, None]],
    },
}
COMPLETION = Completion((11, 12, 13), (-0.5, -1.5, -2.5), (Span(3, 0, 2), Span(4, 2, 3)), Finish.STOP, 1)


def answer(**meta) -> dict:
    changed = copy.deepcopy(ANSWER)
    changed["meta_info"] |= meta
    return changed


def address(url: str, timeout_s: float = 5) -> EngineAddress:
    return EngineAddress("engine-0", url, 1, vocab_size=100, max_length=20, timeout_s=timeout_s)


class Server:
    """Records every request; answers with ``reply``: JSON, or a coroutine function of the request."""

    def __init__(self, reply) -> None:
        self.reply = reply
        self.requests: list[tuple[str, str, dict | None]] = []
        self.connections: set = set()
        self.disconnected = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        self.connections.add(request.transport)
        try:
            reply = await self.reply(request) if inspect.iscoroutinefunction(self.reply) else self.reply
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)


@asynccontextmanager
async def serving(reply, timeout_s: float = 5):
    server = Server(reply)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(address(f"http://127.0.0.1:{port}", timeout_s)) as client:
            yield server, client
    finally:
        await runner.cleanup()


# ---- requests


def test_a_generation_request_is_sent_and_its_answer_read():
    async def main():
        async with serving(ANSWER) as (server, client):
            assert await client.generate([1, 2], SAMPLING, cache_key="v3") == COMPLETION
            assert server.requests == [
                (
                    "POST",
                    "/generate",
                    {
                        "input_ids": [1, 2],
                        "sampling_params": {
                            "temperature": 0.7,
                            "top_p": 0.9,
                            "top_k": 5,
                            "max_new_tokens": 4,
                        },
                        "return_logprob": True,
                        "extra_key": "v3",
                    },
                )
            ]

    asyncio.run(main())


def test_greedy_generation_has_temperature_zero():
    async def main():
        async with serving(ANSWER) as (server, client):
            await client.generate([1], SAMPLING, greedy=True)
            body = server.requests[0][2]
            assert body["sampling_params"]["temperature"] == 0
            assert body["extra_key"] is None

    asyncio.run(main())


def test_prompt_log_probs_ask_for_no_new_token_and_skip_the_first():
    reply = answer(
        finish_reason={"type": "length", "length": 0},
        input_token_logprobs=[[None, 7, None], [-0.25, 8, None], [-0.75, 9, None]],
    )

    async def main():
        async with serving(reply) as (server, client):
            assert await client.prompt_logprobs([7, 8, 9]) == [-0.25, -0.75]
            body = server.requests[0][2]
            assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 0.0}
            assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == (
                [7, 8, 9],
                0,
                True,
            )

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda c: c.pause("retract"), ("/pause_generation", {"mode": "retract"})),
        (lambda c: c.resume(), ("/continue_generation", {})),
        (lambda c: c.abort_all(), ("/abort_request", {"abort_all": True})),
        (lambda c: c.begin_update(), ("/begin_weight_update", {})),
        (lambda c: c.end_update(), ("/end_weight_update", {})),
        (lambda c: c.leave_group("g"), ("/destroy_weights_update_group", {"group_name": "g"})),
        (
            lambda c: c.join_group(
                address="h", port=5, rank_offset=1, world_size=3, group="g", backend="gloo"
            ),
            (
                "/init_weights_update_group",
                {
                    "master_address": "h",
                    "master_port": 5,
                    "rank_offset": 1,
                    "world_size": 3,
                    "group_name": "g",
                    "backend": "gloo",
                },
            ),
        ),
        (
            lambda c: c.receive(
                names=["a", "b"],
                shapes=[(2, 3), (4,)],
                dtype="float32",
                group="g",
                flush_cache=True,
                version=7,
            ),
            (
                "/update_weights_from_distributed",
                {
                    "names": ["a", "b"],
                    "dtypes": ["float32", "float32"],
                    "shapes": [[2, 3], [4]],
                    "group_name": "g",
                    "load_format": "flattened_bucket",
                    "flush_cache": True,
                    "weight_version": "7",
                },
            ),
        ),
    ],
)
def test_control_calls_are_what_sglang_expects(call, expected):
    async def main():
        async with serving({"success": True, "message": "ok"}) as (server, client):
            await call(client)
            assert server.requests == [("POST", *expected)]

    asyncio.run(main())


def test_a_bucket_before_the_last_names_no_version():
    async def main():
        async with serving({"success": True}) as (server, client):
            await client.receive(
                names=["a"], shapes=[(1,)], dtype="float32", group="g", flush_cache=False, version=None
            )
            assert server.requests[0][2]["weight_version"] is None

    asyncio.run(main())


def test_the_client_offers_all_that_publishing_asks_of_an_engine():
    for name, method in inspect.getmembers(EngineEndpoint, inspect.isfunction):
        if not name.startswith("_"):
            asked = inspect.signature(method).parameters
            offered = inspect.signature(getattr(EngineClient, name)).parameters
            assert [(p.name, p.kind) for p in asked.values()] == [
                (p.name, p.kind) for p in offered.values()
            ], name


def test_the_version_is_the_servers_own():
    async def main():
        async with serving({"model_path": "m", "weight_version": "12"}) as (server, client):
            assert await client.version() == 12
            assert server.requests == [("GET", "/model_info", None)]

    asyncio.run(main())


# ---- requests that never leave


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        ([], "input_ids is empty"),
        ([1, 100, 2], r"token ids \[100\] are outside the vocabulary of 100"),
        ([-1], r"token ids \[-1\] are outside"),
        ([200] * 9, r"token ids \[200, 200, 200, 200, 200\] are outside"),
        ([1] * 17, r"17 prompt \+ 4 new tokens exceed the context of 20"),
    ],
)
def test_a_request_that_would_harm_the_server_never_leaves(input_ids, message):
    async def main():
        async with serving(ANSWER) as (server, client):
            with pytest.raises(InvalidRequest, match=message):
                await client.generate(input_ids, SAMPLING)
            assert server.requests == []

    asyncio.run(main())


def test_the_longest_request_and_the_last_token_id_are_allowed():
    async def main():
        async with serving(ANSWER) as (_, client):
            assert await client.generate([99] * 16, SAMPLING) == COMPLETION

    asyncio.run(main())


def test_prompt_log_probs_are_checked_like_generation():
    async def main():
        async with serving(ANSWER) as (server, client):
            for bad in ([], [100], [1] * 21):
                with pytest.raises(InvalidRequest):
                    await client.prompt_logprobs(bad)
            assert server.requests == []

    asyncio.run(main())


# ---- refusals


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            {"success": False, "message": "not in an update"},
            "engine-0 /begin_weight_update: not in an update",
        ),
        ({"success": False}, "'success': False"),
    ],
)
def test_a_refusal_with_status_200_is_an_error(reply, message):
    async def main():
        async with serving(reply) as (_, client):
            with pytest.raises(EngineError, match=message):
                await client.begin_update()

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_http_error_is_the_servers_own_message(status):
    async def reply(request):
        return web.Response(status=status, text="the scheduler says no")

    async def main():
        async with serving(reply) as (_, client):
            with pytest.raises(EngineError, match=f"/generate: HTTP {status}: the scheduler says no"):
                await client.generate([1], SAMPLING)
            assert not await client.healthy()

    asyncio.run(main())


def test_an_empty_answer_of_a_control_call_is_fine():
    async def reply(request):
        return web.Response(text="")

    async def main():
        async with serving(reply) as (_, client):
            await client.resume()
            assert await client.healthy()

    asyncio.run(main())


@pytest.mark.parametrize("text", ["{", "[1, 2", "<html>", "", "null", "[]", "{}"])
def test_an_answer_that_is_none_is_an_error_of_the_engine(text):
    async def reply(request):
        return web.Response(text=text)

    async def main():
        async with serving(reply) as (_, client):
            with pytest.raises(EngineError, match="engine-0 /generate: "):
                await client.generate([1], SAMPLING)

    asyncio.run(main())


def test_an_aborted_answer_is_told_apart():
    async def main():
        async with serving(answer(finish_reason={"type": "abort", "message": "Aborted"})) as (_, client):
            with pytest.raises(Aborted, match="generation was aborted: Aborted"):
                await client.generate([1], SAMPLING)
            with pytest.raises(Aborted):
                await client.prompt_logprobs([1])

    asyncio.run(main())


# ---- losses


def test_no_answer_in_time_is_a_loss():
    async def reply(request):
        await asyncio.sleep(30)

    async def main():
        async with serving(reply, timeout_s=0.05) as (_, client):
            with pytest.raises(EngineLost, match="/generate: no answer in 0 s"):
                await client.generate([1], SAMPLING)
            assert not await client.healthy()

    asyncio.run(main())


def test_a_server_that_is_not_there_is_a_loss():
    async def main():
        async with EngineClient(address("http://127.0.0.1:9")) as client:
            with pytest.raises(EngineLost, match="ClientConnectorError"):
                await client.generate([1], SAMPLING)
            assert not await client.healthy()

    asyncio.run(main())


@pytest.mark.parametrize(
    "part", [b"", b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"output_ids": [1', b"HTTP"]
)
def test_a_connection_that_breaks_is_a_loss(part):
    async def dying(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(part)
        writer.close()

    async def main():
        server = await asyncio.start_server(dying, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(address(f"http://127.0.0.1:{port}")) as client:
            with pytest.raises(EngineLost):
                await client.generate([1], SAMPLING)

    asyncio.run(main())


def test_an_idle_server_that_closes_a_kept_connection_is_not_lost():
    """SGLang closes idle connections; a request that meets the closing one must not condemn the engine."""

    async def once_per_connection(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")  # keeps the connection, as it seems
        await reader.readline()  # but goes away when it is used again
        writer.close()

    async def main():
        server = await asyncio.start_server(once_per_connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(address(f"http://127.0.0.1:{port}")) as client:
            for _ in range(3):
                await client.resume()

    asyncio.run(main())


def test_closing_the_client_ends_its_running_requests_as_lost():
    """So that an engine that is condemned does not keep its requests until their time-out."""

    async def reply(request):
        await asyncio.sleep(30)

    async def main():
        async with serving(reply) as (server, client):
            running = [asyncio.create_task(client.generate([1], SAMPLING)) for _ in range(3)]
            while len(server.requests) < 3:
                await asyncio.sleep(0.005)
            await client.close()
            ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 1)
            assert [type(error) for error in ended] == [EngineLost] * 3
            with pytest.raises(EngineLost, match="given up"):
                await client.generate([1], SAMPLING)

    asyncio.run(main())


def test_a_cancelled_request_disconnects_so_that_the_server_stops_generating():
    async def reply(request):
        await asyncio.sleep(30)

    async def main():
        async with serving(reply) as (server, client):
            running = asyncio.create_task(client.generate([1], SAMPLING))
            while not server.requests:
                await asyncio.sleep(0.005)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await asyncio.wait_for(server.disconnected.wait(), 1)

    asyncio.run(main())


def test_many_requests_run_at_once():
    together = 150
    """More than the 100 connections that aiohttp would allow."""

    async def main():
        everyone = asyncio.Barrier(together)

        async def reply(request):
            await everyone.wait()
            return web.json_response(ANSWER)

        async with serving(reply) as (_, client):
            work = (client.generate([1], SAMPLING) for _ in range(together))
            assert await asyncio.wait_for(asyncio.gather(*work), 5) == [COMPLETION] * together

    asyncio.run(main())


# ---- parsing


def test_a_missing_retraction_count_is_zero():
    for value in (None, 0):
        assert parse_completion(answer(num_retractions=value)).retractions == 0
    without = copy.deepcopy(ANSWER)
    del without["meta_info"]["num_retractions"]
    assert parse_completion(without).retractions == 0


def test_an_output_without_tokens_is_read():
    empty = answer(
        output_token_logprobs=[],
        finish_reason={"type": "length", "length": 0},
        weight_versions=[{"version": "2", "start": 0, "end": 0}],
    ) | {"output_ids": []}
    assert parse_completion(empty) == Completion((), (), (), Finish.LENGTH, retractions=1)


def without(*path: str) -> dict:
    changed = copy.deepcopy(ANSWER)
    part = changed
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return changed


@pytest.mark.parametrize(
    "malformed",
    [
        pytest.param(None, id="null"),
        pytest.param("", id="text"),
        pytest.param([ANSWER], id="a list"),
        pytest.param(without("meta_info"), id="no meta_info"),
        pytest.param(without("output_ids"), id="no output_ids"),
        pytest.param(without("meta_info", "finish_reason"), id="no finish_reason"),
        pytest.param(without("meta_info", "weight_versions"), id="no weight_versions"),
        pytest.param(without("meta_info", "output_token_logprobs"), id="no log-probs"),
        pytest.param(answer(finish_reason=None), id="not finished"),
        pytest.param(answer(finish_reason={"type": "tired"}), id="unknown finish"),
        pytest.param(answer(weight_versions=None), id="null versions"),
        pytest.param(
            answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]), id="version not a number"
        ),
        pytest.param(answer(weight_versions=[{"version": "3", "start": 0, "end": 2}]), id="spans too short"),
        pytest.param(answer(weight_versions=[{"version": "3", "start": 0, "end": 9}]), id="spans too long"),
        pytest.param(answer(weight_versions=[]), id="no spans"),
        pytest.param(answer(output_token_logprobs=[[-0.5, 11, None]]), id="too few log-probs"),
        pytest.param(
            answer(output_token_logprobs=[[-0.5, 11, None], [None, 12, None], [-2.5, 13, None]]),
            id="null log-prob (NaN)",
        ),
        pytest.param(
            answer(output_token_logprobs=[[-0.5, 11, None], [-1.5, 99, None], [-2.5, 13, None]]),
            id="other tokens",
        ),
        pytest.param(answer(output_token_logprobs=[[], [], []]), id="empty log-probs"),
    ],
)
def test_a_malformed_answer_is_a_value_error_and_never_a_completion(malformed):
    with pytest.raises(ValueError, match=r"\w"):
        parse_completion(malformed)


@pytest.mark.parametrize(
    "logprobs", [None, [], [[None, 1]], [[None, 1], [None, 2], [-1.0, 3]], [[None, 1], [-1.0, 2]]]
)
def test_prompt_log_probs_must_be_complete(logprobs):
    with pytest.raises(ValueError, match=r"\w"):
        parse_prompt_logprobs(answer(input_token_logprobs=logprobs), 3)
