"""The ranks of an SGLang engine without its server, on a CPU: processes that have met as a server's do.

Models are built and loaded in them, not run. SGLang is imported once; the ranks are forked from that process.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.rollout.engine import cpu
from slipstream.rollout.engine.server_process import ServerSpec, let_import_sglang, server_args
from slipstream.rollout.system.network import hold_port, port_of

LOOPBACK = "127.0.0.1"
DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"

Work = Callable[[int, dict[Path, Any]], None]
"""Gets the number of the rank, and SGLang's ServerArgs for each folder."""


def run_ranks(folders: Sequence[Path], work: Work, *, tensor: int = 1, expert: int = 1) -> None:
    """Do ``work`` on each of ``tensor`` ranks. Exits with 1 if one has failed.

    ``folders``: checkpoints, of which ``config.json`` is enough, in bfloat16. ``expert``: expert-parallel
    ranks among the tensor-parallel ones.
    """
    let_import_sglang()
    os.environ.update(cpu.environment(tensor))
    disabled = [set(cpu.without_other_models(folder)[DISABLED].split(",")) for folder in folders]
    os.environ[DISABLED] = ",".join(set.intersection(*disabled))
    import_module("sglang.srt.model_loader.loader")
    from sglang.srt.server_args import ServerArgs

    with hold_port(LOOPBACK) as held:
        port = port_of(held)

        def arguments(folder: Path) -> Any:
            args = {"skip_tokenizer_init": True}
            spec = ServerSpec(
                folder, "bfloat16", "cpu", tensor, LOOPBACK, port, 0, 0, expert_parallel=expert, args=args
            )
            return ServerArgs(**server_args(spec))

        by_folder = {folder: arguments(folder) for folder in folders}
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_on_rank, args=(rank, port, by_folder, work)) for rank in range(tensor)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit("a rank has failed")


def _on_rank(rank: int, port: int, arguments: dict[Path, Any], work: Work) -> None:
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish

    first = next(iter(arguments.values()))
    publish(first, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    bootstrap.init_parallel_runtime(server_args=first, device="cpu", dist_port=port)
    work(rank, arguments)
