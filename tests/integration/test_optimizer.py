"""Megatron's Adam as Slipstream sets it up, against a float64 formula: decay and precision."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs

VOCAB, STEPS = 101, 4
ADAM = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.5, "clip_grad": 0.0}
RUN_STEPS = 5


@dataclass(frozen=True)
class Case:
    model: str = "dense"
    dtype: str = "float32"
    parallel: dict[str, int] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(self.parallel).world_size

    def config(self, models: dict[str, Path]) -> RunConfig:
        optimizer = ADAM | {"decay": {"type": "linear"}, "warmup_steps": 2} | self.optimizer
        config = config_for(
            models[self.model], self.parallel, dtype=self.dtype, **self.actor, optimizer=optimizer
        )
        return config.model_copy(update={"run": config.run.model_copy(update={"steps": RUN_STEPS})})


LORA = {"lora": {"rank": 3, "alpha": 12.0}}
DISTRIBUTED = {"distributed": True}
CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype="bfloat16"),
    "adapters": Case(actor=LORA),
    "biases": Case("biases"),
    "norms of queries and keys decayed": Case(actor={"megatron": {"apply_wd_to_qk_layernorm": True}}),
    "experts": Case("experts", parallel={"data": 2, "expert": 2}),
    "experts, distributed": Case("experts", parallel={"data": 2, "expert": 2}, optimizer=DISTRIBUTED),
    "distributed": Case(parallel={"data": 2}, optimizer=DISTRIBUTED),
    "distributed, bfloat16": Case(dtype="bfloat16", parallel={"data": 2}, optimizer=DISTRIBUTED),
    "distributed, adapters": Case(parallel={"data": 2}, optimizer=DISTRIBUTED, actor=LORA),
}


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().flatten()


def mains(trainer: Any) -> dict[str, tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """By name: a parameter of the model, what Adam updates for it here, and where in it that begins."""
    from slipstream.backend.megatron.optimizer_state import _parts, _shards

    names = {id(p): name for part in trainer._policy.parts for name, p in part.module.named_parameters()}
    return {
        names[id(parameter)]: (parameter, shard, start)
        for part in _parts(trainer._trained.optimizer)
        for parameter, shard, start in _shards(part)
    }


def updates(rank: RankSpec, work: list[tuple[int, RunConfig]]) -> list[dict[str, Any]]:
    """Per case: of every parameter that this rank updates, its main values and gradients, step by step."""
    found = []
    for port, config in work:
        with trainer_of(replace(rank, port=port), config) as trainer:
            own = mains(trainer)
            history = {name: [numbers(shard)] for name, (_, shard, _) in own.items()}
            gradients: dict[str, list[np.ndarray]] = {name: [] for name in own}
            step = trainer._trained.optimizer.step

            def noting(own=own, gradients=gradients, step=step):
                for name, (parameter, shard, start) in own.items():
                    grad = parameter.main_grad.flatten()[start : start + shard.numel()]
                    gradients[name].append(numbers(grad))
                return step()

            trainer._trained.optimizer.step = noting
            for n in range(STEPS):
                trainer.train(make_batch(VOCAB, seed=n, version=trainer.step))
                for name, (_, shard, _) in own.items():
                    history[name].append(numbers(shard))
            found.append(
                {
                    "dimensions": {name: parameter.ndim for name, (parameter, _, _) in own.items()},
                    "main": {shard.dtype for _, shard, _ in own.values()},
                    "gradient": {parameter.main_grad.dtype for parameter, _, _ in own.values()},
                    "model": {parameter.dtype for parameter, _, _ in own.values()},
                    "weights": {
                        name: numbers(parameter.flatten()[start : start + shard.numel()])
                        for name, (parameter, shard, start) in own.items()
                    },
                    "history": history,
                    "gradients": gradients,
                }
            )
    return found


def adamw(start: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float):
    """arXiv:1711.05101, algorithm 2, in float64; the weights after every update."""
    weight, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    beta1, beta2, eps = ADAM["beta1"], ADAM["beta2"], ADAM["eps"]
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        weight = weight * (1 - lr * decay)
        weight = weight - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
        yield weight


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": make_checkpoint(folder / "dense"),
        "biases": make_checkpoint(folder / "biases", "qwen2", tied=False),
        "experts": make_checkpoint(folder / "experts", "qwen3_moe", tied=False),
    }


@pytest.fixture(scope="module")
def found(models) -> dict[str, list[dict[str, Any]]]:
    """By case, what its ranks have seen."""
    jobs = {
        name: Job(case.ranks, updates, ([(held_port(), case.config(models))],))
        for name, case in CASES.items()
    }
    return {name: [seen for [seen] in by_rank] for name, by_rank in run_jobs(jobs).items()}


def is_decayed(name: str, dimensions: int, case: str) -> bool:
    of_heads = "q_layernorm" in name or "k_layernorm" in name
    return dimensions > 1 or (of_heads and case == "norms of queries and keys decayed")


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_decayed_and_norms_and_biases_are_not(case: str, models, found):
    config = CASES[case].config(models)
    rates = [learning_rate(config.actor.optimizer, step, run_steps=RUN_STEPS) for step in range(STEPS)]
    assert rates == pytest.approx(np.array([1 / 2, 1, 1, 2 / 3]) * ADAM["lr"])
    for rank in found[case]:
        kinds = set()
        for name, (start, *after) in rank["history"].items():
            decayed = is_decayed(name, rank["dimensions"][name], case)
            kinds.add(decayed)
            decay = ADAM["weight_decay"] if decayed else 0.0
            for value, expected in zip(
                after, adamw(start, rank["gradients"][name], rates, decay), strict=True
            ):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6, err_msg=name)
        assert kinds == ({True} if "adapters" in case else {True, False})


@pytest.mark.parametrize("case", CASES)
def test_main_weights_and_gradients_are_in_single_precision(case: str, found):
    for rank in found[case]:
        assert rank["main"] == rank["gradient"] == {torch.float32}
        assert rank["model"] == {getattr(torch, CASES[case].dtype)}
        for name, weight in rank["weights"].items():
            main = torch.from_numpy(rank["history"][name][-1])
            rounded = main.float().to(getattr(torch, CASES[case].dtype)).double().numpy()
            np.testing.assert_array_equal(weight, rounded, err_msg=name)


def test_all_parameters_of_the_model_are_updated_by_some_rank(found):
    for case in ("distributed", "distributed, bfloat16"):
        whole, parts = found["float32"][0]["weights"], [rank["weights"] for rank in found[case]]
        for name, weight in whole.items():
            assert sum(len(part.get(name, ())) for part in parts) == len(weight), name
