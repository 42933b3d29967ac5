"""Starts the commands of the plan one after the other, and makes what they start from."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.one_gpu.figures import Ended, figures_of_run, figures_of_step
from benchmarks.one_gpu.plan import Command, Inputs, Step
from slipstream.backend.quickstart import WARM_START_STEPS, prepare
from slipstream.configs.published import MODELS

END_TIMEOUT_S = 120.0
"""Longest time in which a run that has been told to stop writes its checkpoint and ends."""
LAST_LINES = 12
"""Lines of the output of a failed command that are shown."""
DRY_WARM_START = 40
"""Steps of the policy's warm start in a dry run: it only has to generate something."""
DRY_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
"""Fields of Qwen3-0.6B's config.json that a dry run replaces."""


def make_inputs(inputs: Inputs, *, large: bool, dry: bool, say: Callable[[str], None]) -> None:
    """Make the policy and the prompts, and with ``large`` the model of Qwen3-0.6B's shape. On CPUs."""
    steps = DRY_WARM_START if dry else WARM_START_STEPS
    prepare(inputs.policy, inputs.train, inputs.held_out, say=say, warm_start_steps=steps)
    if large and not inputs.large.exists():
        _write_large(inputs.large, dry=dry)


def _write_large(folder: Path, *, dry: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slipstream.backend.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    shape = json.loads((MODELS / "Qwen3-0.6B" / "config.json").read_text(encoding="utf-8"))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3Config.from_dict({**shape, **ends, **(DRY_MODEL if dry else {})})
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(command: Command, root: Path, *, limit_s: float) -> Ended:
    """Run a command to its end, for ``limit_s`` at most, and read its figures. Its output is in ``root``."""
    log, began = root / f"{command.name}.log", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.arguments(root)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | command.environment,
        )
        returncode = _wait(process, limit_s)
    output = log.read_text(encoding="utf-8", errors="replace")
    is_step = isinstance(command, Step)
    figures = figures_of_step(output) if is_step else figures_of_run(root / command.name)
    ended = Ended(command.name, returncode, round(time.monotonic() - began, 1), figures, str(log))
    return replace(ended, last_lines=tuple(output.splitlines()[-LAST_LINES:])) if ended.failed else ended


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
    """Return the exit status; None for a process that has been ended because of the limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    except BaseException:
        process.terminate()
        raise
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None
