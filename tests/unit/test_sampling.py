"""How requests are sampled: what engines are asked for, what recipes may not say, and seeds."""

import asyncio
import math
from pathlib import Path

import pytest

from slipstream.configs.load import load_recipe
from slipstream.configs.schema import EvalSamplingConfig, SamplingConfig
from slipstream.configs.violations import RecipeError
from slipstream.rollout.collection.collector.parts import evaluation_sampling
from slipstream.rollout.collection.collector.seeded import SeededEngines, seeded_engines
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling, request_fields, starts_over, violations

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


# ---- values

NESTED = '{"items":' * 65 + "{}" + "}" * 65
ALTERNATIVES = "a" * 8_193


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"logit_bias": {"3": 1e39}},
            "logit_bias of token 3: expected a number from -100 to 100, found 1e+39",
        ),
        ({"logit_bias": {str(i): -1e39 for i in range(30)}}, "logit_bias of token 0: "),
        (
            {"logit_bias": {3: math.nan}},
            "logit_bias of token 3: expected a number from -100 to 100, found nan",
        ),
        ({"logit_bias": {"30": 1.0}}, "logit_bias: expected token ids below 30, found '30'"),
        ({"logit_bias": [1]}, "logit_bias: expected an object of numbers by token id, found list"),
        ({"temperature": 1e-320}, "temperature: expected 0, or a number from 1e-06 on, found 1e-320"),
        ({"temperature": 1e39}, "temperature: expected a number from 0 to 100, found 1e+39"),
        ({"temperature": -0.5}, "temperature: "),
        ({"top_p": 1e-320}, "top_p: expected a number from 1e-06 to 1, found 1e-320"),
        ({"min_p": math.inf}, "min_p: "),
        ({"min_p": True}, "min_p: "),
        ({"frequency_penalty": -2.5}, "frequency_penalty: "),
        ({"presence_penalty": "1"}, "presence_penalty: expected a number from -2 to 2, found '1'"),
        (
            {"repetition_penalty": 1e-320},
            "repetition_penalty: expected a number from 0.01 to 2, found 1e-320",
        ),
        ({"top_k": 2**31}, "top_k: "),
        ({"top_k": 0}, "top_k: "),
        ({"stop": ["x"] * 33}, "stop: expected at most 32 texts, found 33"),
        ({"stop": "é" * 129}, "stop: expected texts of at most 256 bytes, found one of 258"),
        ({"stop": [3]}, "stop: expected a text or a list of texts, found list"),
        ({"stop_token_ids": [30]}, "stop_token_ids: expected token ids from 0 to 29, found list"),
        ({"stop_token_ids": list(range(16))}, "stop_token_ids: expected at most 15, found 16"),
        ({"stop_regex": "(a|aa)+$"}, "stop_regex: '(a|aa)+$' can take too long"),
        ({"stop_regex": ["x", "(a?){40}a{40}"]}, "stop_regex: '(a?){40}a{40}' can take too long"),
        ({"stop_regex": "a?" * 60 + "a" * 60}, "stop_regex: 'a?a?"),
        ({"stop_regex": "(?=.*x)"}, "stop_regex: '(?=.*x)' can take too long"),
        ({"stop_regex": "["}, "stop_regex: '[' is no expression of Python's re: "),
        ({"regex": ALTERNATIVES}, "regex: expected at most 8192 bytes, found 8193"),
        ({"json_schema": NESTED}, "json_schema: expected at most 64 levels of nesting, found 66"),
        ({"json_schema": {}}, None),
        ({"json_schema": ["a"]}, "json_schema: expected a text, found list"),
        ({"regex": "a", "ebnf": "b"}, "expected one grammar, found regex and ebnf"),
        (
            {"regex": r"((((\w)*?){0,1000})+){1000}"},
            "regex: expected repetitions in each other whose product",
        ),
        (
            {"ebnf": 'root ::= a{,200}\na ::= [(]{200} | "x"'},
            "ebnf: expected repetitions in each other whose",
        ),
        ({"ebnf": "root ::= root"}, "ebnf: rule root: expected rules that do not refer to themselves"),
        ({"ebnf": 'root ::= "a" b?\nb ::= ("c" | root){2}'}, "ebnf: rule root: expected rules that do not"),
        ({"ebnf": "\n".join(f"r{n} ::= r{n + 1}" for n in range(500))}, "ebnf: rule r0: expected rules that"),
        ({"json_schema": '{"items": {"pattern": "(a{999}){999}"}}'}, "json_schema: expected repetitions in"),
        (
            {"json_schema": '{"patternProperties": {"(a{999}){999}": {}}}'},
            "json_schema: expected repetitions",
        ),
        (
            {"structural_tag": '{"format": {"type": "grammar", "grammar": "root ::= root"}}'},
            "structural_tag: rule root: expected rules that do not refer to themselves",
        ),
        ({"regex": "a", "min_new_tokens": 3}, "min_new_tokens: cannot be given together with regex"),
    ],
)
def test_values_that_an_engine_cannot_compute_with_are_named(parameters, message):
    found = violations(parameters, vocab_size=30)
    assert [len(found)] == [0 if message is None else 1], found
    assert message is None or found[0].startswith(message), found


def test_all_values_are_named_at_once():
    assert len(violations({"temperature": -1, "top_k": 0, "stop": [1], "regex": 3}, vocab_size=30)) == 4


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": None, "logit_bias": None, "stop": None},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.5, "repetition_penalty": 2.0},
        {"temperature": 1e-6, "top_p": 1e-6, "top_k": 1 << 30},
        {"logit_bias": {"29": -100, 0: 100.0}, "stop_token_ids": [29], "stop": ["é" * 128] * 32},
        {"stop_regex": ["^yes|no$", r"\bEND\b", "[0-9]{1,20}x{1,20}", "(ab){3}c?"]},
        {"regex": "[0-9]+", "min_new_tokens": 0, "ebnf": ""},
        {"regex": r"([0-9]{4}(-[0-9]{2}){2}){100}[({]{1000}\{9999999}"},
        {"ebnf": 'root ::= (a " ")* # root {9} {9999}\na ::= "{9999}" [a-z"{]{2,9} b\nb ::= "root"'},
        {"json_schema": '{"items": {"$ref": "#"}, "maxItems": 999999, "title": "pattern"}'},
        asked(SamplingConfig()),
    ],
)
def test_values_that_an_engine_can_compute_with_pass(parameters):
    assert violations(parameters, vocab_size=30) == []
