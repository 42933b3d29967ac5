"""The part of a collector that runs episodes of agents, with scripted engines, as a process of its own.

    python -m tests.agents.process FOLDER '{"tool_parser": "qwen25"}'

It prints the port of its control, and ends with its standard input. Each POST runs one episode; the answer
has its trajectories, and every completion of the engines as they sampled it.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from slipstream.rollout.gateway.endpoint.needed import load_endpoint
from tests.environment import environment

VERSION = 4
"""Policy version that the engines serve."""

CONTEXT = 2048
TEMPERATURE = 0.9
START_TIMEOUT_S = 120
OWN_KEYS = dict.fromkeys(
    ("RAY_AUTH_TOKEN", "SGLANG_API_KEY", "VOTING_KEY", "GRADING_KEY", "COLLECTOR_HEADERS"), "secret"
)
"""Variables with keys of the run itself; the recipe names the last three."""


class AgentsProcess:
    """The process, as the tests see it."""

    def __init__(self, folder: Path, *path: Path, **dialect: Any) -> None:
        """``path``: folders from which the process imports, beside ``folder``."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.agents.process", str(folder), json.dumps(dialect)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(folder, *path) | OWN_KEYS | {"USERS_OWN": "1"},
        )
        assert self._process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self._process.kill)
        timer.start()
        line = next((line for line in self._process.stdout if line.startswith(b"port ")), None)
        timer.cancel()
        assert line is not None, f"not started within {START_TIMEOUT_S} s; the error is above"
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{int(line.split()[1])}", timeout=60)

    def episode(self, workflow: dict[str, Any], prompt: str = "#say ok", **more: Any) -> "Episode":
        """Run an episode of a workflow, and return what has become of it."""
        return self._run(workflow=workflow, prompt=prompt, **more)

    def _run(self, **order: Any) -> "Episode":
        return Episode(**self._http.post("/episode", json=order).raise_for_status().json())

    def hooked(self, prompt: str = "#say ok", *, hooks: dict[str, Any], **more: Any) -> "Episode":
        """Run an episode of hooks written for slime."""
        return self._run(hooks=hooks, prompt=prompt, **more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


@dataclass
class Episode:
    """What has become of an episode."""

    error: str | None
    """Why it has failed, or ``stopped``."""
    failures: list[str]
    """Of its attempts."""
    trajectories: list[dict[str, Any]]
    """``tokens``, ``mask``, ``logprobs``, ``versions``, ``finish``, ``reward``, ``parts`` and ``dropped`` of
    each."""
    sampled: list[dict[str, Any]]
    """``ids``, ``tokens``, ``logprobs``, ``versions``, ``start``, ``fields`` of each request to an engine."""
    open: int
    """Attempts whose keys are not void."""
    attempts: int
    texts: list[str] = field(default_factory=list)
    """Text of each trajectory."""
    kept: list[bool] = field(default_factory=list)
    """What the hooks' filter says of two groups: of the episode and a better one, of the episode twice."""

    @property
    def rewards(self) -> list[float | None]:
        return [trajectory["reward"] for trajectory in self.trajectories]

    def trained(self) -> list[list[int]]:
        """Return, for each trajectory, the engines' requests whose tokens carry loss there, by their numbers.

        Checks that each of them stands behind exactly the ids that the engine was given, with the engine's
        own log-probs and versions, and that none carries loss twice.
        """
        used: list[list[int]] = []
        for trajectory in self.trajectories:
            mask, position, requests = trajectory["mask"], 0, []
            tokens, logprobs, versions = (trajectory[name] for name in ("tokens", "logprobs", "versions"))
            while True in mask[position:]:
                start = mask.index(True, position)
                end = mask.index(False, start) if False in mask[start:] else len(mask)
                [number] = [
                    number
                    for number, request in enumerate(self.sampled)
                    if request["ids"] == tokens[:start]
                    and request["tokens"] == tokens[start:end]
                    and request["logprobs"] == logprobs[start:end]
                    and request["versions"] == versions[start:end]
                    and number not in [other for others in [*used, requests] for other in others]
                ][:1]
                requests.append(number)
                position = end
            for token_mask, version, logprob in zip(mask, versions, logprobs, strict=True):
                assert token_mask or (version, logprob) == (None, 0.0)
            used.append(requests)
        return used


# ---- the process


@dataclass
class ScriptedEngines:
    """Engines that follow ``tests.scripted_source``."""

    source: Any
    sampled: list[dict[str, Any]] = field(default_factory=list)
    lost: bool = False
    """No engine serves any more."""
    stop_after: int | None = None
    """Number of deltas behind which the engines stand still."""
    deltas: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        from slipstream.rollout.engine.client import EngineError, RequestRefused
        from slipstream.rollout.engine.engine_pool import NoEngine
        from slipstream.rollout.engine.sampling import request_fields
        from slipstream.rollout.gateway.source import Interrupted, Rejected, TokenRequest
        from slipstream.rollout.tokens.trajectory import Finish

        if self.lost:
            raise NoEngine("no engine has served")
        start = len(completion.tokens)
        fields = request_fields(sampling, done=start, tokens_left=1, greedy=greedy, stream_interval=64)
        request = {"ids": list(input_ids), "start": start, "fields": fields}
        self.sampled.append(request)
        parameters = {**sampling.parameters, "max_new_tokens": sampling.max_new_tokens}
        seen, finish = 0, None
        try:
            async for delta in self.source.generate(TokenRequest(input_ids, parameters)):
                skip = max(0, start - seen)
                seen += len(delta.tokens)
                self.deltas += 1
                if self.stop_after is not None and self.deltas >= self.stop_after:
                    self.stopped.set()
                    await asyncio.Event().wait()
                completion.add(
                    delta.spans[-1][0] if delta.spans else 0, delta.tokens[skip:], delta.logprobs[skip:]
                )
                spans, finish = delta.spans, delta.finish
                if grown is not None and finish is None:
                    grown()
        except Rejected as error:
            raise RequestRefused(str(error)) from error
        except Interrupted as error:
            raise EngineError(str(error)) from error
        assert finish is not None
        completion.retag(0, spans)
        completion.finish, completion.matched = finish.finish, finish.matched
        completion.retractions += 1
        if completion.finish is Finish.PARTIAL:
            completion.finish = Finish.LENGTH
        request |= {
            "tokens": completion.tokens.tolist(),
            "logprobs": completion.logprobs.tolist(),
            "versions": [version for version, n in spans for _ in range(n)],
        }


class Host:
    """Whoever runs an episode, as ``EpisodeHost``: one lease of it."""

    is_given_up = False

    def __init__(self, make: Any, held: Any, context: Any, is_evaluation: bool) -> None:
        self._make = make
        self._is_evaluation = is_evaluation
        self._held = held
        self._context = context
        self.record: Any = None
        self.attempts = 0

    def begin(self, attempt: int) -> Any:
        self.attempts += 1
        if self.record is not None:
            self.record.close()
        self.record = self._make()
        if not attempt:
            self.record.resume(*self._held.prior())
        return self._context(self.record)

    def accept(self, trajectory: Any) -> None:
        if not self._is_evaluation:
            self.record.accept(trajectory)


class Runner:
    """Runs one episode for each order."""

    def __init__(self, served: Any, tokenizer: Any, config: Any) -> None:
        self._served = served
        self._tokenizer = tokenizer
        self._config = config
        self._held: dict[str, Any] = {}
        """Records of episodes, by name."""
        self._workflows: dict[str, Any] = {}
        """By their settings."""

    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        from slipstream.rollout.collection.collector.episodes import Episodes, check
        from slipstream.rollout.collection.collector.evaluation import UnrecordedGenerator
        from slipstream.rollout.collection.collector.outbox import Outbox
        from slipstream.rollout.collection.collector.recording import Recording
        from slipstream.rollout.system.time_limit import TimeLimit
        from slipstream.rollout.tokens.trajectory import Group, Prompt
        from slipstream.rollout.workflow import WorkflowContext
        from tests.scripted_source import ScriptedSource
        from tests.unit.collecting import STATUS, HeldSample, HoldingDriver

        rollout = self._config.rollout.model_copy(update={"episode_attempts": order.get("attempts", 1)})
        engines = ScriptedEngines(ScriptedSource(self._tokenizer, delay_s=order.get("delay_s", 0.0)))
        engines.lost, engines.stop_after = order.get("lost", False), order.get("stop_after")
        outbox, driver, failures = Outbox(), HoldingDriver(), []
        held = self._held.setdefault(order["name"], HeldSample()) if "name" in order else HeldSample()
        driver.samples[5, 0] = held

        def context(record: Any) -> Any:
            asked = UnrecordedGenerator(engines, greedy=True) if is_evaluation else record
            sampling = rollout.sampling
            endpoint = self._served.of(asked, sampling, is_trained=not order.get("evaluation"))
            key = order.get("reward_key", rollout.reward_key)
            return WorkflowContext(
                asked,
                self._tokenizer,
                None,  # type: ignore[arg-type]
                sampling,
                endpoint,
                reward_key=key,
                is_evaluation=is_evaluation,
            )

        class Listener:
            def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
                failures.append(error)

        is_evaluation = order.get("evaluation", False)
        host = Host(partial(Recording, engines, outbox, 5, 1, 0), held, context, is_evaluation)
        checking = partial(check, vocab_size=len(self._tokenizer), workflow="agent")
        limit = TimeLimit(order.get("timeout_s", 60))
        if "hooks" in order:
            hooked = self._hooked(order)
            workflow: Any = hooked.workflow
        else:
            hooked, workflow = None, self._workflow(order["workflow"])
        episodes = Episodes(workflow, rollout, checking, limit, Listener().attempt_failed)

        async def send(message: Any, chunks: Any) -> None:
            driver.take(message, chunks)

        sending = asyncio.create_task(outbox.run(send, lambda: STATUS))
        prompt = Prompt(7, order["prompt"], order.get("label"), order.get("metadata", {}))
        running = asyncio.create_task(episodes.run(prompt, host), name="group 5")
        error, trajectories = None, []
        stopped = asyncio.create_task(engines.stopped.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not running.done():
            host.is_given_up = True
            host.record.write_ends()
            running.cancel()
        try:
            whole = await running
            if not order.get("evaluation"):
                host.record.answered(whole)
                host.record.judged(whole)
            host.record.close()
            trajectories = [_plain(part) for part in whole.split()]
        except asyncio.CancelledError:
            error = "stopped"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        await asyncio.sleep(0.1 if "name" in order else 0.02)  # until the outbox has sent what it has
        sending.cancel()
        if not (error or order.get("evaluation")):
            assert [_plain(part) for part in held.trajectory().split()] == trajectories
        kept: list[bool] = []
        if hooked and hooked.filter and not error:
            better = whole.judged((whole.reward or 0.0) + 1)
            groups = [Group(5, prompt, 3, (whole, other)) for other in (better, whole)]
            kept = [hooked.filter.choose(group) is not None for group in groups]
        return {
            "kept": kept,
            "error": error,
            "failures": failures,
            "trajectories": trajectories,
            "sampled": [request for request in engines.sampled if "tokens" in request],
            "open": len(self._served.attempts),
            "attempts": host.attempts,
            "texts": [self._tokenizer.decode(trajectory["tokens"]) for trajectory in trajectories],
        }

    def _workflow(self, described: dict[str, Any]) -> Any:
        """Return a workflow, which is made once."""
        from slipstream.configs.schema import PluginConfig
        from slipstream.rollout.system import plugins

        key = json.dumps(described)
        if key not in self._workflows:
            self._workflows[key] = plugins.build(PluginConfig.model_validate(described))
        return self._workflows[key]

    def _hooked(self, order: dict[str, Any]) -> Any:
        """Return the parts that hooks written for slime replace, as a recipe names them."""
        from slipstream.configs.schema import HooksConfig
        from slipstream.rollout.compat.hooks import hook_parts

        rollout = self._config.rollout.model_copy(
            update={
                "hooks": HooksConfig.model_validate(order["hooks"]),
                "reward_key": order.get("reward_key", "reward"),
            }
        )
        config = self._config.model_copy(update={"rollout": rollout})
        unused: Any = None  # of functions for whole batches
        return hook_parts(config, self._tokenizer, unused, lambda: VERSION, unused)


def _plain(trajectory: Any) -> dict[str, Any]:
    from slipstream.rollout.tokens.trajectory import UNSAMPLED

    return {
        "tokens": trajectory.tokens_T.tolist(),
        "mask": trajectory.loss_mask_T.tolist(),
        "logprobs": trajectory.logprobs_T.tolist(),
        "versions": [None if version == UNSAMPLED else version for version in trajectory.versions_T.tolist()],
        "finish": trajectory.finish.value,
        "reward": trajectory.reward,
        "parts": dict(trajectory.reward_parts),
        "dropped": trajectory.is_dropped,
    }


async def _main(folder: Path, dialect: dict[str, Any]) -> None:
    serve = load_endpoint()
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from slipstream.configs.schema import RunConfig
    from slipstream.rollout.tokens.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(folder)
    config = RunConfig.model_validate(
        {
            "run": {"name": "agents", "steps": 1},
            "model": {"path": str(folder)},
            "data": {"path": "nowhere"},
            "rollout": {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": {"path": "my.Reward", "args": {"parts": [{"key_variable": "GRADING_KEY"}]}},
                "engine": {"args": {"context_length": CONTEXT}},
                "sampling": {"temperature": TEMPERATURE, "max_new_tokens": 256},
                "endpoint": dialect,
            },
            "judge": {
                "type": "model",
                "endpoint": {"type": "url", "url": "nowhere", "model": "any", "key_env": "VOTING_KEY"},
            },
            "gateway": {"traces": {"endpoint": "http://nowhere", "headers_env": "COLLECTOR_HEADERS"}},
        }
    )
    async with serve(config, context=CONTEXT, version=lambda: VERSION, decode=tokenizer.decode) as served:
        runner = Runner(served, tokenizer, config)

        async def episode(request: Request) -> JSONResponse:
            return JSONResponse(await runner.run(await request.json()))

        app = Starlette(routes=[Route("/episode", episode, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)  # uvicorn announces its start by this flag alone
        print("port", server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving


def _end_with_owner() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_owner, name="end-with-owner", daemon=True).start()
    asyncio.run(_main(Path(sys.argv[1]), json.loads(sys.argv[2])))
