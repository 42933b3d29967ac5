"""CPU time of a token in trajectories of 2,000 to 128,000 tokens: record, driver, ledger, packing.

    python -m benchmarks.long_trajectories        # two minutes, 2 GB

A turn of an agent is 512 tokens of output and an answer of 512, so that a trajectory of 128k has 128 turns.
All lengths have the same number of tokens in all, and take turns within one process. Engines answer at once.

*record*: what a collector writes while each request repeats all tokens so far, and a rank reads; with the
experts of every token. *driver*: its event loop, from the frames of collectors to the batch for the ranks.
*ledger*: its thread. *packing*: the plan of a step, its micro-batches and their unpacking; *packing shared*:
the same where the two samples of a prompt begin with the same half, and with experts.

``growth``: the largest ratio of the cost at the longest length to that at the shortest, required to be at
most 1.1. The shortest bears what a trajectory costs by itself; ``steps`` have the most that any length costs
over a shorter one.
"""

import asyncio
import gc
import json
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import uvloop

from benchmarks.collection import Load, Run
from benchmarks.harness import parser
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.driver.loops.training import encoded
from slipstream.backend.megatron.device_batch import unpacking_of
from slipstream.backend.monitor.tables import rows_table, table_console
from slipstream.backend.trainer.minibatches import microbatches_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import ActorConfig, SamplingConfig
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.collection.messages import TRAIN, UP, Assignment, Status, Up
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.engine.sampling import Sampling
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.system.frames import pack, split
from slipstream.rollout.tokens.trajectory import Finish, Trajectory, TrajectoryBuilder

LENGTHS = (2048, 8192, 32_768, 131_072)
TURN = 512
"""Tokens of an answer, and of the output before it."""
SAMPLES = 2
VOCABULARY = 150_000
CHOICES = 8
"""Experts of a token, over all layers."""
MODEL = Path(__file__).parents[1] / "configs/models/Qwen3-30B-A3B"
"""The model whose FLOPs the packing counts."""
TIMEOUT_S = 120.0
GOAL = 1.1

_rng = np.random.default_rng(0)
_TEXTS = [array("i", _rng.integers(0, VOCABULARY, max(LENGTHS)).tolist()) for _ in range(SAMPLES)]
_LOGPROBS = array("f", (-_rng.random(max(LENGTHS), np.float32)).tolist())
_EXPERTS = _rng.integers(0, 64, (max(LENGTHS), CHOICES)).astype(np.uint8)


class Meter:
    """CPU seconds of the parts."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def counting(self, part: str, others: str | None = None) -> Iterator[None]:
        """Count the CPU time of this thread for ``part``, and that of all other threads for ``others``."""
        own, every = time.thread_time(), time.process_time()
        yield
        own, every = time.thread_time() - own, time.process_time() - every
        self.cpu_s[part] = self.cpu_s.get(part, 0.0) + own
        if others is not None:
            self.cpu_s[others] = self.cpu_s.get(others, 0.0) + every - own


# ---- the collector's side


class Agent:
    """One episode, and its engines: the second sample leaves the first one's text after half of it."""

    def __init__(self, group: int, sample: int, length: int) -> None:
        self._length = length
        self._text = _TEXTS[0][: length // 2] + _TEXTS[sample][length // 2 : length]
        self._text[0] = group

    async def run(self, record: Recording) -> Trajectory:
        """Hold the conversation. Requests are arrays, as those of ``MultiTurn`` are."""
        sampling = SamplingConfig(max_new_tokens=TURN)
        builder, ids = TrajectoryBuilder(()), array("i")
        while len(ids) < self._length:
            output = self._text[len(ids) : len(ids) + TURN]
            builder.add_context(output)
            ids.extend(output)
            completion = await record.generate(ids, sampling)
            builder.add_completion(completion)
            ids.extend(completion.tokens)
        return replace(builder.build(), reward=1.0)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        grown: Callable[[], None] | None = None,
    ) -> None:
        start, first = len(input_ids), completion.routes_wanted
        completion.add(0, self._text[start : start + TURN], _LOGPROBS[start : start + TURN])
        assert first is not None
        completion.add_routes(start, _EXPERTS[first : start + TURN - 1])
        completion.finish = Finish.STOP


class Collector:
    """What a collector does with its assignments, without a connection and engines."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.frames: list[bytes] = []
        self._is_sent = asyncio.Event()

    def assign(self, assignment: Assignment, chunks: Sequence[bytes]) -> None:
        self.assignments.append(assignment)

    def cancel(self, group: int, assignment: int) -> None:
        raise AssertionError("no group is given up")

    async def collect(self, length: int) -> None:
        """Run all episodes."""
        for assignment in self.assignments:
            outbox = Outbox(flush_s=0)
            for sample in range(SAMPLES):
                agent = Agent(assignment.group, sample, length)
                key = assignment.group, assignment.number, sample
                record = Recording(agent, outbox, *key, wants_routes=True)
                trajectory = await agent.run(record)
                record.answered(trajectory)
                record.judged(trajectory)
            outbox.ended(assignment.group, assignment.number, TRAIN)
            outbox.released(SAMPLES)
            self._is_sent.clear()
            sending = asyncio.create_task(outbox.run(self._send, lambda: Status(PoolStatus(), 0, 0.0)))
            await self._is_sent.wait()
            sending.cancel()

    async def _send(self, message: Up, chunks: Sequence[bytes]) -> None:
        self.frames.append(pack(message, chunks))
        if message.released:
            self._is_sent.set()


# ---- the driver's side


async def collected(length: int, total: int, meter: Meter, folder: Path) -> EncodedBatch:
    """Collect trajectories of ``total`` tokens in all, and return their batch."""
    trajectories = total // length
    load = Load(trajectories, collectors=0, samples=SAMPLES, slots=trajectories, batch=trajectories)
    ledger, _ = open_ledger(folder, batch_size=load.groups, n_samples=load.samples, bound=load.bound)
    try:
        run, collector = Run(load, ledger, folder), Collector()
        run.roster.joined("here")
        with meter.counting("driver", "ledger"):
            run.assignments.open()
            run.assignments.joined("here", collector)
            await ledger.flushed()
        with meter.counting("record"):
            await collector.collect(length)
        with meter.counting("driver", "ledger"):
            for frame in collector.frames:
                run.assignments.received("here", *split(frame, UP))
                await asyncio.sleep(0)
            groups = await run.batches.next(TIMEOUT_S)
            await run.batches.step_begins()
            batch = await encoded(groups, run.batches, run.read)
            run.batches.published(run.batches.next_version)
            await ledger.flushed()
        return batch
    finally:
        ledger.close()


# ---- the ranks' side


def packed(batch: TrainBatch, geometry: Geometry, settings: Mapping[str, object]) -> None:
    """Plan and assemble the micro-batches of a step."""
    actor = ActorConfig.model_validate({"microbatch_tokens": 2 * max(LENGTHS), **settings})
    [microbatches], metrics = microbatches_of(actor, geometry, batch, 0, 0, rank=0)
    if ("share_prefixes" in settings) != (metrics.get("packing/saved_tokens", 0) > 0.1):
        raise RuntimeError(f"unexpected figures of packing: {metrics}")
    for micro in microbatches:
        unpacking_of(micro.cu_seqlens, micro.taken_N, micro.taken_R3)


SIDES: Mapping[str, Mapping[str, object]] = {
    "packing": {},
    "packing shared": {"share_prefixes": "auto", "routing_replay": "rollout"},
}


def measured(length: int, total: int, geometry: Geometry) -> dict[str, float]:
    """Return the CPU time of a token in each part, in ns."""
    meter = Meter()
    gc.collect()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        encoded_batch = uvloop.run(collected(length, total, meter, Path(folder)))
    with meter.counting("record"):
        batch = encoded_batch.decoded()
    if {len(each.tokens_T) for each in batch.trajectories} != {length}:
        raise RuntimeError("trajectories of unexpected lengths")
    for name, settings in SIDES.items():
        with meter.counting(name):
            packed(batch, geometry, settings)
    return {name: cpu_s / total * 1e9 for name, cpu_s in meter.cpu_s.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=2**20, help="Tokens of each length, in a round.")
    arguments = options.parse_args()
    geometry = model_spec(MODEL).geometry
    rounds = [
        [measured(length, arguments.tokens, geometry) for length in LENGTHS]
        for _ in range(arguments.rounds + 1)
    ][1:]  # the first one warms up
    parts = list(rounds[0][0])
    cost_ns = {
        part: [median(each[place][part] for each in rounds) for place in range(len(LENGTHS))]
        for part in parts
    }
    columns: dict[str, Callable[[str], object]] = {"CPU of a token, ns": str}
    for place, length in enumerate(LENGTHS):
        columns[f"{length // 1024}k"] = lambda part, place=place: f"{cost_ns[part][place]:.1f}"
    ends = {part: costs[-1] / costs[0] for part, costs in cost_ns.items()}
    steps = {
        part: max(longer / shorter for shorter, longer in combinations(costs, 2))
        for part, costs in cost_ns.items()
    }
    columns["longest / shortest"] = lambda part: f"{ends[part]:.2f}"
    columns["any / a shorter one"] = lambda part: f"{steps[part]:.2f}"
    table_console().print(rows_table("trajectories of these lengths", parts, columns))
    document = {
        "growth": max(ends.values()),
        "asked": {"growth": GOAL},
        "lengths": LENGTHS,
        "ends": ends,
        "steps": steps,
        "ns": cost_ns,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
