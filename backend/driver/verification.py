"""Do the engines hold the weights that the trainer has sent? What they compute says so.

Every engine is given a text, and its log-probs are compared with the trainer's: that finds whatever changes
what an engine computes, and a model that the two sides build differently. Where SGLang tells a checksum of
its weights, those of all engines are compared with each other as well: that finds what the text does not
come across, such as an expert that none of its tokens is sent to.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from slipstream.configs.schema.weights import VerifyAlways, VerifyEveryN
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, EngineLost
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.trajectory import Prompt
from slipstream.rollout.workflow import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference of log-probs. The kernels of both sides make it some 1e-6 and 1e-2; weights that are wrong
in one matrix, some 1."""


class WeightsMismatch(RuntimeError):
    """Engine and trainer compute something else from the same files: no update would change that."""


def probe_text(prompts: Sequence[Prompt], tokenizer: Tokenizer, length: int) -> list[int]:
    """``length`` tokens of prompts, again and again if they are short."""
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
        verify: VerifyAlways | VerifyEveryN,
        text: list[int],
        dtype: str,
        *,
        answer_timeout_s: float,
        timeout_s: float,
        connect: Callable[[EngineAddress], EngineClient] = EngineClient,
    ) -> None:
        """``text``: token ids. ``dtype``: of the weights. An engine that has not answered in
        ``answer_timeout_s`` may be busy: as long as it says that it is well, it has ``timeout_s``.
        """
        self.text = text
        self._every = verify.n if verify.type == "every_n" else 1
        self._tolerance = verify.tolerance or TOLERANCE[dtype]
        self._answer_timeout_s = answer_timeout_s
        self._timeout_s = timeout_s
        self._connect = connect
        self._tells_checksums = True
        self._agreed: tuple[int, str] | None = None
        """Version and checksum of engines that were found right."""

    def due(self, version: int) -> bool:
        """Whether all engines are asked about this version. One that starts to serve is asked in any case."""
        return version % self._every == 0

    async def wrong(
        self, version: int, expected: Sequence[float], engines: Sequence[EngineAddress]
    ) -> dict[str, str]:
        """Which of ``engines`` do not hold ``version``, and how one knows.

        ``expected``: the trainer's log-probs of the text, without its first token.
        """
        found: dict[str, str] = {}
        checksums: dict[str, str] = {}

        async def ask(engine: EngineAddress) -> None:
            try:
                async with asyncio.timeout(self._timeout_s), self._connect(engine) as client:
                    if difference := await self._while_well(
                        client, self._difference(client, version, expected)
                    ):
                        found[engine.name] = difference
                    elif self._tells_checksums:
                        await self._while_well(client, self._take_checksum(client, checksums))
            except TimeoutError:
                found[engine.name] = f"no answer about version {version} in {self._timeout_s:g} s"
            except (EngineError, Aborted, OSError) as error:
                found[engine.name] = f"no answer about version {version}: {error}"

        await asyncio.gather(*map(ask, engines))
        return found | self._disagreeing(version, checksums)

    async def _while_well(self, client: EngineClient, question: Coroutine[Any, Any, T]) -> T:
        """The answer, however late it is. Raises EngineLost when the engine is not well meanwhile."""
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
        if mean <= self._tolerance:  # which NaN is not
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
            self._tells_checksums = False
            log.warning("engines are not compared by checksums: %s", error)

    def _disagreeing(self, version: int, checksums: dict[str, str]) -> dict[str, str]:
        """Those that differ from what was agreed on before, or from most; all, where there is no most."""
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
