"""What a gateway costs to start, and to start again after it was killed.

python -m tests.gateway_restart
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from slipstream.rollout.gateway.peers import read_address
from tests.chat_model import write_chat_model
from tests.environment import environment
from tests.unit.test_gateway_process import ROOT, Gateways

MODULE = "slipstream.rollout.gateway.gateway_process"


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path) -> None:
    gateways = Gateways(folder)
    recipe = gateways.run / "recipe.yaml"
    settings = yaml.safe_load(recipe.read_text())
    settings["model"]["path"] = str(write_chat_model(folder / "model", weights=False))
    recipe.write_text(yaml.safe_dump(settings))
    began_s = time.monotonic()
    gateways.processes[0] = subprocess.Popen(
        [sys.executable, "-m", MODULE, gateways.argument(0)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    gateways.reached()
    parent = gateways.processes[0].pid
    print(f"start: {time.monotonic() - began_s:.1f} s, {cpu_s(parent):.1f} s of a core")
    for _ in range(3):
        address = read_address(gateways.run, 0)
        assert address is not None
        began_s = time.monotonic()
        os.kill(address.pid, signal.SIGKILL)
        gateways.reached()
        address = read_address(gateways.run, 0)
        assert address is not None
        print(f"killed: {time.monotonic() - began_s:.2f} s, {cpu_s(address.pid):.2f} s of a core")
    gateways.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder))
