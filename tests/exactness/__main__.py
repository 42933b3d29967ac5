"""Random conversations through the whole endpoint: is what is trained what the engines have sampled?

    python -m tests.exactness --conversations 1000 --seed 1       scripted engines, all chat templates
    python -m tests.exactness --conversations 100 --rewriting     agents that rewrite their histories
    python -m tests.exactness --conversations 20 --engine real    an SGLang server; the trainer's log-probs

Prints one JSON object. Exit code 1 if anything in it is wrong.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream.rollout.engine.server_process import let_import_sglang
from tests.exactness.gateway import without_stand_ins

ALLOWED_GAP = 1e-4
WRONG = (
    "mismatched_ids",
    "missing_logprobs",
    "tokens_with_loss_twice",
    "untrainable_trained",
    "wrong_versions",
    "wrong_questions",
    "wrong_prompts",
    "wrong_answers",
    "lost_turns",
    "discrepancies",
)
WRONG_PAIRS = ("wrong_pairs", "mixed_users", "wrong_ends")
"""Of agents that rewrite their histories."""


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the reports of all dialects."""
    total: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            if isinstance(value, dict):
                before = total.setdefault(name, {})
                for key, number in value.items():
                    before[key] = before.get(key, 0) + number
            else:
                total[name] = total[name] + value if name in total else value
    return total


async def converse_with_server(folder: Path, conversations: int, seed: int) -> dict[str, Any]:
    """Hold the conversations with a real server."""
    from tests.exactness.real import real_scene, worst_gap
    from tests.exactness.run import Run

    async with real_scene(folder) as scene:
        run = Run(folder, scene, seed)
        run.oracle.keeps = True
        report = await run.converse(range(conversations))
    with without_stand_ins():
        return report | {"worst_logprob_gap": worst_gap(folder, run.oracle.trajectories)}


async def converse(
    folder: Path, conversations: int, seed: int, only: str | None, *, rewriting: bool
) -> dict[str, Any]:
    """Hold the conversations, in turns by all dialects."""
    from tests.exactness.dialects import DIALECTS
    from tests.exactness.run import Run, scripted_scene

    dialects = [dialect for dialect in DIALECTS if only in (None, dialect.name)]
    reports = []
    for place, dialect in enumerate(dialects):
        numbers = range(place, conversations, len(dialects))
        if numbers:
            home = folder / dialect.name
            home.mkdir()
            scene = scripted_scene(home, dialect, seed)
            reports.append(await Run(home, scene, seed, rewriting=rewriting).converse(numbers))
    return merged(reports)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=["scripted", "real"], default="scripted")
    parser.add_argument("--dialect", help="only this chat template")
    parser.add_argument("--rewriting", action="store_true", help="agents that rewrite their histories")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    let_import_sglang()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exactness-") as folder:
        home, conversations, seed = Path(folder), arguments.conversations, arguments.seed
        if arguments.engine == "real":
            report = asyncio.run(converse_with_server(home, conversations, seed))
        else:
            rewriting = arguments.rewriting
            report = asyncio.run(converse(home, conversations, seed, arguments.dialect, rewriting=rewriting))
    report["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(report, ensure_ascii=False))
    wrong = any(report.get(name) for name in (*WRONG, *WRONG_PAIRS))
    sys.exit(wrong or report.get("worst_logprob_gap", 0) >= ALLOWED_GAP)


if __name__ == "__main__":
    main()
