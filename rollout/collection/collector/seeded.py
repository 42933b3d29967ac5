"""Gives each request of an episode a seed of its own, which depends on nothing that differs between runs.

(seed of the recipe, group, sample, attempt, token ids, how often they were asked for) ──► seed of the request

An engine with deterministic inference gives all requests without a seed the same one: the completions of a
group would be equal.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.recording import GrowingGenerator
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import Sampling
from slipstream.rollout.tokens.record import digest


class SeededEngines:
    """The engines for one attempt at an episode."""

    def __init__(self, engines: GrowingGenerator, *place: object) -> None:
        """``place``: the recipe's seed, and what tells this attempt from all others of the run."""
        self._engines = engines
        self._place = ":".join(map(str, place))
        self._asked: Counter[bytes] = Counter()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """As ``EnginePool.generate``. A seed that a client has sent itself stays."""
        seeded = with_seed(sampling, self._seed(input_ids))
        await self._engines.generate(input_ids, seeded, completion, greedy=greedy, grown=grown)

    def _seed(self, input_ids: Sequence[int]) -> int:
        asked = digest(input_ids)
        self._asked[asked] += 1
        text = f"{self._place}:{asked.hex()}:{self._asked[asked]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seeded_engines(engines: GrowingGenerator, seed: int | None, *place: object) -> GrowingGenerator:
    """Return the engines for an attempt, with seeds if the recipe has one."""
    return engines if seed is None else SeededEngines(engines, seed, *place)


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    """Return the sampling of a request with a seed."""
    if isinstance(sampling, SamplingConfig):
        return sampling.model_copy(update={"seed": seed})
    return replace(sampling, parameters={"sampling_seed": seed, **sampling.parameters})
