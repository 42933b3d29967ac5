"""The ordinary calls of LangChain and of OpenAI's Agents."""

import asyncio

import openai
import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.tools import CALLS


@pytest.fixture
def model(gateway):
    return ChatOpenAI(model="m", base_url=f"{gateway.url}/v1", api_key="key-anna", max_retries=0)


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"dry in {city}"


def test_langchain_asks_and_streams(model):
    assert model.invoke("#say Hello").content == "Hello"
    assert "".join(chunk.content for chunk in model.stream("#say Grüße")) == "Grüße"


def test_langchain_calls_tools(model):
    bound = model.bind_tools([weather])
    question = HumanMessage(f"#say {CALLS}")
    answer = bound.invoke([question])
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Köln"}, {"city": "Rom"}]
    results = [
        ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
    ]
    assert bound.invoke([question, answer, *results]).content == "ok"


def test_langchain_speaks_responses(gateway):
    model = ChatOpenAI(model="m", base_url=f"{gateway.url}/v1", api_key="key-anna", use_responses_api=True)
    assert model.invoke("#say Hello").text == "Hello"


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
def test_agents_run_tools(gateway, kind, streamed):
    set_tracing_disabled(True)
    cities = []

    @function_tool(name_override="weather")
    def asked_weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "dry"

    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-anna") as client:
            agent = Agent("a", instructions="be brief", model=kind("m", client), tools=[asked_weather])
            if not streamed:
                return (await Runner.run(agent, f"#say {CALLS}")).final_output
            run = Runner.run_streamed(agent, f"#say {CALLS}")
            async for _ in run.stream_events():
                pass
            return run.final_output

    assert asyncio.run(main()) == "ok"
    assert sorted(cities) == ["Köln", "Rom"]
