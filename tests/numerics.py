"""Fixed-seed training steps to the last bit, for changes that must not alter numerics.

    python -m tests.numerics > before.json                # on the commit before, on this machine
    python -m tests.numerics --against before.json        # on the commit behind; exit code 1 if a bit differs

Prints the loss and the gradient norm of every step at four layouts, and a hash of the weights after the last
step, as one JSON object. Another machine's libraries may round differently: compare on one machine only.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from slipstream.rollout.network import free_port
from tests.integration.test_layouts import CASES, Curve, Job, train
from tests.models import make_checkpoint
from tests.ranks import run_ranks

LAYOUTS = ("one rank", "tensor 2, pipeline 2", "data 2 distributed", "expert 2, tensor 2")


def curve_of(layout: str, models: Path) -> dict[str, object]:
    """Train five steps at one layout; floats in hexadecimal."""
    case = CASES[layout]
    job = Job(port=free_port("127.0.0.1"), config=case.config(models))
    by_rank: list[Curve] = [curves[layout] for curves in run_ranks(case.ranks, train, {layout: job})]
    [reported] = [curve for curve in by_rank if curve.loss]
    weights = hashlib.sha256()
    for curve in by_rank:
        for name in sorted(curve.weights):
            weights.update(name.encode() + curve.weights[name].tobytes())
    return {
        "loss": [loss.hex() for loss in reported.loss],
        "grad_norm": [norm.hex() for norm in reported.grad_norm],
        "weights": weights.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics")
    parser.add_argument("--against", type=Path, help="what an earlier call has printed")
    against = parser.parse_args().against
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        make_checkpoint(models / "dense", "qwen3", tied=True)
        make_checkpoint(models / "mixture", "qwen3_moe", tied=False)
        curves = {layout: curve_of(layout, models) for layout in LAYOUTS}
    print(json.dumps(curves, indent=2))
    if against is not None:
        before = json.loads(against.read_text())
        differing = [layout for layout in LAYOUTS if curves[layout] != before[layout]]
        print(f"differing layouts: {', '.join(differing) or 'none'}", file=sys.stderr)
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
