"""slime's hooks reach the endpoint of their episode with any client, and cannot lie about tokens."""

import re

import pytest


def generate(name: str) -> dict[str, str]:
    return {"custom_generate_function": f"tests.agents.hooks.{name}"}


@pytest.mark.parametrize(
    "name", ["with_post", "with_aiohttp", "with_httpx", "with_requests", "with_openai", "changes_args"]
)
def test_a_hook_reaches_its_episode_with_any_client(collector, name):
    for _ in range(2):  # the second one has args of its own
        episode = collector.hooked("#say Grüße", hooks=generate(name))
        assert episode.error is None, episode.failures
        [trajectory], request = episode.trajectories, episode.sampled[-1]
        mask, tokens = trajectory["mask"], trajectory["tokens"]
        assert mask == [False] * 2 + [True] * len(request["tokens"])
        assert tokens[2:] == request["tokens"] and trajectory["logprobs"][2:] == request["logprobs"]
        assert trajectory["versions"][2:] == request["versions"] and set(request["versions"]) == {3, 4}
        assert episode.rewards == [1.0] and episode.open == 0


def test_siblings_are_trajectories_of_their_own(collector):
    episode = collector.hooked(hooks=generate("as_many"), label="3")
    assert episode.error is None, episode.failures
    assert [True in trajectory["mask"] for trajectory in episode.trajectories] == [True, False, True]
    assert episode.rewards == [1.0] * 3


def test_tokens_that_no_engine_has_sampled_carry_no_loss(collector):
    [trajectory] = collector.hooked(hooks=generate("invents_tokens")).trajectories
    assert trajectory["tokens"][-3:] == [70, 71, 72] and trajectory["mask"][-4:] == [True] + [False] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "the environment is broken"),
        ("hangs", "TimeoutError"),
        ("exits", "SystemExit: 3"),
        ("interrupts", "KeyboardInterrupt"),
        ("cancels", "CancelledError"),
        ("uneven", "WrongReturn: .* returned Sample, list, expected a Sample"),
        ("as_many", "returned an empty list"),
        ("invents_everything", "no engine has sampled any"),
        ("lies_about_log_probs", "LogprobsDiffer: 1 log-probs"),
        ("lies_about_lengths", "loss_mask has 1 values"),
        ("another_temperature", "NothingToTrain: .* because of: temperature"),
        ("without_key", "401"),
    ],
)
def test_a_hook_that_fails_or_lies_is_a_failed_attempt(collector, name, message):
    episode = collector.hooked(hooks=generate(name), attempts=2, timeout_s=1 if name == "hangs" else 60)
    assert len(episode.failures) == 2 and not episode.trajectories
    assert all(re.search(message, failure) for failure in episode.failures), episode.failures
    assert episode.open == 0
