"""Overlapped communication changes only when ranks meet; recomputed activations change nothing at all."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB, STEPS, MINIBATCHES = 101, 2, 2
BUCKET_SIZE = 20_000
"""Elements: the small models have several buckets."""
LORA = {"rank": 3, "alpha": 12.0}


@dataclass(frozen=True)
class Case:
    model: str = "tied"
    parallel: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    distributed: bool = False

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(self.parallel).world_size

    def config(self, models: dict[str, Path], optimizer: dict[str, bool], recompute: str) -> RunConfig:
        settings = {"lr": 1e-2, "clip_grad": 0.0, "distributed": self.distributed, **optimizer}
        return config_for(
            models[self.model],
            self.parallel,
            dtype=self.dtype,
            minibatches=MINIBATCHES,
            recompute=recompute,
            **self.actor,
            optimizer=settings,
        )


DATA = {"data": 2}
OVERLAP = {
    "tied": Case(parallel=DATA),
    "untied": Case("untied", DATA),
    "bfloat16": Case("untied", DATA, dtype="bfloat16"),
    "distributed": Case("untied", DATA, distributed=True),
    "distributed, tied, bfloat16": Case(parallel=DATA, dtype="bfloat16", distributed=True),
    "experts": Case("experts", {"data": 2, "expert": 2}, distributed=True),
    "adapters": Case("untied", DATA, actor={"lora": LORA}, distributed=True),
    "pipeline": Case("tied", {"pipeline": 2}, distributed=True),
    "virtual pipeline": Case("tied", {"pipeline": 2, "virtual_pipeline": 2}, distributed=True),
    "tensor": Case("untied", {"tensor": 2, "sequence": True}),
}
RECOMPUTE = {
    "one rank": Case("untied"),
    "bfloat16": Case("untied", dtype="bfloat16"),
    "experts": Case("experts"),
    "latent": Case("latent"),
    "adapters": Case("untied", actor={"lora": LORA}),
    "tensor": Case("untied", {"tensor": 2, "sequence": True}),
    "pipeline": Case("tied", {"pipeline": 2}),
    "virtual pipeline": Case("tied", {"pipeline": 2, "virtual_pipeline": 2}),
    "expert": Case("experts", {"data": 2, "expert": 2}),
}
KINDS = ("none", "selective", "full")
KEPT_OVERLAP = ("tied", "distributed, tied, bfloat16", "experts", "virtual pipeline", "tensor")
KEPT_RECOMPUTE = ("one rank", "experts", "virtual pipeline")


@contextmanager
def small_buckets():
    from slipstream.backend.megatron import model

    made = partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    with patch.object(model, "DistributedDataParallelConfig", made):
        yield


def weights(trainer: Any) -> dict[str, np.ndarray]:
    return {
        f"{chunk}.{name}": tensor.detach().float().numpy().copy()
        for chunk, part in enumerate(trainer._policy.parts)
        for name, tensor in part.module.named_parameters()
    }


def groups(trainer: Any) -> list[Any]:
    return [
        g for part in trainer._policy.parts for g in part.bucket_groups + part.expert_parallel_bucket_groups
    ]


def train_overlapped(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    """Return the weights after some steps, and which communication was under way in the backward pass."""
    with small_buckets(), trainer_of(rank, config) as trainer:
        under_way, late = [], []
        finalize = trainer._policy.parts[0].config.finalize_model_grads_func
        step = trainer._trained.optimizer.step

        def noting(*args, **options):
            under_way.append([group.grad_reduce_handle is not None for group in groups(trainer)])
            return finalize(*args, **options)

        def stepping():
            done = step()
            late.append([not group.param_gather_dispatched for group in groups(trainer)])
            return done

        trainer._policy.parts[0].config.finalize_model_grads_func = noting
        trainer._trained.optimizer.step = stepping
        metrics = {}
        for n in range(STEPS):
            metrics = trainer.train(make_batch(VOCAB, n=4, seed=n, version=trainer.step)) or {}
        return {"weights": weights(trainer), "metrics": metrics, "under way": under_way, "late": late}


def train_recomputing(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    """Return the last gradients, the weights, and how often attention and layers were computed."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from slipstream.backend.megatron.local_layers import PackedAttention

    calls: Counter[str] = Counter()

    def counted(kind: type) -> Any:
        forward = kind.forward

        def counting(self, *args, **options):
            calls[kind.__name__] += self.training
            return forward(self, *args, **options)

        return patch.object(kind, "forward", counting)

    with trainer_of(rank, config) as trainer:
        with counted(PackedAttention), counted(TransformerLayer):
            trainer.train(make_batch(VOCAB))
        gradients = {
            name: parameter.main_grad.clone().numpy()
            for part in trainer._policy.parts
            for name, parameter in part.module.named_parameters()
            if parameter.requires_grad
        }
        return {"weights": weights(trainer), "gradients": gradients, "calls": calls}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_checkpoint(folder / "tied"),
        "untied": make_checkpoint(folder / "untied", tied=False, num_hidden_layers=2),
        "experts": make_checkpoint(
            folder / "experts", "qwen3_moe", tied=False, num_hidden_layers=2, mlp_only_layers=[0]
        ),
        "latent": make_checkpoint(folder / "latent", "deepseek_v3", tied=False, num_hidden_layers=2),
    }


def on_ranks(function: Any, configs: dict[Any, RunConfig]) -> dict[Any, list[dict[str, Any]]]:
    """Return the results of ``function`` by case and rank."""
    return run_jobs(
        {key: Job(config.actor.parallel.world_size, function, (config,)) for key, config in configs.items()}
    )


@pytest.fixture(scope="module")
def overlapped(models, request) -> dict[Any, list[dict[str, Any]]]:
    """By case and whether it overlaps."""
    configs = {}
    for name in chosen(request, "name"):
        case = OVERLAP[name]
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": case.distributed}
        configs |= {(name, True): case.config(models, overlap, "none")}
        configs |= {(name, False): case.config(models, {}, "none")}
    return on_ranks(train_overlapped, configs)


@pytest.fixture(scope="module")
def recomputed(models, request) -> dict[Any, list[dict[str, Any]]]:
    configs = {
        (name, kind): RECOMPUTE[name].config(models, {}, kind)
        for name in chosen(request, "remade")
        for kind in KINDS
    }
    return on_ranks(train_recomputing, configs)


@pytest.mark.parametrize("name", shortened(OVERLAP, KEPT_OVERLAP))
def test_overlapped_communication_trains_the_same_weights_bit_for_bit(name: str, overlapped):
    for one, other in zip(overlapped[name, True], overlapped[name, False], strict=True):
        # The distributed optimizer adds up the gradient's norm by bucket.
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5, nan_ok=True)
        assert one["weights"].keys() == other["weights"].keys()
        for parameter, value in other["weights"].items():
            np.testing.assert_array_equal(one["weights"][parameter], value, err_msg=parameter)


@pytest.mark.parametrize("name", shortened(OVERLAP, KEPT_OVERLAP))
def test_gradients_of_all_buckets_are_under_way_before_the_backward_pass_is_over(name: str, overlapped):
    for rank in overlapped[name, True]:
        first, *later = rank["under way"]
        assert not any(first)  # Megatron learns from it which gradients there are
        assert len(later) == STEPS * MINIBATCHES - 1
        assert all(map(all, later))
        if name not in ("adapters", "pipeline", "virtual pipeline"):  # whose buffers are small, or not split
            assert len(first) > 1
    for rank in overlapped[name, False]:
        assert not any(map(any, rank["under way"]))


@pytest.mark.parametrize(
    "name", shortened([name for name, case in OVERLAP.items() if case.distributed], KEPT_OVERLAP)
)
def test_weights_of_an_update_are_gathered_by_the_next_forward_pass(name: str, overlapped):
    for rank in overlapped[name, True]:
        assert all(map(all, rank["late"]))
    for rank in overlapped[name, False]:
        assert not any(map(any, rank["late"]))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("remade", shortened(RECOMPUTE, KEPT_RECOMPUTE))
def test_recomputed_activations_give_the_same_gradients_and_weights(remade: str, kind: str, recomputed):
    for one, other in zip(recomputed[remade, kind], recomputed[remade, "none"], strict=True):
        # Adam makes as much of a tiny gradient as of a large one.
        for what in ("gradients",) if remade == "adapters" else ("gradients", "weights"):
            assert one[what].keys() == other[what].keys()
            for parameter, value in other[what].items():
                # With frozen weights the two differ by roundings.
                tolerance = 1e-5 * np.abs(value).max() if remade == "adapters" else 0
                np.testing.assert_allclose(one[what][parameter], value, 0, tolerance, err_msg=parameter)


@pytest.mark.parametrize("remade", shortened(RECOMPUTE, KEPT_RECOMPUTE))
def test_what_is_recomputed_is_computed_twice(remade: str, recomputed):
    for kept, selective, full in zip(*(recomputed[remade, kind] for kind in KINDS), strict=True):
        layers, attentions = (kept["calls"][kind] for kind in ("TransformerLayer", "PackedAttention"))
        assert layers == attentions > 0
        assert selective["calls"] == {"TransformerLayer": layers, "PackedAttention": 2 * attentions}
        assert full["calls"] == {"TransformerLayer": 2 * layers, "PackedAttention": 2 * attentions}
