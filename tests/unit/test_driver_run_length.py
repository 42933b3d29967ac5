"""The length of a run in passes over its data: its number of steps, and everything that goes by that."""

import io
import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.driver.modes.halves import saved_batches
from slipstream.backend.driver.start.run_length import in_steps, length_note, words_of_length
from slipstream.backend.monitor.progress import PlainProgress
from slipstream.backend.simulate.inputs import recipe
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import RecipeError
from slipstream.rollout.prompts import PromptSet, PromptStream, SourcePrompts
from slipstream.rollout.tokens.trajectory import Prompt
from tests.tries import tries


def config(length: dict, batch_size: int = 4, live: dict | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", **length},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "rollout": {"max_head_offpolicyness": 0, "batch_size": batch_size, "n_samples_per_prompt": 1},
            "live": live,
        }
    )


EPOCHS = st.one_of(st.integers(1, 5), st.sampled_from([0.1, 0.3, 0.5, 1.1, 2.75]))


@tries(20)
@given(EPOCHS, st.integers(1, 60), st.integers(1, 20))
def test_the_steps_of_epochs_are_the_fewest_that_hold_so_many_passes(epochs, prompts, batch_size):
    steps = in_steps(config({"epochs": epochs}, batch_size), prompts).run.total_steps
    assert steps * batch_size >= Fraction(str(epochs)) * prompts > (steps - 1) * batch_size


@tries(10)
@given(st.integers(1, 3), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 9))
def test_a_run_of_epochs_draws_every_prompt_once_in_each(epochs, sizes, batch_size):
    numbers = iter(range(sum(sizes)))
    sources = [
        SourcePrompts([Prompt(next(numbers), "?") for _ in range(size)], f"source-{place}")
        for place, size in enumerate(sizes)
    ]
    steps = in_steps(config({"epochs": epochs}, batch_size), sum(sizes)).run.total_steps
    stream = PromptStream(PromptSet(sources), shuffle=True, seed=1)
    drawn = Counter(stream.at(stream.draw()).id for _ in range(steps * batch_size))
    assert set(drawn) == set(range(sum(sizes)))
    # The last step may begin the next pass.
    assert min(drawn.values()) >= epochs and max(drawn.values()) <= math.ceil(steps * batch_size / sum(sizes))


def test_places_of_live_users_hold_no_prompts():
    half = config({"epochs": 2}, batch_size=8, live={"share": 0.5})
    assert in_steps(half, 20).run.total_steps == 10


def test_a_recipe_with_steps_is_left_as_it_is_and_one_with_epochs_loads_again_with_its_steps():
    plain = config({"steps": 3})
    assert in_steps(plain, 100) is plain
    resolved = in_steps(config({"epochs": 2}), 10)
    assert (resolved.run.steps, resolved.run.epochs) == (5, None)
    assert RunConfig.model_validate(resolved.model_dump(mode="json")).run.total_steps == 5


def test_the_number_of_steps_is_not_known_before_the_data_is_counted():
    with pytest.raises(ValueError, match="not known yet"):
        _ = config({"epochs": 2}).run.total_steps


def test_the_user_is_shown_what_the_epochs_are():
    assert length_note(1, 1000, 250) == "run.epochs: 1 pass over 1,000 prompts are 250 steps"
    assert length_note(2.5, 7, 3, "examples") == "run.epochs: 2.5 passes over 7 examples are 3 steps"
    assert words_of_length(config({"epochs": 2})) == "2 epochs"
    assert words_of_length(config({"steps": 30})) == "30 steps"


def test_progress_and_the_time_left_go_by_the_counted_steps():
    now, stream = [0.0], io.StringIO()
    progress = PlainProgress(0, stream, lambda: now[0])
    progress.lasts(5)
    for step in (1, 2):
        now[0] += 10
        progress.step(step, reward=0.5, head_lag=0, tokens_per_s=1.0)
    progress.close()
    [last] = stream.getvalue().splitlines()[-1:]
    assert "step 2/5" in last and last.endswith("left 0:30")


def test_the_trainer_half_of_a_run_of_epochs_takes_all_saved_batches(tmp_path):
    for number in range(3):
        (tmp_path / f"step-{number:08d}.safetensors").touch()
    assert len(saved_batches(config({"epochs": 9}), tmp_path)) == 3
    assert len(saved_batches(config({"steps": 2}), tmp_path)) == 2


def simulated(tmp_path, *overrides: str) -> RunConfig:
    """Return the recipe of 10 prompts as the simulator reads it."""
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": "?", "label": str(n)}) + "\n" for n in range(10))
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "run: {name: test, epochs: 3}\n"
        f"model: {{path: {tmp_path / 'nowhere'}}}\n"
        f"data: {{path: {tmp_path / 'train.jsonl'}}}\n"
        "rollout: {max_head_offpolicyness: 1, batch_size: 4, n_samples_per_prompt: 2,\n"
        "  reward: slipstream.rollout.reward.FinalAnswer}\n"
    )
    return recipe(str(file), overrides)


def test_the_simulator_counts_the_prompts_or_says_that_it_cannot(tmp_path):
    assert simulated(tmp_path).run.total_steps == 8
    for missing in ("data.path=nowhere.jsonl", "data.max_prompt_tokens=64"):
        with pytest.raises(RecipeError, match=r"run.epochs = 3.*set run.steps=N run.epochs=null"):
            simulated(tmp_path, missing)
        assert simulated(tmp_path, missing, "run.steps=7", "run.epochs=null").run.total_steps == 7
