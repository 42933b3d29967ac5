"""Whole gateway processes: what their clients still have after a kill, whichever process they reach."""

import json

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.rollout.gateway.peers import read_address
from tests.http_engine import EngineProcess, Pace
from tests.live_run import LiveRun

PROCESSES = 2
AGAIN = 4
"""Number of connections, each of which the kernel gives to one of the processes."""


@pytest.fixture(scope="module")
def run(chat_model, tmp_path_factory):
    with (
        EngineProcess(Pace(tokens=24, interval_s=0.02)) as engine,
        LiveRun(tmp_path_factory.mktemp("live"), chat_model, [engine.url], processes=PROCESSES) as run,
    ):
        yield run


@pytest.fixture
def connect(run):
    """Returns a function that makes a client with a connection of its own."""
    clients = []

    def client() -> openai.OpenAI:
        clients.append(openai.OpenAI(base_url=f"{run.url}/v1", api_key=run.key, max_retries=0))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def test_a_conversation_goes_on_by_the_names_of_its_responses_after_a_kill(run, connect):
    first = connect().responses.create(model="m", input="one", metadata={"a": "b"})
    second = connect().responses.create(model="m", input="two", previous_response_id=first.id)
    run.kill_gateways()
    for _ in range(AGAIN):
        assert connect().responses.retrieve(first.id).to_dict() == first.to_dict()
    third = connect().responses.create(model="m", input="three", previous_response_id=second.id)
    assert third.session_id == second.session_id == first.session_id
    # The prompt has everything: one, the answer, two, the answer, three.
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    other = connect().responses.create(model="m", input="two", previous_response_id=first.id)
    assert other.usage.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        connect().responses.create(model="m", input="x", previous_response_id="resp_" + "0" * 32)


def test_an_answer_is_aborted_whichever_process_hears_of_it(run):
    for _ in range(AGAIN):
        with httpx.Client(base_url=run.url, headers=run.headers) as http:
            body = {"text": "hi", "stream": True}
            with http.stream("POST", "/generate", json=body) as reply:
                rid = {"rid": reply.headers["x-request-id"]}
                aborted = httpx.post(f"{run.url}/abort_request", json=rid, headers=run.headers)
                assert aborted.json() == {"aborted": 1}
                events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert json.loads(events[-1])["meta_info"]["finish_reason"]["type"] == "abort"


def turns_of(run: LiveRun, number: int) -> float:
    """Return the number of main turns that a process shows."""
    address = read_address(run.config.run.folder, number)
    figures = httpx.get(f"{address.admin}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(figures)
        for sample in family.samples
        if sample.name == "slipstream_gateway_turns_total" and sample.labels["type"] == "main"
    )


def test_each_process_shows_the_figures_of_its_sessions(run):
    before = [turns_of(run, number) for number in range(PROCESSES)]
    for number in range(PROCESSES * AGAIN):
        body = {"text": f"hi {number}", "session_id": str(number), "sampling_params": {"max_new_tokens": 1}}
        httpx.post(f"{run.url}/generate", json=body, headers=run.headers).raise_for_status()
    served = [turns_of(run, number) - before[number] for number in range(PROCESSES)]
    assert sum(served) == PROCESSES * AGAIN
    assert all(served)
