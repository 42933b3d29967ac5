"""Decides what is done with the engines after a publication that was cut off: the trainer has died, or its
transport has failed.

An engine is *intact* when no part of the new weights has reached it: it goes on with the version that it
serves. Otherwise it may hold a mixture of two versions, and must not generate before it has got a whole one.

    end the update ──refused: none was begun──► version of its weights ──as before──► resume ──► intact
           │                                            │
           └── accepted: it was cut off                 └── the new one, whose number was never published
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.bridge.publish.endpoint import error_text
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, Malformed


@dataclass
class Stock:
    """The state of the engines after a publication that was cut off. Engines in neither field are intact."""

    outdated: dict[str, str] = field(default_factory=dict[str, str])
    """Engines whose server is well but whose weights may be a mixture, each with the reason."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Engines that do not answer, each with the reason."""


class InterruptedUpdates:
    """Ends updates that nobody will finish: no rank of the trainer sends any part of them any more."""

    def __init__(
        self,
        *,
        resumes: bool,
        timeout_s: float,
        connect: Callable[[EngineAddress], EngineClient] = EngineClient,
    ) -> None:
        """``resumes``: let intact engines generate again. ``timeout_s``: longest time for one engine, which
        may have to load the rest of a file.
        """
        self._resumes = resumes
        self._timeout_s = timeout_s
        self._connect = connect

    async def ended(self, version: int, engines: Sequence[EngineAddress]) -> Stock:
        """End the updates of ``engines``, which served ``version``."""
        stock = Stock()

        async def end(engine: EngineAddress) -> None:
            try:
                async with asyncio.timeout(self._timeout_s), self._connect(engine) as client:
                    if reason := await self._problem(client, version):
                        stock.outdated[engine.name] = reason
                    elif self._resumes:
                        await client.resume()
            except TimeoutError:
                stock.failed[engine.name] = f"ending its update: no answer in {self._timeout_s:g} s"
            except (EngineError, OSError) as error:
                stock.failed[engine.name] = f"ending its update: {error_text(error)}"

        await asyncio.gather(*map(end, engines))
        return stock

    async def _problem(self, client: EngineClient, version: int) -> str | None:
        """Return why an engine may not hold ``version``; None if it does."""
        try:
            await client.end_update()
        except Malformed:
            raise
        except EngineError:
            """No update was begun."""
        else:
            return "the trainer has died while it sent weights"
        held = await client.weight_version()
        return None if held == version else f"it holds version {held}, which was never published"
