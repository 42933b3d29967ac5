"""How far trainer and engine are apart with the same weights, with and without the engine's experts.

    python -m benchmarks.routing_replay          # ten minutes, 3 GB

An SGLang engine samples in bfloat16 from small mixtures of experts with random weights; the trainer computes
the log-probs of the same tokens in bfloat16, with the experts of its own router and with those of the engine.
Distances are of log-probs, over all sampled tokens; ``mismatch_ratio`` is that of the mean squares, as in
`mismatch/logprob_square_mean`, and the worst of all models. Bytes are those of the record, of a token.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import parser
from benchmarks.train_step import lone_rank
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import leave
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.server_process import ROUTES_SERVER_ARGS
from slipstream.rollout.tokens.record import encode_trajectory
from slipstream.rollout.tokens.trajectory import Trajectory, TrajectoryBuilder
from tests.integration.test_megatron_parity import config_for
from tests.models import make_checkpoint
from tests.runs.engines.conftest import VOCAB, Server, serve

if TYPE_CHECKING:
    from slipstream.backend.trainer.rank import TrainerRank

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 4, "mlp_only_layers": []},
}
LAYERS = 4
PROMPTS, PROMPT_TOKENS, TOKENS = 24, 16, 32
EXPERTS_SCALE = 8.0
"""Factor of the experts' random weights, whose part in the output would otherwise be lost in rounding."""


@dataclass(frozen=True)
class Distance:
    """Between log-probs of trainer and engine."""

    square: float
    absolute: float
    largest: float


@dataclass(frozen=True)
class Measured:
    family: str
    seed: int
    off: Distance
    rollout: Distance
    changed: float
    """Share of (token, layer) whose experts the trainer's own router chooses otherwise."""
    bytes_off: float
    bytes_rollout: float
    sampling_off_s: float
    sampling_rollout_s: float
    pass_off_s: float
    pass_rollout_s: float


def write_model(folder: Path, family: str, seed: int) -> None:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, **FAMILIES[family]}
    make_checkpoint(folder, family, tied=False, seed=seed, **sizes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor * EXPERTS_SCALE
    save_file(tensors, file, {"format": "pt"})
    build_tokenizer().save_pretrained(folder)


async def sampled(server: Server, prompts: Sequence[Sequence[int]], *, routes: bool) -> list[Trajectory]:
    """Sample a completion of each prompt, all at one time."""
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True)
    async with EngineClient(server.address) as client:

        async def one(prompt: Sequence[int]) -> Trajectory:
            growing = GrowingCompletion()
            growing.routes_from = 0 if routes else None
            await client.generate(prompt, sampling, growing, version=0)
            builder = TrajectoryBuilder(prompt)
            builder.add_completion(growing.completion())
            return replace(builder.build(), reward=0.0)

        return list(await asyncio.gather(*map(one, prompts)))


def log_probs(trainer: "TrainerRank", trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return the trainer's and the engine's log-probs of the sampled tokens."""
    batch = TrainBatch(0, tuple(trajectories), np.arange(len(trajectories)))
    [microbatches], _ = trainer.microbatches(batch)
    values = trainer._policy.log_probs(microbatches, 1.0)
    ours = [value.numpy() for value in values if value is not None]
    return np.concatenate(ours), np.concatenate([micro.behaviour_logp_M for micro in microbatches])


def distance(ours: np.ndarray, engines: np.ndarray) -> Distance:
    gap = np.abs(ours - engines)
    return Distance(float((gap**2).mean()), float(gap.mean()), float(gap.max()))


def changed_routes(trainer: "TrainerRank", trajectories: Sequence[Trajectory]) -> float:
    """Return the share of (token, layer) for which the trainer's router chooses other experts."""
    plain = [replace(trajectory, routes_TW=None) for trajectory in trajectories]
    batch = TrainBatch(0, tuple(plain), np.arange(len(plain)))
    [microbatches], _ = trainer.microbatches(batch)
    policy = trainer._policy
    changed, total = 0, 0
    with policy.routes_kept():
        policy.log_probs(microbatches, 1.0)
        for micro in microbatches:
            _, by_part = policy._routes[id(micro)]
            own_LTk = np.sort([chosen.numpy() for [*layers] in by_part.values() for chosen in layers])
            start = 0
            for place in micro.pack:
                ids_TW = trajectories[place].routes_TW
                assert ids_TW is not None
                length = len(ids_TW) - 1
                theirs = np.sort(ids_TW[:-1].reshape(length, LAYERS, -1).transpose(1, 0, 2))
                changed += int((own_LTk[:, start : start + length] != theirs).any(-1).sum())
                total += length * LAYERS
                start += len(ids_TW)
    return changed / total


def measure(family: str, seed: int, folder: Path) -> Measured:
    model = folder / f"{family}-{seed}"
    write_model(model, family, seed)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    args = {"dtype": "bfloat16", **ROUTES_SERVER_ARGS}
    sample_s: dict[bool, list[float]] = {False: [], True: []}
    with serve(model, folder / "engine.log", args=args) as server:
        for turn in range(4):
            began_s = time.perf_counter()
            trajectories = asyncio.run(sampled(server, prompts, routes=turn % 2 == 1))
            sample_s[turn % 2 == 1].append(time.perf_counter() - began_s)
    config = config_for(model, {}, dtype="bfloat16", routing_replay="rollout", microbatch_tokens=1024)
    trainer = lone_rank(config)
    try:
        plain = [replace(trajectory, routes_TW=None) for trajectory in trajectories]
        found: dict[bool, Distance] = {}
        pass_s: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(4):
            began_s = time.perf_counter()
            result = log_probs(trainer, trajectories if turn % 2 else plain)
            pass_s[turn % 2 == 1].append(time.perf_counter() - began_s)
            found[turn % 2 == 1] = distance(*result)
        tokens = sum(len(trajectory.tokens_T) for trajectory in trajectories)
        return Measured(
            family,
            seed,
            found[False],
            found[True],
            changed_routes(trainer, trajectories),
            sum(len(encode_trajectory(each)) for each in plain) / tokens,
            sum(len(encode_trajectory(each)) for each in trajectories) / tokens,
            min(sample_s[False]),
            min(sample_s[True]),
            min(pass_s[False]),
            min(pass_s[True]),
        )
    finally:
        leave()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--families", default=",".join(FAMILIES))
    arguments.add_argument("--seeds", type=int, default=3)
    given = arguments.parse_args()
    torch.set_num_threads(2)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in given.families.split(","):
            for seed in range(given.seeds):
                results.append(measure(family, seed, Path(folder)))
                print(json.dumps(asdict(results[-1])), flush=True)
    squares = [each.rollout.square / each.off.square for each in results]
    absolutes = [each.rollout.absolute / each.off.absolute for each in results]
    print(
        json.dumps({"mismatch_ratio": max(squares), "squares": squares, "absolutes": absolutes}),
    )


if __name__ == "__main__":
    main()
