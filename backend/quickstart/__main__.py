"""`python -m slipstream.backend.quickstart --model-path DIR --data-path FILE --eval-path FILE [--seed N]`."""

import argparse
from functools import partial
from pathlib import Path

from slipstream.backend.quickstart import prepare


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.backend.quickstart",
        description="Make the quickstart's policy, train prompts and held-out prompts; what exists is kept.",
    )
    parser.add_argument("--model-path", type=Path, required=True, help="HF checkpoint directory to write")
    parser.add_argument("--data-path", type=Path, required=True, help="train prompts (JSON lines)")
    parser.add_argument("--eval-path", type=Path, required=True, help="held-out prompts (JSON lines)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, demonstrations and prompts")
    options = parser.parse_args()
    prepare(
        options.model_path,
        options.data_path,
        options.eval_path,
        seed=options.seed,
        say=partial(print, flush=True),
    )


if __name__ == "__main__":
    main()
