"""Verifies that engines hold the weights that the trainer has sent, by what they compute from them.

Every engine computes the log-probs of a probe text, which are compared with the trainer's. This finds every
change in what an engine computes, and a model that the two sides build differently. Where SGLang gives a
checksum of its weights, the engines' checksums are compared with each other as well. This finds wrong weights
that the probe text does not use, such as those of an expert that none of its tokens is routed to.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import numpy as np

from slipstream.configs.schema.weights import VerifyAlways, VerifyDigests, VerifyEveryN
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, EngineLost
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Prompt

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.3}
"""Largest mean difference of log-probs, by type of the engines' weights. Different kernels make it about 1e-6
and 1e-2; one wrong matrix makes it about 1. Weights and activations in fp8 make it 0.19 in SmolLM2-135M,
where one wrong matrix makes it 0.5 to 0.8; larger models differ less."""


class WeightsMismatch(RuntimeError):
    """Engine and trainer compute different log-probs from the same files, which no update would change."""


def probe_text(prompts: Sequence[Prompt], tokenizer: Tokenizer, length: int) -> list[int]:
    """Return ``length`` token ids of prompts, which are repeated if they are short."""
    ids: list[int] = []
    for _ in range(length):
        for prompt in prompts[:length]:
            ids += tokenizer.apply_chat_template(
                prompt.messages(), add_generation_prompt=True, return_dict=False
            )
            if len(ids) >= length:
                return ids[:length]
    return ids


class Verifier:
    """Single event loop."""

    def __init__(
        self,
        verify: VerifyAlways | VerifyDigests | VerifyEveryN,
        text: list[int],
        dtype: str,
        *,
        answer_timeout_s: float,
        timeout_s: float,
        connect: Callable[[EngineAddress], EngineClient] = EngineClient,
    ) -> None:
        """``text``: token ids of the probe. ``dtype``: type of the engines' weights. An engine that has not
        answered within ``answer_timeout_s`` may be busy: as long as it is healthy, it has ``timeout_s``.
        """
        self.text = text
        self._every = verify.n if verify.type == "every_n" else 1
        self._tolerance = verify.tolerance or TOLERANCE[dtype]
        self._answer_timeout_s = answer_timeout_s
        self._timeout_s = timeout_s
        self._connect = connect
        self._has_checksums = True
        self._agreed: tuple[int, str] | None = None
        """Version and checksum of the engines that were last verified."""

    def due(self, version: int) -> bool:
        """True if all engines are verified at this version. An engine that starts is always verified."""
        return version % self._every == 0

    async def wrong(
        self, version: int, expected: Sequence[float], engines: Sequence[EngineAddress]
    ) -> dict[str, str]:
        """Return the engines that do not hold ``version``, by name, with the reason.

        ``expected``: the trainer's log-probs of the probe text, without its first token.
        """
        reasons: dict[str, str] = {}
        checksums: dict[str, str] = {}

        async def ask(engine: EngineAddress) -> None:
            try:
                async with asyncio.timeout(self._timeout_s), self._connect(engine) as client:
                    if difference := await self._while_well(
                        client, self._difference(client, version, expected)
                    ):
                        reasons[engine.name] = difference
                    elif self._has_checksums:
                        await self._while_well(client, self._take_checksum(client, checksums))
            except TimeoutError:
                reasons[engine.name] = f"no answer about version {version} in {self._timeout_s:g} s"
            except (EngineError, Aborted, OSError) as error:
                reasons[engine.name] = f"no answer about version {version}: {error}"

        await asyncio.gather(*map(ask, engines))
        return reasons | self._disagreeing(version, checksums)

    async def _while_well(self, client: EngineClient, question: Coroutine[None, None, T]) -> T:
        """Return the answer, however late. Raises EngineLost when the engine is not healthy meanwhile."""
        asking = asyncio.ensure_future(question)
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=self._answer_timeout_s)
                if done:
                    return asking.result()
                if not await client.healthy():
                    raise EngineLost(f"{client.name} has gone silent")
        finally:
            asking.cancel()

    async def _difference(self, client: EngineClient, version: int, expected: Sequence[float]) -> str | None:
        logprobs = await client.prompt_logprobs(self.text, version=version)
        difference = np.abs(np.subtract(logprobs, expected))
        mean = float(difference.mean())
        if mean <= self._tolerance:  # NaN is not
            return None
        return (
            f"it does not hold version {version}: its log-probs differ from the trainer's by {mean:.3g} on "
            f"average and {difference.max():.3g} at most, over {len(logprobs)} tokens; "
            f"weights.verify.tolerance allows {self._tolerance:g} on average"
        )

    async def _take_checksum(self, client: EngineClient, checksums: dict[str, str]) -> None:
        try:
            checksums[client.name] = await client.checksum()
        except EngineError as error:
            self._has_checksums = False
            log.warning("engines are not compared by checksums: %s", error)

    def _disagreeing(self, version: int, checksums: dict[str, str]) -> dict[str, str]:
        """Return the engines whose checksum differs from the verified one, or else from the majority's."""
        if not checksums:
            return {}
        [(most, count), *others] = Counter(checksums.values()).most_common()
        right: str | None = most
        if self._agreed is not None and self._agreed[0] == version:
            right = self._agreed[1]
        elif others and others[0][1] == count:
            right = None
        if right is not None:
            self._agreed = (version, right)
        return {
            name: f"it does not hold version {version}: its weights have another checksum than other engines'"
            for name, checksum in checksums.items()
            if checksum != right
        }
