"""Real SGLang servers on the CPU, with attention of which its own choice would compute something else.

Kimi-K2 has latent attention. Gemma 3 has two rotary embeddings, and prompts here are longer than its windows.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.growing import GrowingCompletion
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.runs.engines.conftest import VOCAB, Server, serve
from tests.selection import shortened

PROMPT = 40
"""Number of tokens of the first prompt."""
SETTINGS = {
    "gemma3_text": {"tied": True},
    "kimi_k2": {"tied": False, "rope": "yarn, DeepSeek"},
}


@pytest.fixture(scope="module", params=shortened(sorted(SETTINGS), ("kimi_k2",)))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("model") / request.param
    make_checkpoint(folder, request.param, vocab_size=VOCAB, **SETTINGS[request.param])
    build_tokenizer().save_pretrained(folder)
    with serve(folder, tmp_path_factory.mktemp("logs") / "engine.log") as running:
        yield running, folder


def test_logprobs_of_prompts_and_completions_are_those_of_transformers(served: tuple[Server, Path]):
    """The second prompt repeats the first, so that its prefill finds the beginning in the cache."""
    server, folder = served
    model, rng = reference_model(folder), np.random.default_rng(5)
    assert (getattr(model.config, "sliding_window", None) or 0) < PROMPT
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=16, ignore_eos=True)
    prompt = rng.integers(0, VOCAB, PROMPT).tolist()
    for ids in (prompt, [*prompt, *rng.integers(0, VOCAB, 30).tolist()]):
        [logprobs] = server.probe([ids])
        np.testing.assert_allclose(logprobs, reference_logprobs(model, ids).detach().numpy(), atol=1e-4)
        growing = GrowingCompletion()
        server.ask(lambda client, ids=ids, to=growing: client.generate(ids, sampling, to, version=0))
        completion = growing.completion()
        expected = reference_logprobs(model, [*ids, *completion.tokens], 0.7)[len(ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected.detach().numpy(), atol=1e-4)
