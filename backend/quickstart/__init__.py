"""Makes the inputs of the quickstart: a tiny policy with a bad habit, train prompts and held-out prompts.

Nothing is downloaded. On two CPU cores it takes about half a minute, mostly for the policy's warm start.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from slipstream.backend.quickstart import task

if TYPE_CHECKING:
    from slipstream.backend.quickstart.warm_start import Demonstrate

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
) -> None:
    """Write the parts that do not exist yet, each determined by `seed`. Raises ValueError for equal paths.

    `model_path` becomes a Hugging Face checkpoint directory, `data_path` and `eval_path` become JSON lines of
    `{"prompt": ..., "label": ...}`, and are left out if they are None. No prompt is in both, even if they are
    written with different seeds.

    Parts are built beside their place and renamed when all are done: a part that exists is complete, whatever
    interrupted a preparation. `say` receives progress lines. `hidden` is the hidden size of the policy: a
    wider one spends a larger share of a step on training.
    """
    parts: list[tuple[Path | None, Callable[[Path], None]]] = [
        (data_path, lambda path: write_problems(path, task.train_set(seed, TRAIN_PROBLEMS))),
        (eval_path, lambda path: write_problems(path, task.held_out_set(seed, HELD_OUT_PROBLEMS))),
        (model_path, lambda path: write_policy(path, seed, steps=warm_start_steps, say=say, hidden=hidden)),
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


def write_problems(path: Path, problems: Sequence[task.Problem]) -> None:
    """Write one JSON object per line."""
    lines = (json.dumps({"prompt": problem.prompt, "label": problem.label}) for problem in problems)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_policy(
    path: Path,
    seed: int,
    *,
    steps: int,
    say: Callable[[str], None],
    demonstrate: "Demonstrate | None" = None,
    hidden: int = HIDDEN,
) -> None:
    """Write policy and tokenizer to `path` after a warm start of `steps`; `say` receives its accuracy.

    `demonstrate` makes what the warm start shows; None: responses with the bad habit. `hidden` is the hidden
    size of the policy.
    """
    # Imported here: torch takes seconds to load, which a preparation with nothing to do must not take.
    from transformers import Qwen3ForCausalLM

    from slipstream.backend.quickstart import policy as policies
    from slipstream.backend.quickstart.tokenizer import build_tokenizer
    from slipstream.backend.quickstart.warm_start import noisily, warm_start

    started = time.monotonic()
    tokenizer = build_tokenizer()
    untrained = path.with_name(f"{path.name}-untrained")
    policy = policies.build_policy(tokenizer, seed, hidden)
    say(f"  {policy.num_parameters():,} parameters, Qwen3")
    policy.save_pretrained(untrained)
    tokenizer.save_pretrained(untrained)
    warm_start(untrained, path, seed=seed, steps=steps, demonstrate=demonstrate or noisily)
    held_out = task.held_out_set(seed, HELD_OUT_PROBLEMS)
    trained = Qwen3ForCausalLM.from_pretrained(path)
    accuracy = policies.greedy_accuracy(trained, tokenizer, held_out)
    seconds = time.monotonic() - started
    say(f"  greedy accuracy on {len(held_out)} held-out prompts: {accuracy:.1%} ({seconds:.0f} s)")


def _room_beside(path: Path) -> TemporaryDirectory[str]:
    """Return a temporary directory on the file system of `path`, within reach of an atomic rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.unfinished-")
