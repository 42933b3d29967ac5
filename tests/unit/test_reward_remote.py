"""The remote reward, against a server that answers as it is told."""

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from slipstream.rollout.reward import Remote
from slipstream.rollout.reward.judge.judge_pool import JudgingFailed
from slipstream.rollout.reward.remote import ServerUnavailable
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import Judging, trajectory

PROMPT = Prompt(3, [{"role": "user", "content": "ä?"}], {"answer": [4, None]}, {"level": 1})


class Server:
    """Answers each request with the next of ``answers``; the last one stays."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[dict[str, Any], str | None]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((await request.json(), request.headers.get("Authorization")))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer == "hang":
            await asyncio.sleep(60)
        if answer == "cut":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(answer, web.Response):
            return answer
        status, text = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, body=text.encode() if isinstance(text, str) else text)


def ask(
    answers: Sequence[Any], response: str = "text", prompt: Prompt = PROMPT, **args: Any
) -> tuple[Any, Server]:
    """Return what the reward returns or raises, and the server."""
    server = Server(answers)
    settings = {"retry_after_s": 0.01, "timeout_s": 60.0} | args

    async def main() -> Any:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/score", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        reward = Remote(f"http://127.0.0.1:{port}/score", **settings)
        try:
            return await reward.score(prompt, response, trajectory())
        except Exception as error:
            return error
        finally:
            session = reward._session
            if session is not None:
                await session[1].close()
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 120)), server


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("0.5", 0.5),
        ("1", 1.0),
        ("true", 1.0),
        (" -2e3\n", -2000.0),
        ('{"score": 1, "acc": 0}', {"score": 1, "acc": 0}),
    ],
)
def test_the_answer_is_a_number_or_an_object(answer, value):
    given, server = ask([answer])
    assert given == value
    [(body, authorization)] = server.requests
    assert body == {
        "prompt": [{"role": "user", "content": "ä?"}],
        "response": "text",
        "label": {"answer": [4, None]},
        "metadata": {"level": 1},
    }
    assert authorization is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("null", "returned None"),
        ("NaN", "NaN is no number"),
        ("[1]", "of type list"),
        ('"0.5"', "the server answers '0.5', expected a number or an object of numbers"),
        ("", "is no JSON"),
        ("<html>", "is no JSON: .* it is '<html>'"),
        (b"\xff\xfe\x00", "is no JSON"),
        ("9" * 5000, "is no JSON"),
        ("1e999", "returned inf"),
        ("[" * 100_000, "is no JSON"),
        ("1" + " " * 2000, "an answer of more than 1000 bytes"),
        ((404, "nothing here"), "status 404: 'nothing here'"),
        ((400, "x" * 10_000), "status 400: 'x{300}'$"),
        ((302, ""), "status 302"),
    ],
)
def test_an_answer_that_is_no_number_is_a_failure_and_is_not_asked_for_again(answer, reason):
    given, server = ask([answer], longest_answer=1000 if reason.startswith("an answer") else 200_000)
    with pytest.raises(ValueError, match=reason):
        raise given
    assert len(server.requests) == 1


@pytest.mark.parametrize("first", [(500, "down"), (503, ""), (429, "slow"), "cut"])
def test_what_another_request_may_help_is_asked_again(first):
    given, server = ask([first, first, "0.25"])
    assert (given, len(server.requests)) == (0.25, 3)


@pytest.mark.parametrize(
    ("answer", "args", "reason"),
    [
        ((503, "loading"), {}, "status 503: 'loading'.*in the last of 3 requests"),
        ("hang", {"timeout_s": 0.05}, r"no answer in 0.05 s, in the last of 3"),
    ],
)
def test_after_the_last_request_the_judging_has_failed(answer, args, reason):
    given, server = ask([answer], requests=3, **args)
    with pytest.raises(ServerUnavailable, match=reason):
        raise given
    assert len(server.requests) == 3


def test_a_server_that_is_not_there_is_a_failure():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"

    async def main() -> None:
        reward = Remote(url, requests=2, retry_after_s=0.01)
        try:
            await reward.score(PROMPT, "text", trajectory())
        finally:
            assert reward._session is not None
            await reward._session[1].close()

    with pytest.raises(ServerUnavailable, match=r"Cannot connect.*in the last of 2 requests"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("failures", "said", "least", "most"),
    [
        (0, "", 1.0, 1.25),
        (3, "", 8.0, 10.0),
        (0, "30", 30.0, 37.5),
        (0, "soon", 1.0, 1.25),
        (20, "", 60.0, 60.0),
    ],
)
def test_the_wait_doubles_and_the_server_can_make_it_longer(failures, said, least, most):
    reward = Remote("http://localhost/")
    waits = [reward._wait_s(failures, ServerUnavailable("status 503", said)) for _ in range(50)]
    assert least <= min(waits) and max(waits) <= most


def test_a_key_comes_from_the_environment_and_is_sent(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", " secret\n")
    _, server = ask(["1"], key_variable="KEY_OF_THE_JUDGE")
    assert server.requests[0][1] == "Bearer secret"


def test_a_key_is_not_sent_to_another_address(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", "secret")
    elsewhere = web.Response(status=307, headers={"Location": "/score?again"})
    given, server = ask([elsewhere, "1"], key_variable="KEY_OF_THE_JUDGE")
    assert isinstance(given, ValueError) and len(server.requests) == 1


@pytest.mark.parametrize("response", ["\ud800 \x00 \U0001f600", "x" * 1_000_000])
def test_any_response_can_be_sent(response):
    given, server = ask(["1"], response)
    assert given == 1.0
    assert server.requests[0][0]["response"] == response


@pytest.mark.parametrize(
    ("prompt", "args", "reason"),
    [
        (Prompt(3, "?", b"bytes"), {}, "prompt 3 has a label or metadata that JSON does not have"),
        (Prompt(3, "?", float("nan")), {}, "prompt 3 has a label or metadata that JSON does not have"),
        (PROMPT, {"longest_request": 50}, "bytes of JSON, expected at most 50"),
    ],
)
def test_what_cannot_be_sent_is_a_failure(prompt, args, reason):
    given, server = ask(["1"], prompt=prompt, **args)
    with pytest.raises(ValueError, match=reason):
        raise given
    assert server.requests == []


def test_a_label_that_cannot_be_sent_is_found_before_a_run():
    reward = Remote("http://host")
    reward.check_prompt(PROMPT)
    for label in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"prompt 3 has the label {label}, expected a value"):
            reward.check_prompt(Prompt(3, "?", label))


def test_all_arguments_that_are_wrong_are_named_at_once(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(
        ValueError, match=r"(?s)timeout_s: found 0.*requests: found -1.*url: found 'host'.*NO_KEY"
    ):
        Remote("host", "NO_KEY", timeout_s=0, requests=-1)


def test_in_a_judge_process_a_broken_server_costs_its_own_question_only(tmp_path, monkeypatch):
    judging = Judging(tmp_path, monkeypatch)
    server = Server(["null"])

    async def handle(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        return await server.handle(request) if body["response"] == "bad" else web.json_response(0.75)

    async def work(pool):
        async def about(response):
            return (await pool.score(PROMPT, response, trajectory())).reward

        return await asyncio.gather(about("bad"), about("good"), return_exceptions=True)

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            async with judging.pool_of("slipstream.rollout.reward.Remote", {"url": url}) as pool:
                return await work(pool)
        finally:
            await runner.cleanup()

    failed, good = asyncio.run(asyncio.wait_for(main(), 120))
    assert isinstance(failed, JudgingFailed) and "it returned None" in str(failed)
    assert good == 0.75
    judging.assert_nothing_is_left()
