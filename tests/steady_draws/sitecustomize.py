"""Put on the PYTHONPATH of a run, this fixes the noise of its engines: ``SLIPSTREAM_STEADY_DRAWS``.

Tokens are drawn from the policy's distribution at the recipe's temperature, and their log-probs are SGLang's.
But the noise depends only on the token's place in the sequence, not on the requests that run side by side:
engines with the same weights draw the same tokens. All samples of a prompt are the same, too.

Python imports a module of this name in every process, before anything else.
"""

import importlib.abc
import importlib.util
import os
import sys

TARGET = "sglang.srt.layers.sampler"
PLACES = 4096


def steady():
    """Return what stands in the place of SGLang's two functions that draw tokens.

    SGLang takes the second one for whole batches once a greedy request was among them.
    """
    import torch

    noise = {}

    def draw(probs, sampling_seed=None, positions=None):
        places, vocabulary = positions.long() % PLACES, probs.shape[-1]
        if not noise:
            uniform = torch.rand(PLACES, vocabulary, generator=torch.Generator().manual_seed(0))
            noise["gumbel"] = -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))
        return (torch.log(probs.float()) + noise["gumbel"][places]).argmax(-1).to(torch.int32)

    def draw_beside_greedy(probs, top_ks, top_ps, min_ps, needs_min_p, seed, positions, **_):
        return torch.where(top_ks == 1, probs.argmax(-1).to(torch.int32), draw(probs, seed, positions))

    return draw, draw_beside_greedy


class _Loader(importlib.abc.Loader):
    def __init__(self, loader) -> None:
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        self._loader.exec_module(module)
        draw, draw_beside_greedy = steady()
        module.sampling_from_probs_torch = draw
        module.top_k_top_p_min_p_sampling_from_probs_torch = draw_beside_greedy


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = _Loader(spec.loader)
        return spec


if "SLIPSTREAM_STEADY_DRAWS" in os.environ:
    sys.meta_path.insert(0, _Finder())
