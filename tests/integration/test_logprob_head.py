"""Log-probs from hidden states against those from Megatron's own logits: the same values and gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import ActorConfig
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs

LAYOUTS = {
    "one rank": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
}
VOCAB, TOKENS, TEMPERATURE = 101, 24, 0.8
DTYPES = {"float32": 1e-5, "bfloat16": 2e-2}
"""By dtype, how far gradients may be apart, of the largest one."""


def both_ways(rank: RankSpec, folders: list[Path], parallel: dict, dtype: str):
    """For each checkpoint: log-probs, entropies and all gradients, from logits and from hidden states."""
    from slipstream.backend.megatron.parallel import initialize

    actor = ActorConfig.model_validate({"parallel": parallel})
    device = initialize(rank, actor.parallel, seed=0, timeout_s=60)
    from megatron.core import parallel_state

    from benchmarks.given_logits import vocab_parallel_logprob
    from slipstream.backend.megatron import head, model
    from slipstream.backend.megatron.device_batch import pack
    from slipstream.backend.objective.logprob import fused_logprob_and_entropy
    from slipstream.bridge.families import model_spec

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (TOKENS,), generator=generator).to(device)
    index = torch.tensor([2, 3, 9, 10, 11, 20], device=device)
    grad = torch.randn(len(index), generator=generator).to(device)
    positions = torch.cat([torch.arange(7), torch.arange(TOKENS - 7)]).to(device)
    packed = pack(np.array([0, 7, TOKENS]), device)
    tensor_group = parallel_state.get_tensor_model_parallel_group() if parallel else None

    def of_logits(part, logits):
        options = {"temperature": TEMPERATURE, "vocab": VOCAB, "group": tensor_group}
        return vocab_parallel_logprob(logits[0].index_select(0, index), ids[index + 1], **options)

    def of_hidden(part, hidden):
        options = {"temperature": TEMPERATURE, "vocab": VOCAB, "float32_logits": False}
        inputs = head.head_inputs(part, hidden, index, ids[index + 1], implementation="chunked", **options)
        return fused_logprob_and_entropy(*inputs)

    found = []
    for folder in folders:
        [part] = model.build_model(model_spec(folder), actor, getattr(torch, dtype), device)
        [wrapped] = model.wrap_ddp([part], actor)
        ways = []
        for way in (of_logits, of_hidden):
            if way is of_hidden:
                head.pass_on_hidden_states([part])
            for _ in range(2):  # the second micro-batch adds to the first one's gradient
                logp, entropy = way(part, wrapped(ids[None], positions[None], None, packed_seq_params=packed))
                logp.backward(grad)
            gradients = {name: p.main_grad.cpu().numpy().copy() for name, p in part.named_parameters()}
            ways.append((logp.detach().cpu().numpy(), entropy.cpu().numpy(), gradients))
            wrapped.zero_grad_buffer()
        found.append(ways)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By layout and dtype: what every rank has."""
    folder = tmp_path_factory.mktemp("models")
    folders = [make_checkpoint(folder / str(tied), "qwen3", tied=tied) for tied in (True, False)]
    return run_jobs(
        {
            (layout, dtype): Job(parallel.get("tensor", 1), both_ways, (folders, parallel, dtype))
            for layout, parallel in LAYOUTS.items()
            for dtype in DTYPES
        }
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_from_hidden_states_are_those_from_megatrons_logits(results, layout: str, dtype: str):
    for by_checkpoint in results[layout, dtype]:
        for (logp, entropy, gradients), (fused_logp, fused_entropy, fused_gradients) in by_checkpoint:
            np.testing.assert_allclose(fused_logp, logp, atol=1e-5)
            np.testing.assert_allclose(fused_entropy, entropy, atol=2e-5)
            assert fused_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                scale = np.abs(gradient).max()
                assert scale > 0, name
                np.testing.assert_allclose(
                    fused_gradients[name] / scale, gradient / scale, atol=DTYPES[dtype], err_msg=name
                )
