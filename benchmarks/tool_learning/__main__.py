"""A policy that misuses its tool unlearns that by RL, in conversations with a calculator in a sandbox.

    python -m benchmarks.tool_learning [--seeds 0 1 2]

`slipstream train` runs `ToolUse` episodes of three turns: two calls and an answer. The warm start's
demonstrations mostly tell the calculator to add where the prompt has a minus. The only reward is that of the
last answer. Held-out problems are asked at temperature 0 before and after the training steps. `gains` are
percentage points. Each seed has a policy, prompts and held-out problems of its own.
"""

import json
import tempfile
import time
from pathlib import Path

from benchmarks.harness import parser
from benchmarks.tool_learning.run import Outcome, learn
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

TABLE: Columns[Outcome] = {
    "seed": lambda row: row.seed,
    "before": lambda row: f"{row.before:.1%}",
    "after": lambda row: f"{row.after:.1%}",
    "gain, points": lambda row: f"{row.gain:+.1f}",
    "episodes trained": lambda row: f"{row.trained:,}",
    "largest lag": lambda row: row.max_lag,
    "seconds": lambda row: f"{row.seconds:.0f}",
    "audit": lambda row: "clean" if not row.discrepancies else f"{row.discrepancies} discrepancies",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = options.parse_args().seeds
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-tool-learning-") as root:
        outcomes = [learn(Path(root), seed) for seed in seeds]
    table_console().print(rows_table("a calculator, and a policy that misuses it", outcomes, TABLE))
    print(
        json.dumps(
            {
                "gains": [row.gain for row in outcomes],
                "before": [round(row.before, 3) for row in outcomes],
                "after": [round(row.after, 3) for row in outcomes],
                "discrepancies": sum(row.discrepancies for row in outcomes),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
