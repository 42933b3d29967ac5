"""``slipstream try``: what is shown of episodes."""

import asyncio

import numpy as np
import pytest

from slipstream.backend.commands.tryout import EpisodePart, parts_of, plain, verdict
from slipstream.backend.driver.modes.tryout import evenly, tryout
from slipstream.backend.driver.start.inputs import InputError
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.collector.trial import TriedEpisode
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory, joined
from tests.unit.test_rollout_gpu_environment import VALID


class Letters:
    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def trajectory(text: str, finish: Finish = Finish.STOP, reward: float | None = 1.0) -> Trajectory:
    """Return a trajectory in which the policy has sampled the capital letters."""
    sampled = np.array([letter.isupper() for letter in text])
    return Trajectory(
        np.array([*map(ord, text)]),
        sampled,
        np.zeros(len(text), np.float32),
        np.where(sampled, 0, UNSAMPLED).astype(np.int32),
        finish,
        reward=reward,
    )


def episode(what: Trajectory | None, number: int = 0, failures=()) -> TriedEpisode:
    return TriedEpisode(Prompt(number, "ask", label="L"), what, failures, 1.0, 0.25)


@pytest.mark.parametrize(
    ("count", "number", "places"), [(10, 4, [0, 2, 5, 7]), (3, 4, [0, 1, 2]), (1, 1, [0])]
)
def test_prompts_lie_evenly_over_the_data(count, number, places):
    prompts = [Prompt(place, "") for place in range(count)]
    assert [prompt.id for prompt in evenly(prompts, number)] == places


def test_what_the_policy_has_sampled_is_told_from_what_it_was_given():
    parts = parts_of(trajectory("askABtoolC"), Letters())
    assert parts == [
        EpisodePart("ask", False),
        EpisodePart("AB", True),
        EpisodePart("tool", False),
        EpisodePart("C", True),
    ]


def test_all_trajectories_of_an_episode_are_there():
    fields = plain(episode(joined([trajectory("askAB"), trajectory("subX")])), Letters())
    texts = [[part["text"] for part in each] for each in fields["trajectories"]]
    assert texts == [["ask", "AB"], ["sub", "X"]]
    assert (fields["reward"], fields["response_length"], fields["label"]) == (1.0, 3, "L")


def test_an_episode_that_has_failed_has_its_failures_and_no_reward():
    fields = plain(episode(None, failures=["Traceback"]), Letters())
    assert (fields["reward"], fields["failures"]) == (None, ["Traceback"]) and "trajectories" not in fields


def test_the_verdict_says_what_cannot_be_learned_from_and_what_was_cut_off():
    cut = episode(trajectory("askAB", Finish.LENGTH))
    unjudged = episode(trajectory("askA", reward=None), failures=["no reward"])
    text = "\n".join(verdict([cut, episode(trajectory("askA")), unjudged], 72))
    assert "2 of 3 episodes have a reward: 1 on average, 1 to 1" in text
    assert "all rewards are equal" in text and "1 cut off at 72 tokens" in text
    text = "\n".join(verdict([cut, episode(trajectory("askA", reward=0.0))], 72))
    assert "all rewards are equal" not in text


def test_an_engine_over_nodes_is_refused_where_one_machine_alone_is_used():
    config = RunConfig.model_validate(
        VALID
        | {
            "cluster": {"type": "slurm"},
            "rollout": VALID["rollout"] | {"engine": {"nodes": 2, "tensor_parallel": 16}},
        }
    )

    async def main() -> None:
        async with tryout(config, lambda text: None):
            """Nothing is tried."""

    with pytest.raises(
        InputError, match=r"rollout.engine.nodes: found 2, expected 1: .*on this machine alone"
    ):
        asyncio.run(main())
