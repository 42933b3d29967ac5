"""Megatron's logits against those of transformers: each family in each layout whose forward gloo can run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import FAMILIES
from slipstream.configs.schema import ActorConfig
from tests.bridge_cases import MIXTURES
from tests.models import ROPES, make_checkpoint, reference_model
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

DENSE = {
    "one rank": {},
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "virtual pipeline 2": {"pipeline": 2, "virtual_pipeline": 2},
    "uneven pipeline": {"pipeline": 2, "layers": [1, 3]},
    "tensor 2, pipeline 2": {"tensor": 2, "pipeline": 2, "sequence": True},
}
MIXED = {
    "expert 2": {"data": 2, "expert": 2},
    "expert 2, tensor 2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
    "expert 2, pipeline 2": {"pipeline": 2, "data": 2, "expert": 2},
    "tensor 2, whole experts": {"tensor": 2, "sequence": True, "expert_tensor": 1},
}
WHOLE_EXPERTS = ("gpt_oss",)
"""Families whose experts ranks cannot share; no others are run with ``tensor 2, whole experts``."""
KEPT = ("one rank",)
"""``test_megatron_parity`` has log-probs and gradients in the others."""
LENGTHS = (5, 1, 17, 9)


def tokens() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 101, length) for length in LENGTHS]


def logits_of(rank: RankSpec, folders: list[Path], parallel: dict) -> list[np.ndarray | None]:
    """For each checkpoint, the logits [sum of LENGTHS, vocabulary] on a rank of the last stage."""
    from slipstream.backend.megatron.parallel import initialize

    actor = ActorConfig.model_validate({"parallel": parallel})
    device = initialize(rank, actor.parallel, seed=0, timeout_s=60)
    from slipstream.backend.megatron import model
    from slipstream.bridge.families import model_spec

    found = []
    for folder in folders:
        spec = model_spec(folder)
        parts = model.build_model(spec, actor, torch.float32, device)
        for part in parts:
            part.eval()
        found.append(forward(parts, actor, spec.geometry.vocab, device))
    return found


@torch.no_grad()
def forward(
    parts: list[torch.nn.Module], actor: ActorConfig, vocab: int, device: torch.device
) -> np.ndarray | None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from slipstream.backend.megatron.device_batch import pack

    ids = torch.from_numpy(np.concatenate(tokens())).to(device)
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    packed = pack(np.array([0, *np.cumsum(LENGTHS)]), device)

    def step(_, part):
        output = part(ids[None], positions[None], None, packed_seq_params=packed)
        return output, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits)

    microbatches = actor.parallel.pipeline
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(()) for _ in parts],
        model=parts,
        num_microbatches=microbatches,
        seq_length=len(ids),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    assert len(results) == microbatches
    return results[-1][0, :, :vocab].cpu().numpy()


@torch.no_grad()
def reference_logits(folder: Path) -> np.ndarray:
    model = reference_model(folder)
    return np.concatenate([model(torch.from_numpy(ids)[None]).logits[0].numpy() for ids in tokens()])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, np.ndarray]]:
    """Every family, tied and untied, and every variant of rotary embeddings."""
    folder = tmp_path_factory.mktemp("models")
    made = {family: make_checkpoint(folder / family, family, tied=False) for family in FAMILIES}
    made["qwen3, tied"] = make_checkpoint(folder / "tied", "qwen3", tied=True)
    made["deepseek_v3, no query rank"] = make_checkpoint(
        folder / "no-rank", "deepseek_v3", tied=False, q_lora_rank=None, n_shared_experts=2
    )
    made |= {
        f"{family}, {rope}": make_checkpoint(folder / family / rope, family, tied=False, rope=rope)
        for family, rope in (
            ("llama", "llama3"),
            ("llama", "linear"),
            ("qwen3", "yarn"),
            ("glm4_moe", "yarn"),
            ("deepseek_v3", "yarn"),
            ("deepseek_v3", "yarn, DeepSeek"),
            ("deepseek_v32", "yarn, DeepSeek"),
        )
    }
    return {name: (path, reference_logits(path)) for name, path in made.items()}


def families_of(checkpoints, layout: str) -> list[str]:
    """Return the names of the checkpoints that the layout can run."""
    parallel = (DENSE | MIXED)[layout]
    if layout == "tensor 2, whole experts":
        return [name for name in checkpoints if name.split(",")[0] in WHOLE_EXPERTS]
    shared = parallel.get("tensor", 1) > 1 and parallel.get("expert_tensor") != 1
    return [
        name
        for name in checkpoints
        if not (shared and name.split(",")[0] in WHOLE_EXPERTS)
        if (mixture := name.split(",")[0] in MIXTURES) or layout in DENSE
        # Megatron wants sequence parallelism with tensor-parallel experts.
        if not (mixture and parallel.get("tensor", 1) > 1 and not parallel.get("sequence"))
    ]


@pytest.fixture(scope="module")
def logits_by_layout(checkpoints, request) -> dict[str, list[list[np.ndarray | None]]]:
    """By layout and rank: the logits of each checkpoint."""
    jobs = {}
    for layout in chosen(request, "layout"):
        parallel = (DENSE | MIXED)[layout]
        ranks = ActorConfig.model_validate({"parallel": parallel}).parallel.world_size
        folders = [checkpoints[name][0] for name in families_of(checkpoints, layout)]
        jobs[layout] = Job(ranks, logits_of, (folders, parallel))
    four = {layout: job for layout, job in jobs.items() if job.ranks == 4}
    results = run_jobs({layout: job for layout, job in jobs.items() if layout not in four})
    return results | run_jobs(four) if four else results


@pytest.mark.parametrize("layout", shortened([*DENSE, *MIXED], KEPT))
def test_logits_equal_those_of_transformers(checkpoints, logits_by_layout, layout):
    results = logits_by_layout[layout]
    for number, name in enumerate(families_of(checkpoints, layout)):
        found = [result[number] for result in results if result[number] is not None]
        assert found
        for logits in found:
            assert np.abs(logits - checkpoints[name][1]).max() < 1e-4, name


def test_every_variant_of_rotary_embeddings_is_among_them():
    assert set(ROPES) == {"linear", "llama3", "yarn", "yarn, DeepSeek"}
