"""The engine's experts in every layout and family: values are those of transformers with these experts.

The reference is transformers' model, whose choice of the best experts is replaced while it runs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.geometry import Experts
from slipstream.configs.schema import ParallelConfig, RunConfig
from slipstream.rollout.tokens.routes import NO_ROUTE
from slipstream.rollout.tokens.trajectory import Trajectory
from tests.integration import test_megatron_parity as parity
from tests.models import make_checkpoint, reference_logprobs
from tests.ports import held_port
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

pytestmark = pytest.mark.timeout(600)  # one fixture starts the processes of all layouts

VOCAB = 101
LAYOUTS = {
    "one rank": {},
    "tensor 2": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "expert 2": {"data": 2, "expert": 2},
    "expert 2, tensor 2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
}
KEPT = ("pipeline 2", "expert 2, tensor 2")
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_next",
    "solar_open",
)
"""Families beside Qwen3-MoE, whose routers differ."""
KEPT_FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe")
NO_GRADIENT = r"e_score_correction_bias|\.indexer\."
"""Parameters that are exported, and have no gradient in transformers."""
TOLERANCES = {"qwen3_next": 1e-5}
"""Its linear attention adds up chunks of tokens in another order, whatever the experts are."""


def experts_of(model: Path) -> tuple[Experts, list[int]]:
    """Return the mixture of a model, and the numbers of the layers that have experts."""
    geometry = model_spec(model).geometry
    assert geometry.experts is not None
    return geometry.experts, [layer for layer in range(geometry.n_layers) if geometry.has_experts(layer)]


def routed(trajectory: Trajectory, rng: np.random.Generator, known: slice, model: Path) -> Trajectory:
    """Give the ``known`` tokens experts at random, which are those that nobody's router would choose."""
    (experts, _), layers = experts_of(model), model_spec(model).geometry.n_layers
    tokens = len(trajectory.tokens_T)
    ids = np.full((tokens, layers, experts.per_token), NO_ROUTE, np.uint16)
    ids[known] = rng.random((tokens, layers, experts.count)).argsort(-1)[known, :, : experts.per_token]
    return replace(trajectory, routes_TW=ids.reshape(tokens, -1))


def batch_with_routes(model: Path) -> TrainBatch:
    """All tokens but the last have experts; of one trajectory only those after the third, of one none, of one
    every third token has none."""
    rng, batch = np.random.default_rng(3), parity.make_batch(VOCAB)
    knowns = [slice(None, -1)] * 6 + [slice(3, -1), slice(0)]
    made = [routed(t, rng, known, model) for t, known in zip(batch.trajectories, knowns, strict=True)]
    made[0].routes_TW[::3] = NO_ROUTE
    return replace(batch, trajectories=tuple(made))


@contextmanager
def choosing(routes_TW: np.ndarray, model: Path) -> Iterator[None]:
    """Let transformers' routers choose the experts of one trajectory, where they are known."""
    experts, numbers = experts_of(model)
    own, layers, top_k = torch.topk, iter(numbers), experts.per_token

    def topk(
        scores_TE: torch.Tensor, k: int, dim: int = -1, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scores_TE.shape != (len(routes_TW), experts.count) or k != top_k:
            return own(
                scores_TE, k, dim=dim, **options
            )  # the best groups of experts, the tokens of an indexer
        first = next(layers) * top_k
        given_Tk = torch.from_numpy(routes_TW[:, first : first + k].astype(np.int64))
        _, index_Tk = own(scores_TE, k, dim=dim, **options)
        index_Tk = torch.where(given_Tk == NO_ROUTE, index_Tk, given_Tk)
        return scores_TE.gather(dim, index_Tk), index_Tk

    with patch.object(torch, "topk", topk):
        yield
    assert next(layers, None) is None


def forced_reference(model: Path) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return transformers' log-probs and gradients of ``batch_with_routes``."""
    batch = batch_with_routes(model)
    by_ids = {tuple(t.tokens_T): t.routes_TW for t in batch.trajectories}

    def forced(policy: torch.nn.Module, tokens: np.ndarray, temperature: float) -> torch.Tensor:
        with choosing(by_ids[tuple(tokens)], model):
            return reference_logprobs(policy, tokens, temperature)

    with patch.object(parity, "reference_logprobs", forced):
        return parity.reference_gradients(model, batch, 0.8)


def assert_gradients(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-6
) -> None:
    assert {name for name in found if not re.search(NO_GRADIENT, name)} == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=tolerance, rtol=0, err_msg=name)
    assert max(np.abs(gradient).max() for gradient in found.values()) > 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "experts", "qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    return forced_reference(model)


@pytest.fixture(scope="module")
def families(tmp_path_factory, request) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {
        family: make_checkpoint(folder / family, family, tied=False) for family in chosen(request, "family")
    }


def each_model(rank: RankSpec, work: list[tuple[int, RunConfig, TrainBatch]]) -> list:
    """``one_after_the_other`` for models with batches of their own."""
    return [
        found
        for port, config, batch in work
        for found in parity.one_after_the_other(rank, [(port, config)], batch)
    ]


@pytest.fixture(scope="module")
def trained(model: Path, families: dict[str, Path], request) -> dict[str, list]:
    """By layout the results of each rank, and those of the families one after the other."""
    settings = {"routing_replay": "rollout", "recompute": "full"}
    jobs = {}
    for layout in chosen(request, "layout"):
        config = parity.config_for(model, LAYOUTS[layout], **settings)
        ranks = ParallelConfig.model_validate(LAYOUTS[layout]).world_size
        jobs[layout] = Job(ranks, each_model, ([(held_port(), config, batch_with_routes(model))],))
    if families:
        work = [
            (held_port(), parity.config_for(folder, {}, **settings), batch_with_routes(folder))
            for folder in families.values()
        ]
        jobs["families"] = Job(1, each_model, (work,))
    return run_jobs(jobs)


@pytest.mark.parametrize("layout", shortened(LAYOUTS, KEPT))
def test_gradients_are_those_of_transformers_with_the_same_experts(layout: str, trained, reference):
    [(_, gradients)], *_ = trained[layout]
    assert_gradients(gradients, reference[1])


@pytest.mark.parametrize("family", shortened(FAMILIES, KEPT_FAMILIES))
def test_gradients_of_other_families_are_too(family: str, trained, families):
    [found] = trained["families"]
    _, gradients = found[list(families).index(family)]
    tolerance = TOLERANCES.get(family, 1e-6)
    assert_gradients(gradients, forced_reference(families[family])[1], tolerance)


@pytest.mark.parametrize("layout", shortened(LAYOUTS, KEPT))
def test_log_probs_before_the_step_are_too(layout: str, trained, reference):
    ours = np.concatenate([v for [(logps, _)] in trained[layout] for v in logps.values()])
    expected = np.concatenate(reference[0])
    assert len(ours) % len(expected) == 0  # ranks of one tensor-parallel group have the same ones
    np.testing.assert_allclose(
        np.sort(ours), np.sort(np.tile(expected, len(ours) // len(expected))), atol=1e-5
    )
