"""Hooks as a workflow: what engines sampled decides what is trained of the samples that hooks return."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.configs.schema import HooksConfig, SamplingConfig
from slipstream.rollout.compat.slime.alias_path import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.endpoint import SampledReply
from slipstream.rollout.compat.slime.episode_samples import EpisodeEnded, SampleError, trajectory_of
from slipstream.rollout.compat.slime.hook_filter import HookFilter
from slipstream.rollout.compat.slime.hook_workflow import HookWorkflow, WrongReturn
from slipstream.rollout.compat.slime.sample_matching import LogprobsDiffer, match_sample
from slipstream.rollout.trajectory import UNSAMPLED, Completion, Finish, Group, Prompt, Span, joined
from slipstream.rollout.workflow import WorkflowContext

HOOKS = """
import copy
from slime.utils.types import Sample

async def turns(args, sample, sampling_params):
    # Two completions with a tool's tokens between them. It writes into args, as agents do.
    endpoint = OPEN[args.sglang_router_ip]
    args.seen = getattr(args, "seen", 0) + 1
    sample.tokens = [1, 2]
    for turn in range(2):
        tokens, log_probs = await endpoint.ask(sample.tokens, sampling_params)
        sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, text="x")
        if turn == 0:
            sample.append_response_tokens(args, tokens=[50, 51], trainable=False)
    sample.status = Sample.Status.COMPLETED
    sample.metadata["seen"] = args.seen
    return sample

async def fan_out(args, sample, sampling_params, evaluation=False):
    first = await turns(args, sample, sampling_params)
    second = copy.deepcopy(first)
    second.remove_sample = True
    return [first, second]

async def liar(args, sample, sampling_params):
    sample = await turns(args, sample, sampling_params)
    sample.rollout_log_probs[0] -= 0.5
    return sample

async def inventor(args, sample, sampling_params):
    sample = await turns(args, sample, sampling_params)
    sample.append_response_tokens(args, tokens=[60, 61], log_probs=[-0.1, -0.1])
    return sample

async def aborted(args, sample, sampling_params):
    sample = await turns(args, sample, sampling_params)
    sample.status = Sample.Status.ABORTED
    return sample

async def nothing(args, sample, sampling_params):
    return None

async def rm(args, samples, **kwargs):
    if isinstance(samples, list):
        return [{"score": float(index), "acc": 0} for index, _ in enumerate(samples)]
    return {"score": float(samples.metadata["seen"]), "acc": 1}

async def mark(args, sample, *, rollout_id=None):
    sample.metadata["marked"] = True

def keeps_mixed(args, samples, **kwargs):
    CALLS.append(samples)
    return len({sample.get_reward_value(args) for sample in samples}) > 1

OPEN, CALLS = {}, []
"""

ARGS = {
    "apply_chat_template": True,
    "apply_chat_template_kwargs": {},
    "custom_rm_path": None,
    "reward_key": None,
    "rm_type": None,
    "rollout_sample_hook_path": [],
    "rollout_max_response_len": 8,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
}
PROMPT = Prompt(7, "question", "label", {"level": 1})


class Characters:
    """A tokenizer of characters."""

    def apply_chat_template(self, conversation, tokenize=True, **kwargs):
        text = conversation[0]["content"]
        return [ord(letter) for letter in text] if tokenize else text

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, token_ids, **kwargs):
        return "".join(chr(token) for token in token_ids)


def completion(*tokens: int, version: int = 3, finish: Finish = Finish.STOP) -> Completion:
    logprobs = tuple(-0.1 * token for token in tokens)
    return Completion(tokens, logprobs, (Span(version, 0, len(tokens)),), finish)


class ScriptedEndpoints:
    """EpisodeEndpoints whose policy answers [10, 11] and then [12, 13], with a version for each request."""

    def __init__(self, registry: dict) -> None:
        self.registry = registry

    @asynccontextmanager
    async def open(self, context):
        requests: list[SampledReply] = []

        async def ask(input_ids: Sequence[int], params) -> tuple[list[int], list[float]]:
            count = len(requests)
            reply = completion(10 + 2 * count, 11 + 2 * count, version=3 + count)
            requests.append(SampledReply(tuple(input_ids), reply))
            return list(reply.tokens), list(reply.logprobs)

        host = f"episode{len(self.registry)}"
        self.registry[host] = SimpleNamespace(ask=ask)
        yield SimpleNamespace(host=host, port=1, served=lambda: requests)


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_slime_importable()
    (tmp_path / "agent_hooks.py").write_text(HOOKS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "agent_hooks", raising=False)
    import agent_hooks
    from slime.utils.misc import load_function

    load_function.cache_clear()
    return agent_hooks


def run(hooks, settings: dict, **args):
    config = HooksConfig(**settings)
    paths = {"custom_rm_path": config.custom_rm, "rollout_sample_hook_path": config.rollout_sample_hook}
    arguments = SlimeArguments(**{**ARGS, **paths, **args})
    workflow = HookWorkflow(arguments, config, ScriptedEndpoints(hooks.OPEN))

    class Generator:
        async def generate(self, input_ids, sampling):
            return completion(20, 21, finish=Finish.LENGTH)

    context = WorkflowContext(Generator(), Characters(), None, SamplingConfig(max_new_tokens=8))
    return asyncio.run(workflow.run(PROMPT, context)), arguments


def test_tokens_of_tools_carry_no_loss_and_versions_are_the_engines(hooks):
    [trajectory], arguments = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    assert trajectory.tokens_T.tolist() == [1, 2, 10, 11, 50, 51, 12, 13]
    assert trajectory.loss_mask_T.tolist() == [False, False, True, True, False, False, True, True]
    assert trajectory.versions_T.tolist() == [UNSAMPLED] * 2 + [3, 3] + [UNSAMPLED] * 2 + [4, 4]
    assert np.allclose(trajectory.logprobs_T[[2, 7]], [-1.0, -1.3]) and trajectory.reward is None
    assert not hasattr(arguments, "seen"), "args of an episode are a copy"


def test_siblings_are_trajectories_of_one_episode_and_removed_ones_carry_no_loss(hooks):
    settings = {"custom_generate_function": "agent_hooks.fan_out", "custom_rm": "agent_hooks.rm"}
    trajectories, _ = run(hooks, settings, reward_key="score")
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 1.0]
    assert [trajectory.response_length for trajectory in trajectories] == [4, 0]
    assert joined(trajectories).siblings == (8, 16)


def test_a_reward_may_be_a_mapping_whose_key_the_recipe_names(hooks):
    settings = {"custom_generate_function": "agent_hooks.turns", "custom_rm": "agent_hooks.rm"}
    [trajectory], _ = run(hooks, settings, reward_key="score")
    assert trajectory.reward == 1.0
    with pytest.raises(SampleError, match=r"score, acc: set rollout\.hooks\.reward_key"):
        run(hooks, settings)
    with pytest.raises(SampleError, match="no 'missing', only score, acc"):
        run(hooks, settings, reward_key="missing")


def test_a_log_prob_that_the_engine_has_not_given_is_an_error(hooks):
    with pytest.raises(LogprobsDiffer, match=r"token 0 of the .* sampled with -1\.0+, .* says -1\.5"):
        run(hooks, {"custom_generate_function": "agent_hooks.liar"})


def test_tokens_that_no_engine_has_sampled_carry_no_loss(hooks):
    [trajectory], _ = run(hooks, {"custom_generate_function": "agent_hooks.inventor"})
    assert trajectory.tokens_T[-2:].tolist() == [60, 61]
    assert trajectory.loss_mask_T[-4:].tolist() == [True, True, False, False]
    assert trajectory.versions_T[-1] == UNSAMPLED


def test_an_aborted_episode_is_a_failed_attempt_and_nothing_is_an_error(hooks):
    with pytest.raises(EpisodeEnded, match="aborted"):
        run(hooks, {"custom_generate_function": "agent_hooks.aborted"})
    with pytest.raises(WrongReturn, match="returned NoneType, expected a Sample"):
        run(hooks, {"custom_generate_function": "agent_hooks.nothing"})


def test_without_a_generate_function_the_prompt_gets_one_completion(hooks):
    settings = {"custom_rm": "agent_hooks.rm", "rollout_sample_hook": ["agent_hooks.mark"]}
    [trajectory], _ = run(hooks, {"rollout_sample_hook": settings["rollout_sample_hook"]})
    assert trajectory.tokens_T.tolist() == [*map(ord, "question"), 20, 21]
    assert trajectory.finish is Finish.LENGTH and trajectory.response_length == 2


def served(input_ids: Sequence[int], *tokens: int) -> SampledReply:
    return SampledReply(tuple(input_ids), completion(*tokens))


def test_a_completion_that_a_hook_has_cut_off_is_trained_as_far_as_it_stands():
    match = match_sample([1, 2, 10, 11, 50], 2, [served([1, 2], 10, 11, 12, 13)], [1, 1, 0], None)
    assert match.sampled_T.tolist() == [False, False, True, True, False]


def test_a_reply_to_a_text_is_found_by_its_ids_although_its_prompt_has_others():
    reply = served([9, 9, 9], 10, 11)
    whole = match_sample([1, 2, 50, 10, 11], 2, [reply], [0, 1, 1], None)
    assert whole.sampled_T.tolist() == [False, False, False, True, True]
    cut_off = match_sample([1, 2, 10, 50], 2, [reply], [1, 0], None)
    assert not cut_off.sampled_T.any(), "the beginning of a reply proves nothing by itself"
    with_logprobs = match_sample([1, 2, 10, 50], 2, [reply], [1, 0], [-1.0, 0.0])
    assert with_logprobs.sampled_T.tolist() == [False, False, True, False]


def test_the_longest_of_several_replies_to_one_request_is_taken():
    replies = [served([1], 10, 12), served([1], 10, 11, 12)]
    match = match_sample([1, 10, 11, 12], 1, replies, [1, 1, 1], None)
    assert match.sampled_T.tolist() == [False, True, True, True]


def test_the_prompt_is_never_trained_although_it_was_sampled_before():
    match = match_sample([10, 11, 12], 2, [served([], 10, 11), served([10, 11], 12)], [1], None)
    assert match.sampled_T.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "response_length is 9"),
        ({"response_length": 0}, "response_length is 0"),
        ({"loss_mask": [1]}, "loss_mask has 1 values"),
        ({"loss_mask": [1, 2]}, r"loss_mask holds \[2\]"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 values"),
        ({"tokens": [1, 30, 31]}, "no engine has sampled any"),
        ({"reward": float("nan")}, "finite"),
        ({"reward": "good"}, "expected a number"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(hooks, change, message):
    from slime.utils.types import Sample

    fields = {"tokens": [1, 10, 11], "response_length": 2, "status": Sample.Status.COMPLETED, "reward": 1.0}
    sample = Sample(**{**fields, **change})
    with pytest.raises(SampleError, match=message):
        trajectory_of(sample, [served([1], 10, 11)], SlimeArguments(**ARGS))


def test_a_filter_sees_the_group_as_samples(hooks):
    arguments = SlimeArguments(**ARGS)
    (first,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    filter_ = HookFilter("agent_hooks.keeps_mixed", arguments, Characters())
    assert filter_.keep(Group(5, PROMPT, 3, (first.judged(1.0), first.judged(0.0))))
    assert not filter_.keep(Group(6, PROMPT, 3, (first.judged(1.0), first.judged(1.0))))
    sample = hooks.CALLS[0][1]
    assert (sample.group_index, sample.index, sample.reward, sample.label) == (5, 11, 0.0, "label")
    assert sample.tokens == [1, 2, 10, 11, 50, 51, 12, 13] and sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1] and sample.weight_versions == ["3", "4"]
    siblings = joined([first.judged(1.0), first.judged(0.0)])
    assert [len(each) for each in filter_.samples(Group(7, PROMPT, 3, (siblings,)))] == [2]
