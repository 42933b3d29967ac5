"""The engine's experts in every layout: log-probs and gradients are those of transformers with these experts.

The reference is transformers' model, whose choice of the best experts is replaced while it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.configs.schema import ParallelConfig
from slipstream.rollout.tokens.routes import NO_ROUTE
from slipstream.rollout.tokens.trajectory import Trajectory
from tests.integration import test_megatron_parity as parity
from tests.models import make_checkpoint, reference_logprobs
from tests.ports import held_port
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

pytestmark = pytest.mark.timeout(600)  # one fixture starts the processes of all layouts

VOCAB, LAYERS, EXPERTS, TOP_K, DENSE = 101, 4, 8, 2, 2
LAYOUTS = {
    "one rank": {},
    "tensor 2": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "expert 2": {"data": 2, "expert": 2},
    "expert 2, tensor 2": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
}
KEPT = ("pipeline 2", "expert 2, tensor 2")


def routed(trajectory: Trajectory, rng: np.random.Generator, known: slice) -> Trajectory:
    """Give the ``known`` tokens experts at random, which are those that nobody's router would choose."""
    tokens = len(trajectory.tokens_T)
    ids = np.full((tokens, LAYERS, TOP_K), NO_ROUTE, np.uint16)
    ids[known] = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[known, :, :TOP_K]
    return replace(trajectory, routes_TW=ids.reshape(tokens, -1))


def batch_with_routes() -> TrainBatch:
    """All tokens but the last have experts; of one trajectory only those after the third, of one none."""
    rng, batch = np.random.default_rng(3), parity.make_batch(VOCAB)
    knowns = [slice(None, -1)] * 6 + [slice(3, -1), slice(0)]
    made = (routed(*each) for each in zip(batch.trajectories, [rng] * 8, knowns, strict=True))
    return replace(batch, trajectories=tuple(made))


@contextmanager
def choosing(routes_TW: np.ndarray) -> Iterator[None]:
    """Let transformers' routers choose the experts of one trajectory, where they are known."""
    own, layers = torch.topk, iter([layer for layer in range(LAYERS) if layer != DENSE])

    def topk(scores_TE: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        first = next(layers) * TOP_K
        given_Tk = torch.from_numpy(routes_TW[:, first : first + k].astype(np.int64))
        _, index_Tk = own(scores_TE, k, dim=dim)
        index_Tk = torch.where(given_Tk == NO_ROUTE, index_Tk, given_Tk)
        return scores_TE.gather(dim, index_Tk), index_Tk

    with patch.object(torch, "topk", topk):
        yield
    assert next(layers, None) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "experts"
    make_checkpoint(folder, "qwen3_moe", tied=False, num_hidden_layers=LAYERS, mlp_only_layers=[DENSE])
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    batch = batch_with_routes()
    by_ids = {tuple(t.tokens_T): t.routes_TW for t in batch.trajectories}

    def forced(policy: torch.nn.Module, tokens: np.ndarray, temperature: float) -> torch.Tensor:
        with choosing(by_ids[tuple(tokens)]):
            return reference_logprobs(policy, tokens, temperature)

    with patch.object(parity, "reference_logprobs", forced):
        return parity.reference_gradients(model, batch, 0.8)


@pytest.fixture(scope="module")
def trained(model: Path, request) -> dict[str, list]:
    jobs = {}
    for layout in chosen(request, "layout"):
        config = parity.config_for(model, LAYOUTS[layout], routing_replay="rollout", recompute="full")
        ranks = ParallelConfig.model_validate(LAYOUTS[layout]).world_size
        work = ([(held_port(), config)], batch_with_routes())
        jobs[layout] = Job(ranks, parity.one_after_the_other, work)
    return run_jobs(jobs)


@pytest.mark.parametrize("layout", shortened(LAYOUTS, KEPT))
def test_gradients_are_those_of_transformers_with_the_same_experts(layout: str, trained, reference):
    [(_, gradients)], *_ = trained[layout]
    assert gradients.keys() == reference[1].keys()
    for name, expected in reference[1].items():
        np.testing.assert_allclose(gradients[name], expected, atol=1e-6, rtol=0, err_msg=name)
    assert max(np.abs(gradient).max() for gradient in gradients.values()) > 1e-2


@pytest.mark.parametrize("layout", shortened(LAYOUTS, KEPT))
def test_log_probs_before_the_step_are_too(layout: str, trained, reference):
    ours = np.concatenate([v for [(logps, _)] in trained[layout] for v in logps.values()])
    expected = np.concatenate(reference[0])
    assert len(ours) % len(expected) == 0  # ranks of one tensor-parallel group have the same ones
    np.testing.assert_allclose(
        np.sort(ours), np.sort(np.tile(expected, len(ours) // len(expected))), atol=1e-5
    )
