"""Makes a tiny policy, train prompts and held-out prompts for a task: the quickstart's, or one of your own.

Nothing is downloaded. On two CPU cores it takes about half a minute, mostly for the policy's warm start.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.backend.quickstart.task import SUMS, Problem, Task, held_out_set, train_set

HIDDEN = 128
"""Hidden size of the policy."""
TRAIN_PROBLEMS = 4096
HELD_OUT_PROBLEMS = 300
WARM_START_STEPS = 300
"""220 steps can be enough; the others make the result steady over seeds."""


def prepare(
    model_path: Path,
    data_path: Path | None = None,
    eval_path: Path | None = None,
    *,
    seed: int = 0,
    say: Callable[[str], None] = print,
    warm_start_steps: int = WARM_START_STEPS,
    hidden: int = HIDDEN,
    task: Task = SUMS,
    held_out: int = HELD_OUT_PROBLEMS,
) -> None:
    """Write the parts that do not exist yet, each determined by `seed` and `task`.

    `model_path` becomes a Hugging Face checkpoint directory, `data_path` and `eval_path` become JSON lines of
    `{"prompt": ..., "label": ...}`, and are left out if they are None. No prompt is in both, even if they are
    written with different seeds.

    Parts are built beside their place and renamed when all are done: a part that exists is complete, whatever
    interrupted a preparation. `say` receives progress lines. `hidden` is the hidden size of the policy: a
    wider one spends a larger share of a step on training. `held_out` is the number of held-out prompts.

    Raises ValueError for equal paths, and for a task with too few held-out prompts.
    """
    parts: list[tuple[Path | None, Callable[[Path], None]]] = [
        (data_path, lambda path: write_problems(path, train_set(seed, TRAIN_PROBLEMS, task.draw))),
        (eval_path, lambda path: write_problems(path, held_out_set(seed, held_out, task.draw))),
        (
            model_path,
            lambda path: write_policy(path, seed, steps=warm_start_steps, say=say, task=task, hidden=hidden),
        ),
    ]
    builders = {path: build for path, build in parts if path is not None}
    if len(builders) < sum(path is not None for path, _ in parts):
        raise ValueError(
            f"the three parts need three different paths, found {model_path}, {data_path}, {eval_path}"
        )
    missing = {path: build for path, build in builders.items() if not path.exists()}
    for path in builders:
        if path not in missing:
            say(f"prepare: {path} exists, keeping it")
    with ExitStack() as stack:
        built = {path: Path(stack.enter_context(_room_beside(path)), path.name) for path in missing}
        for path, build in missing.items():
            say(f"prepare: making {path}")
            build(built[path])
        for path in missing:
            os.replace(built[path], path)


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(asdict(problem))}\n" for problem in problems))


def write_policy(
    path: Path,
    seed: int,
    *,
    steps: int,
    say: Callable[[str], None],
    task: Task = SUMS,
    hidden: int = HIDDEN,
) -> None:
    """Write policy and tokenizer to `path` after a warm start of `steps` on demonstrations of `task`.

    `hidden` is the hidden size of the policy.
    """
    # Imported here: torch takes seconds to load, which a preparation with nothing to do must not take.
    from slipstream.backend.quickstart.policy import build_policy
    from slipstream.backend.quickstart.tokenizer import build_tokenizer
    from slipstream.backend.quickstart.warm_start import warm_start

    started = time.monotonic()
    tokenizer = build_tokenizer(task.symbols)
    untrained = path.with_name(f"{path.name}-untrained")
    policy = build_policy(tokenizer, seed, hidden)
    say(f"  {policy.num_parameters():,} parameters, {len(tokenizer)} symbols, Qwen3")
    policy.save_pretrained(untrained)
    tokenizer.save_pretrained(untrained)
    warm_start(untrained, path, seed=seed, steps=steps, task=task)
    say(f"  warm start of {steps} steps: {time.monotonic() - started:.0f} s")


def _room_beside(path: Path) -> TemporaryDirectory[str]:
    """Return a temporary directory on the file system of `path`, within reach of an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.unfinished-")
