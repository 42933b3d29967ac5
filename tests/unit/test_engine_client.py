"""The engine client against a small server that answers in SGLang's format."""

import asyncio
import inspect
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slipstream.bridge.publish.endpoint import EngineEndpoint
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.control.concurrency import EngineLoad
from slipstream.rollout.engine import connection
from slipstream.rollout.engine.client import (
    Aborted,
    EngineAddress,
    EngineClient,
    EngineError,
    EngineLost,
    InvalidRequest,
    RequestRefused,
    Silent,
)
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span
from tests.unit.doubles import PutForward
from tests.unit.test_engine_completion import ABORT, COMPLETION, REPLY, STOP, attested, chunk
from tests.unit.test_engine_completion import reply as reply_with

VOCAB = 30_000
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4)


def address(url: str, timeout_s: float = 60, answer_timeout_s: float = 60) -> EngineAddress:
    return EngineAddress(
        "engine-0",
        url,
        1,
        vocab_size=VOCAB,
        max_length=20,
        timeout_s=timeout_s,
        answer_timeout_s=answer_timeout_s,
        stream_interval=16,
    )


async def ask(client: EngineClient, input_ids: list[int], sampling=SAMPLING, **more) -> Completion:
    completion = GrowingCompletion()
    await client.generate(input_ids, sampling, completion, **more)
    return completion.completion()


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def streamed(*chunks: object) -> web.Response:
    """A stream that has ended."""
    return web.Response(body=b"".join(map(event, chunks)) + DONE, content_type="text/event-stream")


def streaming(*steps: object):
    """A reply that sends the chunks one after another; a number is a pause in seconds."""

    async def reply(request):
        if request.path != "/generate":
            return web.json_response({})
        response = web.StreamResponse()
        await response.prepare(request)
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                await response.write(step if isinstance(step, bytes) else event(step))
        return response

    return reply


ONE = [chunk(1, 1, 3)]
THREE = [*ONE, chunk(3, 2, 3)]
WHOLE = [*THREE, chunk(4, 1, 5, STOP, weight_versions=attested((3, 0, 2), (5, 2, 4)))]
"""A completion of four tokens in three chunks."""


def tokens(n: int, *spans: Span, finish=Finish.PARTIAL) -> Completion:
    """The first n tokens of that completion."""
    matched = 2 if finish is Finish.STOP else None
    logprobs = tuple(-float(i) for i in range(n))
    return Completion(tuple(range(100, 100 + n)), logprobs, spans, finish, matched=matched)


class Server:
    """Records every request; answers with ``reply``: a function of the request, a response, or JSON.

    JSON is the only chunk of a generation that is streamed.
    """

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
        if isinstance(reply, web.StreamResponse):
            return reply
        return streamed(reply) if body and body.get("stream") else web.json_response(reply)


def run_put_forward(main) -> None:
    """Run ``main`` with a function that waits until a chunk was read, and puts the clock forward then."""

    async def with_clock() -> None:
        loop, read = asyncio.get_running_loop(), asyncio.Event()

        async def put_forward(seconds: float) -> None:
            await asyncio.wait_for(read.wait(), 1000)
            read.clear()
            loop.forward_s += seconds

        await main(read.set, put_forward)

    with asyncio.Runner(loop_factory=PutForward) as runner:
        runner.run(with_clock())


@asynccontextmanager
async def serving(reply, timeout_s: float = 60, **limits: float):
    server = Server(reply)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with EngineClient(address(f"http://127.0.0.1:{port}", timeout_s, **limits)) as client:
            yield server, client
    finally:
        await runner.cleanup()


# ---- requests


def test_a_generation_request_is_sent_and_its_completion_read():
    async def main():
        async with serving(REPLY) as (server, client):
            assert await ask(client, [1, 2], version=3, cache_key="v3") == COMPLETION
            ((method, path, body),) = server.requests
            assert (method, path) == ("POST", "/generate")
            assert len(body.pop("rid")) == 32
            assert body == {
                "input_ids": [1, 2],
                "sampling_params": {
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "top_k": 5,
                    "max_new_tokens": 4,
                    "stream_interval": 16,
                },
                "return_logprob": True,
                "stream": True,
                "extra_key": "v3",
            }

    asyncio.run(main())


def test_every_request_has_a_name_of_its_own():
    async def main():
        async with serving(REPLY) as (server, client):
            await asyncio.gather(*(ask(client, [1], version=0) for _ in range(20)))
            names = {body["rid"] for _, _, body in server.requests}
            assert len(names) == 20
            assert len({len(name) for name in names}) == 1, "SGLang aborts whatever begins with a name"

    asyncio.run(main())


def test_greedy_generation_has_temperature_zero():
    async def main():
        async with serving(REPLY) as (server, client):
            await ask(client, [1], version=0, greedy=True)
            body = server.requests[0][2]
            assert body["sampling_params"]["temperature"] == 0
            assert body["extra_key"] is None

    asyncio.run(main())


def test_prompt_log_probs_ask_for_no_new_token_and_skip_the_first():
    reply = reply_with(
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
        (lambda c: c.pause("in_place"), ("/pause_generation", {"mode": "in_place"})),
        (lambda c: c.resume(), ("/continue_generation", {})),
        (lambda c: c.abort("x"), ("/abort_request", {"rid": "x"})),
        (lambda c: c.begin_update(), ("/begin_weight_update", {})),
        (lambda c: c.end_update(), ("/end_weight_update", {})),
        (
            lambda c: c.take([b"\x00", b"\x01"], load_format="a.loader", version=7),
            (
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": ["AA==", "AQ=="],
                    "load_format": "a.loader",
                    "flush_cache": False,
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


def paused(mode: str, *flushes: int) -> list[object]:
    """Return what a pause asks of a server that answers questions to empty its cache with these statuses."""
    answers = iter(flushes)

    async def reply(request):
        asked.append(
            request.path_qs if request.path == "/flush_cache" else (await request.json()).get("mode")
        )
        return web.Response(status=next(answers) if request.path == "/flush_cache" else 200, text="{}")

    async def main():
        async with serving(reply) as (_, client):
            await client.pause(mode)

    asked: list[object] = []
    asyncio.run(main())
    return asked


def test_a_pause_empties_the_cache_unless_requests_keep_their_part_of_it():
    assert paused("in_place") == ["in_place"]
    assert paused("retract", 200) == ["retract", "/flush_cache?timeout=0"]
    assert paused("abort", 200) == ["abort", "/flush_cache?timeout=10"]


def test_requests_are_aborted_where_the_cache_cannot_be_emptied_otherwise():
    """None: the resumption in between. A paused scheduler takes no request off the queue of grammars."""
    emptied = "/flush_cache?timeout=0", "/flush_cache?timeout=10"
    assert paused("retract", 400, 200) == ["retract", emptied[0], None, "abort", emptied[1]]
    with pytest.raises(EngineError, match="engine-0: requests are left 10 s after all of them were aborted"):
        paused("retract", 400, 400)


def test_memory_is_released_once_the_gpu_has_done_all_that_the_pause_asked_of_it():
    """SGLang waits for its GPU at the end of each release, a release of nothing included."""

    async def main():
        async with serving({}) as (server, client):
            await client.release_memory(["weights", "kv_cache"])
            assert [(path, body["tags"]) for _, path, body in server.requests] == [
                ("/release_memory_occupation", ["none"]),
                ("/resume_memory_occupation", ["none"]),
                ("/release_memory_occupation", ["weights", "kv_cache"]),
            ]

    asyncio.run(main())


def test_a_bucket_before_the_last_names_no_version():
    async def main():
        async with serving({"success": True}) as (server, client):
            await client.take([b""], load_format="flattened_bucket", version=None)
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


# ---- requests that never leave


@pytest.mark.parametrize(
    ("input_ids", "message", "room"),
    [
        ([], "input_ids is empty", None),
        ([1, VOCAB, 2], r"token ids \[30000\] are outside the vocabulary of 30000", None),
        ([-1], r"token ids \[-1\] are outside", None),
        ([VOCAB] * 9, r"token ids \[(30000, ){4}30000\] are outside", None),
        ([1] * 17, r"17 prompt \+ 4 new tokens exceed the context of 20", 3),
        ([1] * 21, r"21 prompt \+ 4 new tokens exceed the context of 20", 0),
    ],
)
def test_a_request_that_would_harm_the_server_never_leaves(input_ids, message, room):
    async def main():
        async with serving(REPLY) as (server, client):
            with pytest.raises(InvalidRequest, match=message) as refused:
                await ask(client, input_ids, version=0)
            assert refused.value.room == room
            assert server.requests == []

    asyncio.run(main())


@pytest.mark.parametrize("live", [True, False])
def test_values_that_would_harm_the_server_never_leave(live):
    harmful = {"logit_bias": {"3": -1e39}, "top_k": 2**31}
    sampling = LiveSampling(4, harmful, 0) if live else SamplingConfig(max_new_tokens=4, args=harmful)

    async def main():
        async with serving(REPLY) as (server, client):
            with pytest.raises(
                InvalidRequest, match=r"top_k: .*2147483648; logit_bias of token 3: .*-1e\+39"
            ):
                await ask(client, [1], sampling, version=0)
            assert server.requests == []

    asyncio.run(main())


def test_the_longest_request_and_the_last_token_id_are_allowed():
    async def main():
        async with serving(REPLY) as (_, client):
            assert await ask(client, [VOCAB - 1] * 16, version=0) == COMPLETION

    asyncio.run(main())


def test_prompt_log_probs_are_checked_like_generation():
    async def main():
        async with serving(REPLY) as (server, client):
            for bad in ([], [VOCAB], [1] * 21):
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
                await ask(client, [1], version=0)
            assert not await client.healthy()

    asyncio.run(main())


def test_a_server_that_stands_still_is_not_well():
    async def reply(request):
        await asyncio.sleep(600)

    async def main():
        async with serving(reply, answer_timeout_s=0.05) as (_, client):
            assert not await client.healthy()

    asyncio.run(main())


def test_an_empty_reply_to_a_control_call_is_fine():
    async def reply(request):
        return web.Response(text="")

    async def main():
        async with serving(reply) as (_, client):
            await client.resume()
            assert await client.healthy()

    asyncio.run(main())


@pytest.mark.parametrize(
    "text", ["{", "[1, 2", "<html>", "null", "[]", "{}", "data: {}\n\n", "data: {\n\n", ": ping\n\n"]
)
def test_a_reply_that_is_none_is_an_error_of_the_engine(text):
    async def reply(request):
        return web.Response(text=text)

    async def main():
        async with serving(reply) as (_, client):
            with pytest.raises(EngineError, match="engine-0 /generate: "):
                await ask(client, [1], version=0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}},
        chunk(0, 0, 0, {"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_a_refusal_inside_the_stream_is_the_servers_own_message(refusal):
    async def main():
        async with serving(refusal) as (_, client):
            with pytest.raises(EngineError, match="engine-0 /generate: too long"):
                await ask(client, [1], version=0)

    asyncio.run(main())


def test_an_aborted_completion_is_told_apart_and_keeps_what_there_was():
    last = chunk(5, 2, 5, ABORT, weight_versions=attested((3, 0, 2), (5, 2, 5)))

    async def main():
        partial = GrowingCompletion()
        async with serving(streaming(*THREE, last, DONE)) as (_, client):
            with pytest.raises(Aborted, match="generation was aborted: Aborted") as caught:
                await client.generate([1], SAMPLING, partial, version=3)
            assert caught.value.attested
            assert partial.completion() == tokens(4, Span(3, 0, 2), Span(5, 2, 4))
        async with serving(reply_with(finish_reason={"type": "abort"})) as (_, client):
            with pytest.raises(Aborted):
                await client.prompt_logprobs([1])

    asyncio.run(main())


# ---- streams


def test_the_caller_is_told_of_every_chunk_but_the_last_which_ends_the_completion():
    async def main():
        completion, seen = GrowingCompletion(), []

        def grown() -> None:
            seen.append(completion.completion())

        nothing_new = chunk(3, 0, 3)
        async with serving(streaming(*THREE, nothing_new, *WHOLE[2:], DONE)) as (_, client):
            await client.generate([1], SAMPLING, completion, version=2, grown=grown)
            assert completion.completion() == tokens(4, Span(3, 0, 2), Span(5, 2, 4), finish=Finish.STOP)
            assert seen == [tokens(1, Span(2, 0, 1)), tokens(3, Span(2, 0, 1), Span(3, 1, 3))]

    asyncio.run(main())


def test_a_completion_that_has_begun_is_sent_behind_the_prompt_with_the_rest_of_the_budget():
    async def main():
        completion = GrowingCompletion()
        completion.add(1, [7, 8, 9], [-1.0, -1.0, -1.0])
        last = chunk(1, 1, 3, STOP, weight_versions=attested((3, 0, 1)))
        async with serving(streaming(last, DONE)) as (server, client):
            await client.generate([1, 2], SAMPLING, completion, version=3)
            ((_, _, body),) = server.requests
            assert body["input_ids"] == [1, 2, 7, 8, 9]
            assert body["sampling_params"]["max_new_tokens"] == 1
            assert completion.tokens.tolist() == [7, 8, 9, 100]
            assert completion.runs == [(1, 3), (3, 4)]
            assert completion.finish is Finish.STOP

    asyncio.run(main())


def test_a_value_that_cannot_be_trained_is_an_error_of_the_engine():
    """A log-prob that is not a number would make the loss one; an id outside the vocabulary ends a rank."""
    nan = chunk(3, 2, 3)
    nan["meta_info"]["output_token_logprobs"][0][0] = float("nan")
    outside = chunk(3, 2, 3)
    outside["meta_info"]["output_token_logprobs"][0][1] = outside["output_ids"][0] = VOCAB

    async def main():
        for bad, reason in ((nan, "the log-prob nan"), (outside, "the id 30000")):
            completion = GrowingCompletion()
            async with serving(streaming(*ONE, bad, DONE)) as (_, client):
                with pytest.raises(EngineError, match=f"engine-0 /generate: token 1 .* {reason}"):
                    await client.generate([1], SAMPLING, completion, version=3)
            assert completion.completion() == tokens(1, Span(3, 0, 1))

    asyncio.run(main())


def test_the_completion_is_there_although_the_connection_stays():
    async def main():
        async with serving(streaming(*WHOLE, 600.0)) as (_, client):
            async with asyncio.timeout(50):
                assert (await ask(client, [1], version=3)).finish is Finish.STOP

    asyncio.run(main())


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("bug"), TimeoutError()])
def test_what_the_caller_raises_is_its_own_and_not_held_against_the_engine(error):
    def broken():
        raise error

    async def main():
        async with serving(streaming(*WHOLE, DONE)) as (_, client):
            with pytest.raises(type(error)) as caught:
                await ask(client, [1], version=3, grown=broken)
            assert caught.value is error

    asyncio.run(main())


def test_chunks_longer_than_a_read_buffer_arrive_whole():
    n = 20_000
    last = chunk(n, n - 1, 3, STOP, weight_versions=attested((3, 0, n)))

    async def main():
        async with serving(streaming(chunk(1, 1, 3), last, DONE)) as (_, client):
            assert len((await ask(client, [1], version=3)).tokens) == n

    asyncio.run(main())


# ---- losses


def test_no_reply_in_time_from_a_server_that_is_not_well_is_a_loss():
    async def reply(request):
        await asyncio.sleep(600)

    async def main():
        async with serving(reply, timeout_s=0.05, answer_timeout_s=0.05) as (server, client):
            with pytest.raises(EngineLost, match="/generate: nothing came for 0 s"):
                await ask(client, [1], version=0)
            assert not await client.healthy()
            assert "/abort_request" not in {path for _, path, _ in server.requests}

    asyncio.run(main())


def paced(chunks, put_forward, seconds: float):
    """A reply that sends each chunk when the one before was read ``seconds`` ago."""

    async def reply(request):
        if request.path != "/generate":
            return web.json_response({})
        response = web.StreamResponse()
        await response.prepare(request)
        for part in chunks:
            await response.write(event(part))
            if part is not WHOLE[-1]:
                await put_forward(seconds)
        await asyncio.sleep(600)

    return reply


def test_silence_of_a_server_that_is_well_condemns_the_request_and_not_the_server():
    async def main(read, put_forward):
        async with serving(paced(ONE, put_forward, 100)) as (server, client):
            partial = GrowingCompletion()
            with pytest.raises(Silent, match="nothing came for 60 s") as caught:
                await client.generate([1], SAMPLING, partial, version=3, grown=read)
            assert not caught.value.attested
            assert partial.completion() == tokens(1, Span(3, 0, 1))
            (_, _, asked), health, (_, path, aborted) = server.requests
            assert health == ("GET", "/health", None)
            assert (path, aborted) == ("/abort_request", {"rid": asked["rid"]})

    run_put_forward(main)


def test_silence_is_from_chunk_to_chunk_and_not_the_time_of_the_whole_completion():
    async def main(read, put_forward):
        async with serving(paced(WHOLE, put_forward, 40)) as (_, client):
            assert (await ask(client, [1], version=3, grown=read)).finish is Finish.STOP

    run_put_forward(main)


def test_a_stream_that_ends_too_early_is_a_loss_that_keeps_what_there_was():
    async def main():
        for end in ([], [DONE]):
            partial = GrowingCompletion()
            async with serving(streaming(*THREE, *end)) as (_, client):
                with pytest.raises(EngineLost, match="stopped before its end"):
                    await client.generate([1], SAMPLING, partial, version=2)
                assert partial.completion() == tokens(3, Span(2, 0, 1), Span(3, 1, 3))
        nothing = GrowingCompletion()
        async with serving(streaming()) as (_, client):
            with pytest.raises(EngineLost):
                await client.generate([1], SAMPLING, nothing, version=2)
            assert nothing.completion() == tokens(0)

    asyncio.run(main())


def test_a_server_that_dies_in_the_middle_is_a_loss_that_keeps_what_there_was():
    async def main():
        partial = GrowingCompletion()

        async def dying(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for part in THREE:
                await response.write(event(part))
            while len(partial.tokens) < 3:
                await asyncio.sleep(0.005)
            request.transport.abort()
            return response

        async with serving(dying) as (_, client):
            with pytest.raises(EngineLost):
                await client.generate([1], SAMPLING, partial, version=3)
            assert partial.completion() == tokens(3, Span(3, 0, 3))

    asyncio.run(main())


def test_a_server_that_is_not_there_is_a_loss():
    async def main():
        async with EngineClient(address("http://127.0.0.1:9")) as client:
            with pytest.raises(EngineLost, match="ClientConnectorError"):
                await ask(client, [1], version=0)
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
                await ask(client, [1], version=0)

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


def test_completions_one_after_another_share_a_connection(monkeypatch):
    monkeypatch.setattr(connection, "END_S", 60.0)
    monkeypatch.setattr(connection, "KEPT_S", 60.0)

    async def main():
        async with serving(streaming(*WHOLE, 0.02, DONE)) as (server, client):
            for _ in range(3):
                await ask(client, [1], version=3)
            assert len(server.connections) == 1

    asyncio.run(main())


def test_a_completion_that_meets_the_end_of_a_kept_connection_is_asked_for_again():
    """A server that stood still closes what it finds idle before it looks for requests."""
    served = []

    async def once_per_connection(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.splitlines() if line.lower().startswith(b"content-length"))
        served.append(json.loads(await reader.readexactly(int(length.split(b":")[1]))))
        body = b"".join(map(event, WHOLE)) + DONE
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.read(1)  # of the next request
        writer.transport.abort()

    async def main():
        server = await asyncio.start_server(once_per_connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(address(f"http://127.0.0.1:{port}")) as client:
            for _ in range(3):
                assert (await ask(client, [1], version=3)).finish is Finish.STOP
        assert len(served) == 3

    asyncio.run(main())


@pytest.mark.parametrize("chunks", [[], THREE], ids=["before the completion", "within the completion"])
def test_closing_the_client_ends_its_running_requests_as_lost(chunks):
    """So that an engine that is condemned does not keep its requests until their time-out."""

    async def main():
        async with serving(streaming(*chunks, 600.0) if chunks else hang) as (server, client):
            partials = [GrowingCompletion() for _ in range(3)]
            running = [
                asyncio.create_task(client.generate([1], SAMPLING, partial, version=3))
                for partial in partials
            ]
            while len(server.requests) < 3 or (chunks and any(len(p.tokens) < 3 for p in partials)):
                await asyncio.sleep(0.005)
            await client.close()
            ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 50)
            assert [type(error) for error in ended] == [EngineLost] * 3
            assert {len(partial.tokens) for partial in partials} == {3 if chunks else 0}
            with pytest.raises(EngineLost, match="given up"):
                await ask(client, [1], version=3)

    asyncio.run(main())


async def hang(request):
    await asyncio.sleep(600)


@pytest.mark.parametrize("chunks", [[], THREE], ids=["before the completion", "within the completion"])
def test_a_cancelled_request_disconnects_so_that_the_server_stops_generating(chunks):
    async def main():
        async with serving(streaming(*chunks, 600.0) if chunks else hang) as (server, client):
            running = asyncio.create_task(ask(client, [1], version=0))
            while not server.requests:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await asyncio.wait_for(server.disconnected.wait(), 50)

    asyncio.run(main())


def test_a_live_request_that_is_cancelled_is_aborted_by_its_name():
    """SGLang notices the end of a connection only when it has something to send."""

    async def main():
        async with serving(streaming(ONE[0], 600.0)) as (server, client):
            growing = asyncio.Event()
            sampling = LiveSampling(4, {"stop": ["x"]}, priority=100)
            task = asyncio.create_task(ask(client, [1], sampling, version=0, grown=growing.set))
            await asyncio.wait_for(growing.wait(), 60)
            task.cancel()
            await asyncio.wait({task})
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            (_, _, body), abort = server.requests
            assert abort == ("POST", "/abort_request", {"rid": body["rid"]})
            assert (body["priority"], body["sampling_params"]["stop"]) == (100, ["x"])

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRefused), (422, RequestRefused), (503, EngineError)]
)
@pytest.mark.parametrize("way", ["reply", "chunk", "end"])
def test_whether_a_request_would_be_refused_again(status, kind, way):
    refusals = {
        "reply": web.json_response({"error": {"message": "no"}}, status=status),
        "chunk": {"error": {"message": "no", "code": status}},
        "end": chunk(1, 0, 3, {"type": "abort", "message": "no", "status_code": status}),
    }

    async def main():
        async with serving(refusals[way]) as (_, client):
            with pytest.raises(EngineError, match="no") as caught:
                await ask(client, [1], version=0)
            assert type(caught.value) is kind

    asyncio.run(main())


def test_many_requests_run_at_once():
    together = 150
    """More than the 100 connections that aiohttp would allow."""

    async def main():
        everyone = asyncio.Barrier(together)

        async def reply(request):
            await everyone.wait()
            return streamed(REPLY)

        async with serving(reply) as (_, client):
            work = (ask(client, [1], version=0) for _ in range(together))
            assert await asyncio.wait_for(asyncio.gather(*work), 60) == [COMPLETION] * together

    asyncio.run(main())


# ---- load


def test_the_load_is_asked_for_and_a_malformed_one_is_an_error():
    rank = {
        "timestamp": 5.0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "token_usage": 0.25,
        "queues": {"retracted": 0},
    }

    async def main():
        async with serving({"loads": [rank]}) as (server, client):
            assert await client.load() == EngineLoad(3, 1, 0.25, 0, 5.0)
            assert server.requests == [("GET", "/v1/loads", None)]
            server.reply = {"loads": []}
            with pytest.raises(EngineError, match="engine-0 /v1/loads: not a reply"):
                await client.load()

    asyncio.run(main())
