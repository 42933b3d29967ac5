"""The same parts on a GPU: trainer against transformers, and weights into a server on the device."""

from pathlib import Path

import numpy as np
import pytest

from bridge.families import FAMILIES
from tests.integration.test_bridge_logits import logits_of, reference_logits
from tests.integration.test_megatron_parity import (
    config_for,
    logprobs_and_gradients,
    make_batch,
    reference_gradients,
)
from tests.models import make_checkpoint
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-3, "bfloat16": 8e-2}
"""Of the largest gradient: TF32 is off, and bfloat16 has 8 bits."""


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_rank_on_a_gpu_gives_the_gradients_of_transformers(tmp_path: Path, dtype: str):
    folder = make_checkpoint(tmp_path / "model")
    batch = make_batch(vocab=101)
    config = config_for(folder, {}, dtype=dtype)
    _, expected = reference_gradients(folder, batch, temperature=0.8)
    [(_, gradients)] = run_ranks(1, logprobs_and_gradients, config, batch)
    for name, reference in expected.items():
        scale = np.abs(reference).max()
        np.testing.assert_allclose(
            gradients[name] / scale, reference / scale, atol=TOLERANCE[dtype], err_msg=name
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_on_a_gpu_are_those_of_transformers(tmp_path: Path, family: str):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    [[found]] = run_ranks(1, logits_of, [folder], {})
    assert np.abs(found - reference_logits(folder)).max() < 1e-3


def test_published_weights_are_bit_for_bit_those_of_the_exported_checkpoint_on_a_gpu(tmp_path: Path):
    from backend.quickstart.tokenizer import build_tokenizer
    from tests.integration.test_engine_weights import VOCAB, serve, train_and_publish

    folder = make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    build_tokenizer().save_pretrained(folder)
    probes = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (2, 30, 100)]
    config = config_for(folder, {}, optimizer={"lr": 1e-2})
    with serve(folder, tmp_path / "engine.log", device="cuda") as server:
        [report] = run_ranks(1, train_and_publish, config, [server.address], tmp_path / "exported")
        assert report.updated == ["engine"]
        updated = server.probe(probes)
    with serve(tmp_path / "exported", tmp_path / "fresh.log", device="cuda") as fresh:
        assert fresh.probe(probes) == updated
