"""How requests are sampled: what engines are asked for, what recipes may not say, and seeds."""

import asyncio
from pathlib import Path

import pytest

from slipstream.configs.load import load_recipe
from slipstream.configs.schema import EvalSamplingConfig, SamplingConfig
from slipstream.configs.violations import RecipeError
from slipstream.rollout.collection.collector.parts import evaluation_sampling
from slipstream.rollout.collection.collector.seeded import SeededEngines, seeded_engines
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling, request_fields, starts_over

DETERMINISTIC = "rollout.engine.args={enable_deterministic_inference: true}"


def asked(sampling, done=0, **more):
    settings = {"tokens_left": 9 - done, "greedy": False, "stream_interval": 64, **more}
    return request_fields(sampling, done=done, **settings)["sampling_params"]


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 9, "stream_interval": 64}


def test_a_request_says_nothing_that_the_recipe_does_not_say():
    assert asked(SamplingConfig(max_new_tokens=9)) == PLAIN


def test_stops_least_lengths_seeds_and_further_parameters_reach_the_engine():
    sampling = SamplingConfig(
        max_new_tokens=9,
        min_new_tokens=4,
        stop=["</answer>"],
        stop_token_ids=[7],
        ignore_eos=True,
        seed=3,
        args={"stop_regex": "a+"},
    )
    further = {
        "min_new_tokens": 4,
        "stop": ["</answer>"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "sampling_seed": 3,
        "stop_regex": "a+",
    }
    assert asked(sampling) == PLAIN | further
    assert asked(sampling, done=3)["min_new_tokens"] == 1, "of the whole completion"
    assert "min_new_tokens" not in asked(sampling, done=4)


def test_a_completion_under_a_grammar_starts_over():
    assert starts_over(SamplingConfig(args={"regex": "a"}))
    assert not starts_over(SamplingConfig(args={"frequency_penalty": 1.0}, stop=["x"]))


# ---- evaluations


def test_an_evaluation_is_greedy_and_otherwise_sampled_as_training_is():
    config = load_recipe(Path("quickstart"), ["rollout.sampling={max_new_tokens: 40, stop: [x]}"])
    assert config.eval is not None and config.eval.sampling.is_greedy
    sampling = evaluation_sampling(config.eval, config.rollout.sampling)
    assert sampling == config.rollout.sampling


def test_an_evaluation_may_truncate_and_change_the_distribution():
    own = EvalSamplingConfig(
        temperature=0.6, top_p=0.95, top_k=20, stop=[], args={"min_p": 0.1, "presence_penalty": 1}
    )
    sampling = own.over(SamplingConfig(max_new_tokens=40, stop=["x"], stop_token_ids=[3]))
    assert not own.is_greedy
    assert asked(sampling) == {
        **PLAIN,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "stop_token_ids": [3],
        "min_p": 0.1,
        "presence_penalty": 1,
    }


# ---- what is refused


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["rollout.sampling.args={min_p: 0.1}"], "args.min_p", "truncated distribution"),
        (["rollout.sampling.args={frequency_penalty: 1}"], "args.frequency_penalty", "eval.sampling.args"),
        (["rollout.sampling.args={repetition_penalty: 1.1}"], "args.repetition_penalty", "off-policy"),
        (["rollout.sampling.args={logit_bias: {'3': 1.0}}"], "args.logit_bias", "off-policy"),
        (["rollout.sampling.args={regex: a}"], "args.regex", "off-policy"),
        (["rollout.sampling.args={temperature: 1}"], "args.temperature", "use rollout.sampling.temperature"),
        (["rollout.sampling.args={n: 2}"], "args.n", "rollout.n_samples_per_prompt"),
        (["rollout.sampling.args={frequency_penality: 1}"], "args.frequency_penality", "did you mean"),
        (["rollout.sampling.min_new_tokens=500"], "min_new_tokens", "expected at most"),
        (["rollout.sampling.seed=3"], "seed", "enable_deterministic_inference: true"),
        ([DETERMINISTIC], "seed", "completions of a group would be equal"),
        (
            [DETERMINISTIC, "rollout.sampling.seed=3", "cluster={type: local, device: cpu}"],
            "seed",
            "needs GPUs",
        ),
        (["rollout.sampling.stop_token_ids=[-1]"], "stop_token_ids", "vocabulary"),
        (["rollout.sampling.stop=['']"], "stop", "expected"),
    ],
)
def test_what_the_trainer_could_not_reproduce_is_refused_with_the_reason(overrides, path, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("quickstart"), overrides)
    (violation,) = caught.value.violations
    assert violation.path == f"rollout.sampling.{path}"
    assert message in violation.reason


def test_what_changes_nothing_is_allowed():
    further = "{min_p: 0, frequency_penalty: 0, repetition_penalty: 1, logit_bias: null, stop_regex: a}"
    load_recipe(Path("quickstart"), [f"rollout.sampling.args={further}", "rollout.sampling.min_new_tokens=2"])


def test_an_evaluation_may_have_what_training_may_not():
    sampling = "{temperature: 1, top_p: 0.9, args: {min_p: 0.1, frequency_penalty: 1}}"
    load_recipe(Path("quickstart"), [f"eval.sampling={sampling}"])
    for wrong in ("{top_k: 0}", "{args: {top_p: 1}}", "{min_new_tokens: 9999}"):
        with pytest.raises(RecipeError, match=r"eval\.sampling"):
            load_recipe(Path("quickstart"), [f"eval.sampling={wrong}"])


# ---- seeds


class Heard:
    def __init__(self):
        self.seeds = []

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None):
        is_config = isinstance(sampling, SamplingConfig)
        self.seeds.append(sampling.seed if is_config else sampling.parameters["sampling_seed"])


def seeds(*place, requests=((1, 2), (1, 2), (3,)), sampling=None):
    heard = Heard()
    engines = SeededEngines(heard, *place)
    for ids in requests:
        asyncio.run(engines.generate(ids, sampling or SamplingConfig(), GrowingCompletion()))
    return heard.seeds


def test_every_request_has_a_seed_of_its_own_that_another_run_gives_it_too():
    assert seeds(5, 0, 1, 0) == seeds(5, 0, 1, 0)
    others = [seeds(6, 0, 1, 0), seeds(5, 1, 1, 0), seeds(5, 0, 2, 0), seeds(5, 0, 1, 1)]
    drawn = [*seeds(5, 0, 1, 0), *(seed for each in others for seed in each)]
    assert len(set(drawn)) == len(drawn) == 15
    assert all(0 <= seed < 1 << 32 for seed in drawn)


def test_the_seed_of_a_request_does_not_depend_on_others_that_a_restart_answers_from_the_record():
    assert seeds(5, 0, requests=((3,),)) == [seeds(5, 0)[2]]


def test_a_client_keeps_the_seed_that_it_sends():
    live = LiveSampling(9, {"sampling_seed": 17}, priority=0)
    assert seeds(5, requests=((1,),), sampling=live) == [17]
    assert seeds(5, requests=((1,),), sampling=LiveSampling(9, {}, priority=0)) == seeds(5, requests=((1,),))


def test_without_a_seed_the_engines_are_asked_as_they_are():
    heard = Heard()
    assert seeded_engines(heard, None, 1, 2) is heard
