"""Run folders made by hand, as a run would have left them."""

import json
import math
import random
from pathlib import Path

import yaml

from slipstream.rollout.ledger.episode_log.files import EpisodeFiles

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028 & \ud800 {{ 7*7 }}"


def recipe(name: str = "tiny", steps: int = 12, bound: int = 4, lr: float = 1e-4) -> dict:
    return {
        "run": {"name": name, "steps": steps},
        "actor": {"optimizer": {"lr": lr}},
        "rollout": {"max_head_offpolicyness": bound, "batch_size": 4},
    }


def metrics_line(version: int, step: int, total: int = 12, **more) -> dict:
    draw = random.Random(step)
    reward = 1 / (1 + math.exp(-6 * (step / total - 0.4))) + draw.uniform(-0.06, 0.06)
    late = min(4, step // 2)
    return {
        "step": version,
        "time": 1767225600.0 + 3 * step,
        "train/step": step,
        "reward/mean": reward,
        "staleness/head_max": late,
        "staleness/head_mean": late * 0.7,
        "staleness/token_mean": late * 0.4,
        "staleness/token_lag": [[lag, lag, 1000 // (1 + abs(lag - late // 2))] for lag in range(late + 1)],
        "train/loss": 0.02 * draw.uniform(-1, 1),
        "train/entropy": 1.2 - 0.7 * step / total,
        "train/ess": 0.97,
        "rollout/response_length": 40 + 10 * draw.random(),
        "rollout/groups_generating": 30,
        "rollout/groups_judging": 2,
        "rollout/groups_ready": 5,
        "rollout/requests_running": 96,
        "rollout/requests_limit": 128,
        "perf/step_s": 2.9,
        "perf/train_s": 1.8,
        "perf/trainer_wait_fraction": 0.2,
        "perf/generate_tokens_per_s": 2400 + 300 * draw.random(),
        "perf/train_tokens_per_s": 4000.0,
        "mismatch/logprob_abs_mean": 1e-4,
        **more,
    }


def start_line(settings: dict, version: int = 0) -> dict:
    return {"step": version, "time": 1767225600.0, "run/recipe": f"```yaml\n{yaml.safe_dump(settings)}```"}


def evaluation_line(version: int, reward: float) -> dict:
    return {"step": version, "time": 1767225600.0, "eval/reward": reward, "eval/response_length": 40.0}


def write_lines(path: Path, lines: list[dict], unfinished: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + unfinished)


def trace_lines(steps: int, begin: float = 1000.0, engines: int = 2) -> tuple[list[dict], list[dict]]:
    """Events of the driver and of a collector."""
    driver, collector = [], []
    for step in range(1, steps + 1):
        end = begin + 3.0 * step
        driver.append(
            {"kind": "step", "version": step, "tokens": 4000, "end_s": end, "wait_s": 0.6, "train_s": 1.8}
            | {"step_s": 2.9}
        )
        driver.append({"kind": "publish", "end_s": end, "stall_s": 0.1, "total_s": 0.4, "bytes_sent": 9})
        collector += [
            {"kind": "request", "engine": f"engine-{n % engines}", "start_s": end - 3.0 + 0.1 * n}
            | {"first_token_s": end - 2.5, "end_s": end - 1.2 + 0.2 * n, "prompt_tokens": 9, "new_tokens": 30}
            | {"retractions": 0, "interrupted": False}
            for n in range(8)
        ]
    return driver, collector


def episode(step: int, group: int, number: int, text: str = "1 + 2 = 3 # 3", prompt: str = "1 2 ?") -> dict:
    pieces = list(text)
    reward = float((group + number) % 2)
    third = len(pieces) // 3
    return {
        "end": "trained",
        "group": group,
        "episode": number,
        "reason": None,
        "version": step - 1,
        "prompt": prompt,
        "response": text,
        "reward": reward,
        "reward_parts": {"length": float(len(text))},
        "advantage": reward - 0.5,
        "finish": "stop",
        "response_tokens": len(pieces),
        "trained_tokens": len(pieces),
        "head_lag": 1,
        "lags": [[0, len(pieces) - third], [1, third]],
        "spans": [[step - 2, True, third], [step - 1, True, len(pieces)]],
        "turn_rewards": [],
        "tokens": {
            "text": pieces,
            "logprob": [-0.1 * (k % 7) for k in range(len(pieces))],
            "advantage": [reward - 0.5] * len(pieces),
            "proximal_logprob": [-0.1 * (k % 7) + 0.01 * (k % 3 - 1) for k in range(len(pieces))],
        },
    }


def make_run(
    root: Path, name: str = "tiny", steps: int = 12, *, text: str | None = None, lr: float = 1e-4
) -> Path:
    """A run that is done: metrics, trace and episodes."""
    folder = root / name
    settings = recipe(name, steps, lr=lr)
    lines = [start_line(settings), evaluation_line(0, 0.2)]
    lines += [metrics_line(step, step, steps) for step in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", [*lines, evaluation_line(steps, 0.9)])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    driver, collector = trace_lines(steps)
    write_lines(folder / "trace.jsonl", driver)
    write_lines(folder / "trace-collector-0.jsonl", collector)
    log = EpisodeFiles(folder / "episodes", writer=0, writers=1, max_bytes=10**8, max_rows=10**6)
    for step in range(1, steps + 1):
        rows = [episode(step, 4 * step + group, n) for group in range(4) for n in range(4)]
        if text is not None:
            rows = [episode(step, 4 * step, 0, text, text)]
        log.append(step, rows)
    return folder
