"""The quickstart recipe as a Slurm job on fake nodes."""

import subprocess
import sys
from pathlib import Path

from slipstream.backend.quickstart import prepare
from tests.cluster.slurm_cluster import SlurmCluster


def submit_quickstart(cluster: SlurmCluster, folder: Path, *arguments: str, nodes: int) -> int:
    """Submit the job, with its inputs and its runs in ``folder``. Returns its number.

    ``arguments``: those of `slipstream train` after the recipe.
    """
    inputs = folder / "inputs"
    inputs.mkdir(exist_ok=True)
    model, data, held_out = inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl"
    prepare(model, data, held_out, say=lambda _: None, warm_start_steps=5)
    script = subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cli", "slurm-script"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return cluster.submit(
        script,
        "quickstart",
        f"run.root={folder / 'runs'}",
        f"model.path={model}",
        f"data.path={data}",
        f"eval.path={held_out}",
        "rollout.batch_size=4",
        *arguments,
        cwd=inputs,  # no clone is there
        env={
            "SLIPSTREAM_VENV": sys.prefix,
            "SLIPSTREAM_LOG_DIR": str(folder / "node-logs"),
            "SLIPSTREAM_CPUS_PER_NODE": "2",
            "SLIPSTREAM_OBJECT_STORE": "100000000",
        },
        nodes=nodes,
        gpus_per_node=0,
        output=folder / "out.log",
    )
