"""A task set of verifiers with a harness of its own, which asks the policy twice without a program."""

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

WORDS = ("one", "two", "fail", "limit")


class SpellingData(vf.TaskData):
    word: str


class SpellingTask(vf.Task[SpellingData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task: SpellingData, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == task.word)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Spelling(vf.Taskset[SpellingTask, vf.TasksetConfig]):
    def load(self):
        for word in WORDS:
            yield SpellingTask(SpellingData(prompt=f"#say {word}", word=word), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *more):
        if data.word == "fail":
            raise RuntimeError("the world has ended")
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(5 if data.word == "limit" else 2):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    return vf.ProgramResult(1, "", reply.text)
                answer = reply.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": answer["content"]},
                    {"role": "user", "content": data.prompt},
                ]
        return vf.ProgramResult(0, "", "")


__all__ = ["AskTwice", "Spelling"]
