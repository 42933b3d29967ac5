"""The memory estimate against the allocations of the real trainer: state exactly, activations within a tenth.

Allocations are counted by the storages that operators return and that are none of their inputs': the most
that exist at one time during a forward and backward pass over one pack. Attention with keys and values of
different width has no flash kernel on a CPU, so here they are equally wide.
"""

import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.memory.trainer_memory import tokens_of, trainer_memory
from slipstream.backend.memory.verdict import checkpoint_bytes
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.layout import Coordinates
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.integration.test_megatron_parity import config_for
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

TOKENS, SEGMENT, VOCAB = 2048, 64, 101
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "vocab_size": VOCAB,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {"v_head_dim": 24},
    "glm4_moe": {},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_next": {"mlp_only_layers": []},
    "minimax_m2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "deepseek_v32": {"v_head_dim": 24},
}
ACTIVATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "bfloat16", {}),
    "norms of queries and keys": ("qwen3", "bfloat16", {}),
    "norms of queries and keys, float32": ("qwen3", "float32", {}),
    "norms over all heads": ("minimax_m2", "bfloat16", {}),
    "norms around blocks": ("gemma3_text", "bfloat16", {}),
    "sinks and biases": ("gpt_oss", "bfloat16", {}),
    "experts": ("qwen3_moe", "bfloat16", {}),
    "latent attention": ("deepseek_v3", "bfloat16", {}),
    "shared experts": ("glm4_moe", "float32", {}),
    "linear attention": ("qwen3_5_text", "bfloat16", {}),
    "linear attention, experts": ("qwen3_next", "float32", {}),
    "full": ("llama", "bfloat16", {"recompute": "full"}),
    "full, experts": ("deepseek_v3", "bfloat16", {"recompute": "full"}),
    "full, two layers of three": (
        "llama",
        "float32",
        {"recompute": "full", "megatron": {"recompute_method": "block", "recompute_num_layers": 2}},
    ),
    "selective": ("qwen3", "float32", {"recompute": "selective"}),
}
STATE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "distributed optimizer": ("qwen3", "bfloat16", {"data": 2}, {"distributed": True}),
    "expert 2, distributed": ("qwen3_moe", "bfloat16", {"data": 2, "expert": 2}, {"distributed": True}),
    "tensor 2, float32": ("deepseek_v3", "float32", {"tensor": 2, "sequence": True}, {}),
    "indexer": ("deepseek_v32", "bfloat16", {"data": 2, "expert": 2}, {"distributed": True}),
    "linear attention, distributed": ("qwen3_5_text", "bfloat16", {"data": 2}, {"distributed": True}),
    "pipeline 2, tied": ("llama", "bfloat16", {"pipeline": 2, "layers": [2, 1]}, {}),
}


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, id(storage))
        return result

    def _freed(self, storage: int) -> None:
        self.live -= self._sizes.pop(storage)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Measured(NamedTuple):
    weights: int
    gradients: int
    optimizer: int
    kept: int = 0
    """Alive when the backward pass begins."""
    peak: int = 0


def bytes_of(tensors) -> int:
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)
    }
    return sum(storages.values())


def state_of(trained: Any) -> Measured:
    """Adam's counters, of one element each, are left out: on a GPU there are none."""
    from slipstream.backend.megatron import finite, optimizer_state

    optimizer_state.allocate(trained.optimizer)
    modules = trained.modules
    weights = [weight for module in modules for weight in module.parameters()]
    shared = {weight.untyped_storage().data_ptr() for weight in weights}
    biases = [b for module in modules for name, b in module.named_buffers() if name.endswith("expert_bias")]
    state = [
        tensor
        for tensor in optimizer_state.held(trained.optimizer)
        if tensor.dim() and tensor.untyped_storage().data_ptr() not in shared
    ]
    gradients = finite.gradient_buffers(trained.parts)
    return Measured(bytes_of([*weights, *biases]), bytes_of(gradients), bytes_of(state))


def estimated(trainer: Any, config: RunConfig, rank: int):
    stage = Coordinates.of(rank, trainer._plan.layout).stage
    tokens = tokens_of(config.actor, config.rollout.sampling.max_new_tokens)
    dtype = config.model.dtype
    return trainer_memory(config.actor, config.critic, dtype, trainer._plan, tokens, "plain", runtime=0)[
        stage
    ]


def pack() -> TrainBatch:
    """One micro-batch of equally long trajectories: attention pads them to nothing."""
    rng = np.random.default_rng(0)
    count = TOKENS // SEGMENT
    sampled = np.arange(SEGMENT) > 0
    trajectories = [
        Trajectory(
            rng.integers(0, VOCAB, SEGMENT),
            sampled,
            np.where(sampled, -3.0, 0).astype(np.float32),
            np.where(sampled, 0, UNSAMPLED).astype(np.int32),
            Finish.STOP,
            reward=float(i % 2),
        )
        for i in range(count)
    ]
    return TrainBatch(0, tuple(trajectories), np.arange(count) // 2)


def state(rank: RankSpec, config: RunConfig):
    with trainer_of(rank, config) as trainer:
        return state_of(trainer._trained), estimated(trainer, config, rank.rank)


def training(rank: RankSpec, config: RunConfig):
    with trainer_of(rank, config) as trainer:
        held = state_of(trainer._trained)
        [[micro]], _ = trainer.microbatches(pack())
        counted, kept = Allocations(), []

        def head(output):
            logp_M, _ = trainer._policy.logprob_and_entropy(micro, output, 1.0)
            kept.append(counted.live)
            return -logp_M.sum(), torch.tensor(logp_M.numel()), None

        with counted:
            trainer._policy.train([micro], [head])
        return held._replace(kept=kept[0], peak=counted.peak), estimated(trainer, config, rank.rank)


KEPT = (
    "expert 2, distributed",
    "tensor 2, float32",
    "pipeline 2, tied",
    "sinks and biases",
    "experts",
    "latent attention",
    "linear attention",
    "full, two layers of three",
    "selective",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("models")

    def checkpoint(family: str) -> Path:
        if not (folder / family).exists():
            make_checkpoint(folder / family, family, tied=family == "llama", **SIZES, **FAMILIES[family])
        return folder / family

    jobs: dict[str, Job] = {}
    for name in chosen(request, "name"):
        if name in STATE:
            family, dtype, parallel, optimizer = STATE[name]
            config = config_for(checkpoint(family), parallel, dtype=dtype, optimizer=optimizer)
            jobs[name] = Job(2, state, (config,))
        else:
            family, dtype, actor = ACTIVATIONS[name]
            actor = {**actor, "microbatch_tokens": TOKENS}
            jobs[name] = Job(1, training, (config_for(checkpoint(family), {}, dtype=dtype, **actor),))
    return run_jobs(jobs)


@pytest.mark.parametrize("name", shortened([*STATE, *ACTIVATIONS], KEPT))
def test_weights_gradients_and_optimizer_are_exact_on_every_rank(measured, name):
    for held, estimate in measured[name]:
        assert (estimate.weights, estimate.gradients) == held[:2]
        stage = [other for other, same in measured[name] if same.stage == estimate.stage]
        assert estimate.optimizer == max(other.optimizer for other in stage)


@pytest.mark.parametrize("name", shortened(ACTIVATIONS, KEPT))
def test_activations_are_within_a_tenth(measured, name):
    [(held, estimate)] = measured[name]
    assert estimate.activations == pytest.approx(held.kept, rel=0.1)
    assert estimate.activations + estimate.work == pytest.approx(held.peak, rel=0.1)


SAVED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16, expert 2": ("qwen3_moe", "bfloat16", {"data": 2, "expert": 2}, {}),
    "float32, tied": ("llama", "float32", {"tensor": 2}, {}),
    "adapters": ("qwen3", "bfloat16", {"data": 2}, {"lora": {"rank": 8, "alpha": 8.0}}),
    "critic and average": (
        "qwen3",
        "bfloat16",
        {"data": 2},
        {
            "advantage": [{"type": "reward", "estimator": "gae"}],
            "kl": {"reference": {"type": "average"}},
        },
    ),
}


def saved(rank: RankSpec, config: RunConfig, folder: Path) -> None:
    from slipstream.backend.megatron import optimizer_state

    with trainer_of(rank, config) as trainer:
        for trained in trainer._checkpoints._trained.values():
            optimizer_state.allocate(trained.optimizer)
        trainer.begin_checkpoint(folder)
        trainer.finish_checkpoint()


@pytest.fixture(scope="module")
def checkpoint_sizes(tmp_path_factory) -> dict[str, tuple[int, int]]:
    """By case: the bytes that were written, and those that the plan states."""
    jobs: dict[str, Job] = {}
    folders: dict[str, Path] = {}
    stated: dict[str, int] = {}
    for case, (family, dtype, parallel, actor) in SAVED.items():
        folder = tmp_path_factory.mktemp("saved")
        sizes: dict[str, Any] = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 128}
        model = make_checkpoint(folder / "model", family, tied=family == "llama", **sizes)
        distributed = {"distributed": dtype == "bfloat16"}
        config = config_for(model, parallel, dtype=dtype, optimizer=distributed, **actor)
        if "advantage" in actor:
            config = RunConfig.model_validate(config.model_dump() | {"critic": {"optimizer": distributed}})
        folders[case] = folder / "checkpoint"
        folders[case].mkdir()
        jobs[case] = Job(2, saved, (config, folders[case]))
        stated[case] = checkpoint_bytes(config.actor, config.critic, dtype, model_spec(model))
    run_jobs(jobs)
    written = {
        case: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for case, folder in folders.items()
    }
    return {case: (written[case], stated[case]) for case in SAVED}


@pytest.mark.parametrize("case", SAVED)
def test_a_checkpoint_has_the_bytes_that_the_plan_states(case, checkpoint_sizes):
    """Descriptions of tensors and random states are not counted: a hundredth of so small a model."""
    written, stated = checkpoint_sizes[case]
    assert written == pytest.approx(stated, rel=0.02)
