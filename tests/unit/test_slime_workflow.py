"""Hooks as a workflow: what engines sampled decides what is trained of the samples that hooks return."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.configs.schema import HooksConfig, SamplingConfig
from slipstream.configs.schema.rollout import JudgingConfig
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import (
    EpisodeEnded,
    SampleError,
    fields_of,
    judgement_of_reward,
    trajectory_of,
)
from slipstream.rollout.compat.slime.group_hooks import (
    GroupJudge,
    GroupSamples,
    HookFailed,
    HookFilter,
    ReturnedSamples,
)
from slipstream.rollout.compat.slime.hook_workflow import HookWorkflow, WrongReturn
from slipstream.rollout.compat.slime.sample_matching import LogprobsDiffer, SampledReplies, match_sample
from slipstream.rollout.reward.judge.judge_errors import JudgingFailed
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    Group,
    Prompt,
    Span,
    Trajectory,
    joined,
)
from slipstream.rollout.workflow import WorkflowContext
from slipstream.rollout.workflow.endpoint import Reply

HOOKS = """
import asyncio
import copy
from slime.utils.types import Sample

async def turns(args, sample, sampling_params):
    # Two completions with a tool's tokens between them. It writes into args, as agents do.
    endpoint = OPEN[args.sglang_router_ip, args.sglang_router_port]
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

async def taught(args, sample, sampling_params):
    sample = await turns(args, sample, sampling_params)
    sample.teacher_log_probs = [-0.5 - place for place in range(sample.response_length)]
    return sample

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

def removes_first(args, groups):
    for group in groups:
        (group[0][0] if isinstance(group[0], list) else group[0]).remove_sample = True

def sees_all(args, groups, data_source):
    CALLS.append(groups)

def puts_back(args, groups, data_source):
    data_source.add_samples(groups)

def raises(args, samples, **kwargs):
    raise ValueError("no")

async def too_few_rm(args, samples):
    CALLS.append(samples)
    return [{"score": 1.0}]

async def raises_rm(args, samples):
    CALLS.append(samples)
    raise ValueError("no")

async def exits_rm(args, samples):
    CALLS.append(samples)
    raise SystemExit(3)

async def cancels_rm(args, samples):
    CALLS.append(samples)
    raise asyncio.CancelledError

async def hangs_rm(args, samples):
    CALLS.append(samples)
    await asyncio.Event().wait()

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
SOME = Trajectory(
    np.array([1, 10]), np.array([False, True]), np.zeros(2, np.float32), np.array([UNSAMPLED, 3]), Finish.STOP
)
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


class ScriptedEndpoint:
    """PolicyEndpoint whose policy answers [10, 11] and then [12, 13], with a version for each request."""

    def __init__(self, registry: dict) -> None:
        self.registry = registry

    @asynccontextmanager
    async def open(self):
        requests: list[Reply] = []

        async def ask(input_ids: Sequence[int], params) -> tuple[list[int], list[float]]:
            count = len(requests)
            reply = completion(10 + 2 * count, 11 + 2 * count, version=3 + count)
            requests.append(Reply(tuple(input_ids), reply))
            return list(reply.tokens), list(reply.logprobs)

        async def work(awaitable):
            return await awaitable

        key = f"sk-{len(self.registry)}"
        self.registry[f"episode:{key}@127.0.0.1", 8123] = SimpleNamespace(ask=ask)
        yield SimpleNamespace(
            base_url="http://127.0.0.1:8123", api_key=key, run=work, replies=lambda: requests
        )


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


def run(hooks, settings: dict, *, has_teacher: bool = False, **args):
    config = HooksConfig(**settings)
    paths = {"custom_rm_path": config.custom_rm, "rollout_sample_hook_path": config.rollout_sample_hook}
    arguments = SlimeArguments(**{**ARGS, **paths, **args})
    returned = ReturnedSamples(8)
    key = args.get("reward_key") or "reward"
    workflow = HookWorkflow(arguments, config, key, returned, lambda: 7, has_teacher=has_teacher)

    class Generator:
        async def generate(self, input_ids, sampling):
            return completion(20, 21, finish=Finish.LENGTH)

    endpoint = ScriptedEndpoint(hooks.OPEN) if config.custom_generate_function else None
    context = WorkflowContext(Generator(), Characters(), None, SamplingConfig(max_new_tokens=8), endpoint)
    return asyncio.run(workflow.run(PROMPT, context)), GroupSamples(arguments, Characters(), returned)


def test_tokens_of_tools_carry_no_loss_and_versions_are_the_engines(hooks):
    [trajectory], samples = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    assert trajectory.tokens_T.tolist() == [1, 2, 10, 11, 50, 51, 12, 13]
    assert trajectory.loss_mask_T.tolist() == [False, False, True, True, False, False, True, True]
    assert trajectory.versions_T.tolist() == [UNSAMPLED] * 2 + [3, 3] + [UNSAMPLED] * 2 + [4, 4]
    assert np.allclose(trajectory.logprobs_T[[2, 7]], [-1.0, -1.3]) and trajectory.reward is None
    [sample] = samples.of(PROMPT, [trajectory])
    assert sample.metadata["seen"] == 1, "args of an episode are a copy"


def test_a_teachers_log_probs_are_its_scores_of_what_was_sampled(hooks):
    [trajectory], samples = run(hooks, {"custom_generate_function": "agent_hooks.taught"}, has_teacher=True)
    assert trajectory.tokens_T.tolist() == [1, 2, 10, 11, 50, 51, 12, 13]
    nan = np.nan
    assert trajectory.teacher is not None
    assert np.array_equal(
        trajectory.teacher.logp_T, np.float32([nan, nan, -0.5, -1.5, nan, nan, -4.5, -5.5]), equal_nan=True
    )
    [trajectory], samples = run(hooks, {"custom_generate_function": "agent_hooks.taught"})
    assert trajectory.teacher is None, "no term of the recipe reads them"
    [sample] = samples.of(PROMPT, [trajectory])
    assert len(sample.teacher_log_probs) == 6, "hooks of groups read what a hook has set"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([-0.5], "teacher_log_probs has 1 values, but the response 2 tokens"),
        ([-0.5, 0.5], "expected finite numbers of at most 0"),
        (["a", "b"], "teacher_log_probs holds no numbers"),
    ],
)
def test_a_teachers_log_probs_that_are_none_are_refused(hooks, scores, message):
    from slime.utils.types import Sample

    sample = Sample(
        tokens=[1, 10, 11], response_length=2, status=Sample.Status.COMPLETED, teacher_log_probs=scores
    )
    with pytest.raises(SampleError, match=message):
        trajectory_of(sample, SampledReplies([served([1], 10, 11)]), "reward", has_teacher=True)
    assert trajectory_of(sample, SampledReplies([served([1], 10, 11)]), "reward").teacher is None


def test_siblings_are_trajectories_of_one_episode_and_removed_ones_carry_no_loss(hooks):
    settings = {"custom_generate_function": "agent_hooks.fan_out", "custom_rm": "agent_hooks.rm"}
    trajectories, _ = run(hooks, settings, reward_key="score")
    assert [trajectory.reward for trajectory in trajectories] == [0.0, 1.0]
    assert [trajectory.response_length for trajectory in trajectories] == [4, 0]
    assert joined(trajectories).siblings == (8, 16)


def test_a_reward_may_be_a_mapping_whose_key_the_recipe_names(hooks):
    settings = {"custom_generate_function": "agent_hooks.turns", "custom_rm": "agent_hooks.rm"}
    [trajectory], _ = run(hooks, settings, reward_key="score")
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, (("acc", 1.0),))
    with pytest.raises(SampleError, match=r"'score', 'acc'\], expected 'reward' .* rollout\.reward_key"):
        run(hooks, settings)


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


def served(input_ids: Sequence[int], *tokens: int) -> Reply:
    return Reply(tuple(input_ids), completion(*tokens))


def matched(tokens, start, replies, mask, reported):
    return match_sample(tokens, start, SampledReplies(replies), mask, reported)


def test_a_completion_that_a_hook_has_cut_off_is_trained_as_far_as_it_stands():
    match = matched([1, 2, 10, 11, 50], 2, [served([1, 2], 10, 11, 12, 13)], [1, 1, 0], None)
    assert match.sampled_T.tolist() == [False, False, True, True, False]


def test_a_reply_to_a_text_is_found_by_its_ids_although_its_prompt_has_others():
    reply = served([9, 9, 9], 10, 11)
    whole = matched([1, 2, 50, 10, 11], 2, [reply], [0, 1, 1], None)
    assert whole.sampled_T.tolist() == [False, False, False, True, True]
    cut_off = matched([1, 2, 10, 50], 2, [reply], [1, 0], None)
    assert not cut_off.sampled_T.any(), "the beginning of a reply proves nothing by itself"
    with_logprobs = matched([1, 2, 10, 50], 2, [reply], [1, 0], [-1.0, 0.0])
    assert with_logprobs.sampled_T.tolist() == [False, False, True, False]


def test_the_longest_of_several_replies_to_one_request_is_taken():
    replies = [served([1], 10, 12), served([1], 10, 11, 12)]
    match = matched([1, 10, 11, 12], 1, replies, [1, 1, 1], None)
    assert match.sampled_T.tolist() == [False, True, True, True]


def test_a_tool_may_repeat_what_the_policy_has_said():
    match = matched([1, 10, 11, 10, 11], 1, [served([1], 10, 11)], [1, 1, 0, 0], None)
    assert match.sampled_T.tolist() == [False, True, True, False, False]


def test_of_replies_to_one_request_the_one_with_the_reported_log_probs_is_taken():
    [first, second] = [served([1], 10, 11), served([1], 10, 11)]
    other = replace(second.completion, logprobs=(-0.9, -0.8), spans=(Span(5, 0, 2),))
    replies = [first, Reply((1,), other)]
    match = matched([1, 10, 11], 1, replies, [1, 1], [-0.9, -0.8])
    assert match.versions_T.tolist()[1:] == [5, 5]
    with pytest.raises(LogprobsDiffer, match=r"token 1 .* says -0\.7"):
        matched([1, 10, 11], 1, replies, [1, 1], [-0.9, -0.7])


def test_the_prompt_is_never_trained_although_it_was_sampled_before():
    match = matched([10, 11, 12], 2, [served([], 10, 11), served([10, 11], 12)], [1], None)
    assert match.sampled_T.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "response_length is 9"),
        ({"response_length": 0}, "response_length is 0"),
        ({"loss_mask": [1]}, "loss_mask has 1 values"),
        ({"loss_mask": [1, 2]}, r"loss_mask holds \[2\.0\]"),
        ({"loss_mask": ["a", "b"]}, r"loss_mask is \['a', 'b'\], expected numbers"),
        ({"response_length": 2.0}, r"response_length is 2\.0"),
        ({"tokens": None}, "tokens are None, expected token ids"),
        ({"tokens": [1, 10, -11]}, r"tokens are \[1, 10, -11\], expected token ids"),
        ({"status": "completed"}, "status is 'completed', expected a member of"),
        ({"rollout_log_probs": [float("nan"), -1.1]}, "rollout_log_probs says nan"),
        ({"rollout_log_probs": [-1.0, None]}, "rollout_log_probs says nan"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs has 1 values"),
        ({"tokens": [1, 30, 31]}, "no engine has sampled any"),
        ({"reward": float("nan")}, "finite"),
        ({"reward": "good"}, "expected a finite number"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(hooks, change, message):
    from slime.utils.types import Sample

    fields = {"tokens": [1, 10, 11], "response_length": 2, "status": Sample.Status.COMPLETED, "reward": 1.0}
    sample = Sample(**{**fields, **change})
    with pytest.raises((SampleError, LogprobsDiffer), match=message):
        trajectory_of(sample, SampledReplies([served([1], 10, 11)]), "reward")


def test_hooks_may_hold_tensors_and_arrays_in_the_place_of_lists(hooks):
    import torch
    from slime.utils.types import Sample

    for kind in (torch.tensor, np.array):
        sample = Sample(
            tokens=kind([1, 10, 11]),
            response_length=2,
            status=Sample.Status.COMPLETED,
            loss_mask=kind([True, False]),
            rollout_log_probs=kind([-1.0, -1.1]),
        )
        trajectory = trajectory_of(sample, SampledReplies([served([1], 10, 11)]), "reward")
        assert trajectory.tokens_T.tolist() == [1, 10, 11]
        assert trajectory.loss_mask_T.tolist() == [False, True, False]


def test_what_a_hook_writes_into_its_sample_stays_in_its_episode(hooks):
    prompt = Prompt(7, [{"role": "user", "content": "hi"}], {"answers": ["4"]}, {"levels": [1]})
    arguments = SlimeArguments(**{**ARGS, "apply_chat_template": False})
    fields = fields_of(prompt, arguments, Characters())
    fields["label"]["answers"].append("5")
    fields["metadata"]["levels"].append(2)
    fields["prompt"][0]["content"] = "changed"
    assert prompt.label == {"answers": ["4"]} and prompt.metadata == {"levels": [1]}
    assert prompt.prompt == [{"role": "user", "content": "hi"}]


def test_whatever_a_mapping_holds_beside_numbers_is_left_out():
    reward = {
        "score": np.float32(0.5),
        "pred": "x",
        "acc": True,
        "none": None,
        "mean": 1.0,
        "nan": float("nan"),
    }
    judgement = judgement_of_reward(reward, "score")
    assert (judgement.reward, judgement.parts) == (0.5, (("acc", 1.0),))
    for wrong in (None, {"acc": 1.0}, {"score": None}, {"score": float("inf")}, "1"):
        with pytest.raises(SampleError, match="the reward of a hook"):
            judgement_of_reward(wrong, "score")


def hook_filter(samples: GroupSamples | None = None, **hooks) -> HookFilter:
    arguments = SlimeArguments(**ARGS)
    samples = samples or GroupSamples(arguments, Characters(), ReturnedSamples(1))
    return HookFilter(HooksConfig(**hooks), arguments, samples)


def group(number: int, *trajectories: Trajectory) -> Group:
    return Group(number, PROMPT, 3, trajectories)


def test_a_filter_sees_the_group_as_samples(hooks):
    (first,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    filter_ = hook_filter(dynamic_sampling_filter="agent_hooks.keeps_mixed")
    mixed = group(5, first.judged(1.0), first.judged(0.0))
    assert filter_.choose(mixed) == [*mixed.trajectories]
    assert filter_.choose(group(6, first.judged(1.0), first.judged(1.0))) is None
    sample = hooks.CALLS[0][1]
    assert (sample.group_index, sample.index, sample.reward, sample.label) == (5, 11, 0.0, "label")
    assert sample.tokens == [1, 2, 10, 11, 50, 51, 12, 13] and sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1] and sample.weight_versions == ["3", "4"]


def test_samples_that_a_filter_removes_lose_their_loss_and_no_others_do(hooks):
    settings = {"custom_generate_function": "agent_hooks.fan_out", "custom_rm": "agent_hooks.rm"}
    siblings, samples = run(hooks, settings, reward_key="score")
    (single,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    filter_ = hook_filter(rollout_sample_filter="agent_hooks.removes_first")
    episode = joined([single.judged(1.0), single.judged(0.0)])
    chosen = filter_.choose(group(8, episode, single.judged(1.0)))
    assert chosen is not None
    assert [part.response_length for part in chosen[0].split()] == [0, 4]
    assert chosen[0].reward == episode.reward and chosen[1].response_length == 4
    assert np.array_equal(chosen[0].versions_T, episode.versions_T)
    returned = samples.of(PROMPT, [joined(siblings)])
    assert [[type(each.reward) for each in one] for one in returned] == [[dict, dict]]
    hooks.CALLS.clear()
    everything = hook_filter(
        dynamic_sampling_filter="agent_hooks.keeps_mixed", rollout_all_samples_process="agent_hooks.sees_all"
    )
    assert everything.choose(group(9, single.judged(1.0), single.judged(1.0))) is None
    assert len(hooks.CALLS) == 2, "filtered groups are seen too"


@pytest.mark.parametrize("name", ["dynamic_sampling_filter", "rollout_sample_filter"])
def test_a_filter_that_raises_is_named(hooks, name):
    (first,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    with pytest.raises(HookFailed, match=rf"rollout\.hooks\.{name} raised ValueError: no"):
        hook_filter(**{name: "agent_hooks.raises"}).choose(group(5, first.judged(1.0)))


def test_nothing_is_put_back_into_a_data_source_that_is_not_there(hooks):
    (first,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    with pytest.raises(HookFailed, match="no 'add_samples': Slipstream admits the prompts of the recipe"):
        hook_filter(rollout_all_samples_process="agent_hooks.puts_back").choose(group(5, first.judged(1.0)))


def judged_group(hooks, path: str, **limits) -> list[Judgement]:
    (single,), _ = run(hooks, {"custom_generate_function": "agent_hooks.turns"})
    arguments = SlimeArguments(**{**ARGS, "custom_rm_path": path, "reward_key": "score"})
    samples = GroupSamples(arguments, Characters(), ReturnedSamples(1))
    limits = JudgingConfig(**{"attempts": 2, "retry_after_s": 0.001, **limits})
    reward = GroupJudge(arguments, samples, limits, "score")
    return asyncio.run(reward.judge_group(PROMPT, [joined([single, single]), single]))


def test_a_reward_of_groups_is_asked_once_about_all_samples(hooks):
    judgements = judged_group(hooks, "agent_hooks.rm")
    assert [judgement.reward for judgement in judgements] == [0.5, 2.0], "siblings have the mean of theirs"
    assert judgements[0].parts == (("acc", 0.0),)


@pytest.mark.parametrize(
    ("path", "limits", "message"),
    [
        ("too_few", {}, "returned 1 rewards for 3 samples"),
        ("raises", {}, "ValueError: no"),
        ("exits", {}, "SystemExit: 3"),
        ("cancels", {}, "CancelledError, which the hook has raised itself"),
        ("hangs", {"timeout_s": 0.01}, "no answer within 0.01 s"),
    ],
)
def test_a_reward_of_groups_that_fails_is_asked_again_and_then_named(hooks, path, limits, message):
    hooks.CALLS.clear()
    with pytest.raises(JudgingFailed, match=rf"rollout\.hooks\.group_rm: 2 attempts .*{message}"):
        judged_group(hooks, f"agent_hooks.{path}_rm", **limits)
    assert len(hooks.CALLS) == 2


def test_samples_of_this_process_keep_what_hooks_have_put_on_them():
    returned = ReturnedSamples(2)
    trajectories = [replace(SOME, tokens_T=SOME.tokens_T + number) for number in (0, 1, 2)]
    for trajectory, sample in zip(trajectories, "abc", strict=True):
        returned.keep(PROMPT, [trajectory], [sample])
    assert returned.of(PROMPT, trajectories) == [None, "b", "c"], "the oldest episode is given up"
    returned.keep(PROMPT, [trajectories[2]], ["d"])
    assert returned.of(PROMPT, [trajectories[2]] * 3) == ["c", "d", None], "none is given twice"
    assert returned.of(Prompt(8, "other"), [trajectories[2]]) == [None]
