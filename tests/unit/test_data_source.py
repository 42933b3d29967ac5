"""A data source of the recipe's own gives prompts from a process beside the driver, by position."""

import asyncio
from pathlib import Path

import pytest

from examples.data_source.sums import Sums
from slipstream.configs.schema import RunConfig
from slipstream.rollout.prompts.sources.drawn_prompts import FILE, DrawnPrompts, drawn_prompts
from slipstream.rollout.prompts.sources.source_process import own_drawing
from slipstream.rollout.system.programs.hook_process import HookProcessFailed
from tests.wrong_inputs import their_plugins


def config_of(root: Path, path: str, **args: object) -> RunConfig:
    (root / "run").mkdir(exist_ok=True)
    return RunConfig.model_validate(
        {
            "run": {"name": "run", "root": str(root), "steps": 1, "batch_timeout_s": 60},
            "model": {"path": "unused"},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "data_source": {"path": path, "args": args},
            },
        }
    )


async def draw(config: RunConfig, *, until: int, take: int) -> DrawnPrompts:
    """Draw until so many prompts are there, of which ``take`` are used first."""
    prompts = drawn_prompts(config.rollout, config.run.folder)
    assert prompts is not None
    prompts.go_to(take)
    there = asyncio.Event()
    prompts.when_ready(lambda: there.set() if prompts.drawn >= until else None)
    source = own_drawing(
        config.rollout.data_source,
        prompts,
        config.run.folder / "logs",
        ahead=until - take,
        timeout_s=config.run.batch_timeout_s,
    )
    drawing, waiting = asyncio.create_task(source.run()), asyncio.create_task(there.wait())
    try:
        async with asyncio.timeout(120):
            await asyncio.wait({drawing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if drawing.done():
            drawing.result()
    finally:
        drawing.cancel()
        waiting.cancel()
        await asyncio.wait({drawing, waiting})
        await source.close()
    return prompts


def test_a_resumed_run_goes_on_in_the_same_order(tmp_path):
    config = config_of(tmp_path, "examples.data_source.sums.Sums", seed=2)
    asyncio.run(draw(config, until=3, take=0))
    with (config.run.folder / FILE).open("ab") as cut_off:
        cut_off.write(b'{"prompt": "half a li')
    resumed = asyncio.run(draw(config, until=6, take=3))
    expected = Sums(seed=2).prompts(0, resumed.drawn)
    assert resumed.drawn >= 6
    for position, row in enumerate(expected):
        prompt = resumed.at(position)
        assert (prompt.id, prompt.prompt, prompt.label) == (position, row["prompt"], row["label"])
        assert prompt.metadata == {"operands": 4}


def test_an_error_of_a_source_ends_the_run_with_its_file_and_line(tmp_path):
    config = config_of(tmp_path, "tests.wrong_inputs.their_plugins.Unreachable")
    with pytest.raises(HookProcessFailed, match="ConnectionError: no route to the store") as raised:
        asyncio.run(draw(config, until=1, take=0))
    assert "rollout.data_source" in str(raised.value)
    assert f"{their_plugins.__file__}:" in str(raised.value)
