"""The judge's own engines: who hears of them, what they may be asked, and what is known of their model."""

import asyncio
import json

import pytest

from slipstream.backend.driver.processes.judge_engines import JudgeRoster, limits_of
from slipstream.configs.schema.judge import OwnEngines
from slipstream.rollout.engine.client import EngineAddress, EngineClient


def model(folder, **config: object) -> OwnEngines:
    (folder / "config.json").write_text(json.dumps(config))
    return OwnEngines(path=folder, tensor_parallel=2)


def test_every_change_is_told_with_all_engines_that_serve():
    async def main():
        told: list[list[str]] = []
        roster = JudgeRoster(lambda serving: told.append([address.name for address in serving]))
        a, b = (EngineClient(EngineAddress(name, "http://x", 1, 9, 9, 1.0)) for name in "ab")
        for change, client in ((roster.add, a), (roster.add, b), (roster.remove, a), (roster.remove, a)):
            change(client)
        await asyncio.gather(a.close(), b.close())
        assert told == [["a"], ["a", "b"], ["b"]]

    asyncio.run(main())


def test_the_limits_are_those_of_the_language_model_and_of_the_recipe(tmp_path):
    inner = {"vocab_size": 7, "max_position_embeddings": 128}
    for config in (inner, {"text_config": inner, "vision_config": {"max_position_embeddings": 3}}):
        limits = limits_of(model(tmp_path, **config), request_timeout_s=11)
        assert (limits.vocab_size, limits.max_length, limits.ranks) == (7, 122, 2)
        assert limits.request_timeout_s == 11
    shorter = model(tmp_path, **inner).model_copy(update={"args": {"context_length": 64}})
    assert limits_of(shorter, 11).max_length == 58


def test_a_model_that_does_not_say_its_limits_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no max_position_embeddings, expected a positive whole number"):
        limits_of(model(tmp_path, vocab_size=7, max_position_embeddings=None), 11)
