"""Agents as the tests name them by import path. The scripted policy says what a user's message asks for."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import openai

from tests.clients.tools import CALLS, PARAMETERS, TOOLS

Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def client(base_url: str, api_key: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **{"max_retries": 0, **more})


async def say(openai_client: openai.AsyncOpenAI, messages: Chat, **more: Any) -> str:
    reply = await openai_client.chat.completions.create(model="m", messages=messages, **more)  # type: ignore
    return reply.choices[0].message.content or ""


async def talk(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Ask three times in one conversation."""
    async with client(base_url, api_key) as policy:
        messages = [user(prompt)]
        for text in ("#say Grüße, 世界!", "#say three"):
            messages.append({"role": "assistant", "content": await say(policy, messages)})
            messages.append(user(text))
        await say(policy, messages)
    return 0.5


async def stream(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    async with client(base_url, api_key) as policy:
        messages = [user("#chunk=1 #say Grüße, 世界!")]
        for _ in range(2):
            events = await policy.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore
            parts = [event.choices[0].delta.content or "" async for event in events]  # type: ignore
            messages += [{"role": "assistant", "content": "".join(parts)}, user("#chunk=3 #say zwei")]
    return 1.0


async def use_tools(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> dict[str, float]:
    """Call tools as the policy says."""
    async with client(base_url, api_key) as policy:
        messages: Chat = [{"role": "system", "content": "Be good."}, user(f"#say Let me see.\n{CALLS}")]
        completion = await policy.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"})
        messages.append(user("#say It rains."))
        await say(policy, messages, tools=TOOLS)
    return {"reward": float(metadata["level"]), "length": 5.0}


async def talk_to_claude(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> None:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0
    ) as policy:
        messages: Any = [user(f"#say {CALLS}")]
        async with policy.messages.stream(
            model="m", max_tokens=200, messages=messages, tools=tools
        ) as stream:  # type: ignore
            first = await stream.get_final_message()
        messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "#say done"}]})
        await policy.messages.create(model="m", max_tokens=200, messages=messages, tools=tools)  # type: ignore


async def delegate(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """A planner and two workers with other system messages, side by side; then the planner goes on."""

    def worker(k: int) -> Chat:
        return [{"role": "system", "content": f"You are worker {k}."}, user(f"#chunk=1 #say work {k}")]

    async with client(base_url, api_key) as policy:
        plan: Chat = [{"role": "system", "content": "You plan."}, user("#say plan")]
        plan.append({"role": "assistant", "content": await say(policy, plan)})
        results = await asyncio.gather(*(say(policy, worker(k)) for k in range(2)))
        plan.append(user(f"{results} #say finished"))
        await say(policy, plan)
    return 1.0


async def sample_twice(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Several answers to one prompt, of which the first goes on; and the same request again."""
    async with client(base_url, api_key) as policy:
        messages: Chat = [user("#say same")]
        await policy.chat.completions.create(model="m", messages=messages, n=2)  # type: ignore
        answer = await say(policy, messages)
        await say(policy, [*messages, {"role": "assistant", "content": answer}, user("#say more")])
    return 1.0


async def rewrite(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Compact the history on the way."""
    async with client(base_url, api_key) as policy:
        await talk(base_url, api_key, prompt, metadata)
        await say(policy, [user("Summary: all is well. #say go on")])
    return 1.0


async def sample_otherwise(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """The second of three turns is greedy."""
    async with client(base_url, api_key) as policy:
        messages = [user("#say one")]
        for temperature in (None, 0.0, 0.9):
            more = {} if temperature is None else {"temperature": temperature}
            messages.append({"role": "assistant", "content": await say(policy, messages, **more)})
            messages.append(user("#say next"))
    return 1.0


async def be_greedy(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    async with client(base_url, api_key) as policy:
        await say(policy, [user("#say one")], temperature=0.0)
    return 1.0


async def ask_native(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Send ids to SGLang's own endpoint, as programs for training do."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), headers=headers) as http:
        text = "<|im_start|>user\n#say native<|im_end|>\n<|im_start|>assistant\n"
        body: dict[str, Any] = {
            "text": text,
            "sampling_params": {"max_new_tokens": 50},
            "return_logprob": True,
        }
        reply = (await http.post("/generate", json=body)).raise_for_status().json()
        ids = [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]
        assert ids == reply["output_ids"]
    return 1.0


async def ask_nothing(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    return 1.0


async def raise_error(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    await talk(base_url, api_key, prompt, metadata)
    raise RuntimeError("the environment is broken")


async def return_nonsense(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> Any:
    await talk(base_url, api_key, prompt, metadata)
    return float("nan") if prompt == "nan" else "good" if prompt == "text" else {"score": 1.0}


async def leave_requests(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Return while a request stands still, and ask again behind the end."""
    policy = client(base_url, api_key)
    await say(policy, [user("#say one")])
    left = asyncio.create_task(say(policy, [user("#hold #chunk=1 #say never")]))
    await asyncio.sleep(1.5)  # until it has arrived
    LEFT.append((left, policy))
    return 1.0


LEFT: list[tuple[asyncio.Task[str], openai.AsyncOpenAI]] = []


async def look_back(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Say what became of the request that an episode before has left, and whether its key still counts."""
    left, policy = LEFT.pop()
    statuses: list[float] = []
    for asking in (left, say(policy, [user("#say two")])):
        try:
            await asyncio.wait_for(asking, 60)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)
    await policy.close()
    async with client(base_url, api_key) as other:
        await say(other, [user("#say one")])
    assert statuses == [503, 401], statuses
    return {"reward": 1.0}


async def retry(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Ignore errors, time-outs and refusals, as careless agents do, and go on."""
    async with client(base_url, api_key, max_retries=1) as policy:
        for text in ("#reject", "#fail #say broken"):
            with suppress(openai.APIError):
                await say(policy, [user(text)])
        with suppress(openai.APITimeoutError):
            await say(policy, [user("#hold #chunk=1 #say slow")], timeout=0.3)
        events = await policy.chat.completions.create(
            model="m",
            messages=[user("#hold #chunk=1 #say gone")],
            stream=True,  # type: ignore
        )
        async for _ in events:
            break
        await events.close()
        messages = [user("#say fine")]
        messages.append({"role": "assistant", "content": await say(policy, messages)})
        await say(policy, [*messages, user("#say end")])
    return 1.0


async def go_on(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Ask until the limit: without looking at errors, or politely."""
    async with client(base_url, api_key) as policy:
        messages = [user("#say 12345678")]
        while True:
            try:
                answer = await say(policy, messages)
            except openai.BadRequestError as error:
                if prompt == "raise":
                    raise
                assert error.status_code == 400 and "this episode must end here" in str(error)
                return 1.0
            messages += [{"role": "assistant", "content": answer}, user("#say 12345678")]


async def fill_context(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Ask with a prompt that is too long; compact it and go on if the prompt says so."""
    async with client(base_url, api_key) as policy:
        await say(policy, [user("#say one")])
        try:
            await say(policy, [user("long " * 1000 + "#say two")])
        except openai.BadRequestError:
            if prompt != "compact":
                raise
        await say(policy, [user("#say short")])
    return 1.0


async def ask_slowly(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Two conversations side by side, of two turns each."""

    async def converse(k: int) -> None:
        messages = [user(f"#chunk=2 #say conversation {k}")]
        for _ in range(2):
            messages.append({"role": "assistant", "content": await say(policy, messages)})
            messages.append(user("#chunk=2 #say and so on and so on"))

    async with client(base_url, api_key) as policy:
        await asyncio.gather(converse(0), converse(1))
    return 1.0


async def spy(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> float:
    """Name the session of other episodes, and guess keys."""
    async with client(base_url, api_key) as policy:
        await say(policy, [user("#say mine")], extra_headers={"X-Session-Id": "other"})
    async with client(base_url, api_key[:-1] + ("a" if api_key[-1] != "a" else "b")) as stranger:
        try:
            await say(stranger, [user("#say yours")])
        except openai.AuthenticationError:
            return 1.0
    return 0.0


def block(base_url: str, api_key: str, prompt: str, metadata: dict[str, Any]) -> dict[str, float]:
    """Use a client that blocks."""
    print("a text that is no reward")
    with openai.OpenAI(base_url=base_url, api_key=api_key) as policy:
        reply = policy.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "#say blocking"}]
        )
    assert reply.choices[0].message.content == "blocking"
    return {"reward": 0.25}
