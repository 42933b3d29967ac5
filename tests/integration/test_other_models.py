"""Reference, teacher and critic in the real trainer, against transformers and formulas written out."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import Trajectory
from tests.integration.test_megatron_parity import config_for, make_batch, unfused
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

LAYOUTS = {
    "one rank": {},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
}
KEPT = ("one rank", "tensor 2 + sequence")
TEMPERATURE = 0.8
DECAY = 0.7
CRITIC = {"discount": 0.95, "gae_lambda": 0.9, "value_clip": None}


def models(folder: Path) -> dict[str, Path]:
    found = {
        name: make_checkpoint(folder / name, tied=name != "critic", seed=seed, num_hidden_layers=layers)
        for name, seed, layers in (("policy", 0, 4), ("reference", 1, 4), ("teacher", 2, 2), ("critic", 3, 4))
    }
    weights = load_file(found["critic"] / "model.safetensors")
    weights["score.weight"] = torch.randn(1, weights["model.norm.weight"].shape[0])
    save_file(weights, found["critic"] / "model.safetensors", {"format": "pt"})
    return found


def cases(paths: dict[str, Path]) -> dict[str, dict]:
    """By name: what is added to the recipe."""
    reference = {"type": "checkpoint", "path": str(paths["reference"])}
    return {
        "critic, penalty in the reward": {
            "actor": {
                "advantage": [{"type": "reward", "estimator": "gae"}],
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.1, "reference": reference},
            },
            "critic": {**CRITIC, "path": str(paths["critic"])},
        },
        "teacher, penalty in the loss": {
            "actor": {
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.2, "reference": reference},
                "advantage": [
                    {"type": "reward", "weight": 2.0},
                    {
                        "type": "teacher",
                        "weight": 0.5,
                        "clip": None,
                        "scores": {"type": "model", "path": str(paths["teacher"])},
                    },
                ],
            }
        },
        "a teacher's scores that come with trajectories": {
            "actor": {
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.2, "reference": reference},
                "advantage": [
                    {"type": "teacher_topk", "weight": 0.3},
                    {"type": "teacher", "weight": 0.5, "clip": 1.5},
                    {"type": "reward", "weight": 2.0},
                ],
            }
        },
        "a teacher's likeliest tokens alone": {
            "actor": {
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.2, "reference": reference},
                "advantage": [{"type": "teacher_topk"}],
            }
        },
        "critic, rewards of turns": {
            "actor": {
                "advantage": [{"type": "reward", "estimator": "gae"}],
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.1, "reference": reference},
                "turns": {"baseline": "none", "coefficient": 0.5, "reward_coefficient": 2.0},
            },
            "critic": {**CRITIC, "path": str(paths["critic"])},
        },
        "rewards of turns": {
            "actor": {
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.2, "reference": reference},
                "turns": {"discount": 0.5, "coefficient": 0.7, "reward_coefficient": 0.3},
            }
        },
        "penalty in the reward of trajectories": {
            "actor": {
                "kl": {"where": "reward", "estimator": "k2", "coefficient": 0.1, "reference": reference}
            }
        },
    }


def batch_with_tools() -> TrainBatch:
    """In one trajectory a tool has spoken; all but one have turns with rewards of their own."""
    batch = make_batch(vocab=101)
    one = max(batch.trajectories, key=lambda trajectory: trajectory.response_length)
    mask_T = one.loss_mask_T.copy()
    middle = int(np.flatnonzero(mask_T).mean())
    mask_T[middle : middle + 3] = False
    trajectories = (replace(t, loss_mask_T=mask_T) if t is one else t for t in batch.trajectories)
    trajectories = [with_teacher(with_turns(t, number), number) for number, t in enumerate(trajectories)]
    return TrainBatch(batch.version, tuple(trajectories), batch.group_N)


def with_turns(trajectory: Trajectory, number: int) -> Trajectory:
    """No turn; or some within the prompt, and as many behind it as fit, but for the last tokens."""
    if number == 0:
        return trajectory
    prompt = int(np.flatnonzero(trajectory.loss_mask_T)[0])
    ends = [
        *range(max(1, prompt - 2), prompt + 1, 2),
        *range(prompt + 1, len(trajectory.tokens_T), 2 + number),
    ]
    return replace(
        trajectory,
        turn_rewards=tuple((end, float((number * 7 + end * 5) % 11) / 10) for end in sorted(set(ends))),
    )


def with_teacher(trajectory: Trajectory, number: int) -> Trajectory:
    """No teacher; or log-probs of some tokens, and likeliest tokens at others, as many as ``number``."""
    if number == 0:
        return trajectory
    rng = np.random.default_rng(number)
    length = len(trajectory.tokens_T)
    logp_T = np.where(
        rng.random(length) < 0.7, trajectory.logprobs_T - rng.exponential(2, length) + 1, np.nan
    )
    top_TV = np.log(rng.dirichlet(np.ones(101), size=length))
    ids_TK = np.argsort(-top_TV)[:, :number].copy()
    top_TK = np.take_along_axis(top_TV, ids_TK, axis=1)
    top_TK[rng.random(length) < 0.4] = np.nan
    scores = TeacherScores(np.minimum(logp_T, 0), ids_TK, top_TK)
    return replace(trajectory, teacher=scores)


# ---- the trainer's gradients


def config_of(paths: dict[str, Path], parallel: dict, case: dict) -> RunConfig:
    config = config_for(paths["policy"], parallel, **case.get("actor", {}))
    return RunConfig.model_validate(config.model_dump() | {"critic": case.get("critic")})


def gradients_of(rank: RankSpec, configs: dict[str, RunConfig], batch: TrainBatch):
    """By case: metrics, and the gradients of policy and critic in HF names, on rank 0."""
    from slipstream.backend.megatron import model
    from slipstream.backend.trainer.rank import TrainerRank
    from slipstream.backend.trainer.scoring import Scorers
    from slipstream.bridge.families import model_spec
    from slipstream.bridge.model.layout import Layout
    from slipstream.bridge.model.spec import value_spec
    from slipstream.bridge.shards.plan import make_plan

    trainer, found = None, {}
    for name, config in configs.items():
        if trainer is None:
            trainer = TrainerRank(config, rank)
        else:
            trainer._scorers = Scorers(
                config.actor, config.critic, config.model, trainer._device, config.run.total_steps
            )
        trainer._config = config
        trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
        critic = trainer._scorers.critic
        if critic is not None:
            critic.trained.optimizer.step = lambda: (True, 0.0, 0)
        metrics = trainer.train(batch)
        gradients = exported(trainer._plan, gradients_in(trainer._parameters), rank.rank)
        of_critic = None
        if critic is not None:
            spec = value_spec(model_spec(config.critic.path))
            plan = make_plan(spec, Layout.of(config.actor.parallel), 2**20, 4)
            shards = [model.named_shards(part) for part in critic.trained.modules]
            of_critic = exported(plan, gradients_in(shards), rank.rank)
        found[name] = (metrics, gradients, of_critic)
    del trainer._trained.optimizer.step
    found["average"] = average_of(trainer, configs, batch, rank.rank)
    return found


def average_of(trainer, configs: dict[str, RunConfig], batch: TrainBatch, rank: int):
    """The policy before and after each of two steps, and its average, in HF names, on rank 0."""
    from slipstream.backend.trainer.scoring import Scorers

    config = next(iter(configs.values()))
    kl = {"reference": {"type": "average", "decay": DECAY}}
    trainer._config = config_for(config.model.path, config.actor.parallel.model_dump(), kl=kl)
    trainer._scorers = Scorers(trainer._config.actor, None, config.model, trainer._device, 1)
    policies = [exported(trainer._plan, trainer._parameters, rank)]
    for _ in range(2):
        trainer.train(batch)
        policies.append(exported(trainer._plan, trainer._parameters, rank))
    average = trainer._scorers.average
    return policies, exported(trainer._plan, average._waiting, rank)


def gradients_in(parameters):
    return [
        {name: getattr(tensor, "main_grad", tensor) for name, tensor in part.items()} for part in parameters
    ]


def exported(plan, parameters, rank: int) -> dict[str, np.ndarray]:
    from slipstream.bridge.shards.export import export

    found = {}
    for bucket in export(plan, parameters, rank):
        if bucket is not None:
            found.update({name: tensor.clone().numpy() for name, tensor in bucket.tensors()})
    return found


# ---- the same by hand


def expected(paths: dict[str, Path], case: dict, batch: TrainBatch):
    """Gradients of policy and critic, and metrics: one trajectory at a time, advantages in float64 loops."""
    policy, reference, teacher = (reference_model(paths[x]) for x in ("policy", "reference", "teacher"))
    actor = case["actor"]
    terms = {term["type"]: term for term in actor.get("advantage", [{"type": "reward"}])}
    said, divergences = [], []
    for trajectory in batch.trajectories:
        mask = torch.from_numpy(trajectory.loss_mask_T[1:])
        logp = reference_logprobs(policy, trajectory.tokens_T, TEMPERATURE)[mask]
        with torch.no_grad():
            ref, taught = (
                reference_logprobs(model, trajectory.tokens_T, TEMPERATURE)[mask]
                for model in (reference, teacher)
            )
        mu = torch.from_numpy(trajectory.logprobs_T[1:])[mask]
        said.append((logp, ref, taught, mu))
        divergences.append(divergence_by_hand(policy, trajectory))
    rewards = [float(t.reward) for t in batch.trajectories]
    critic_gradients, values = None, None
    if "critic" in case:
        values = [values_of(paths["critic"], t) for t in batch.trajectories]
        advantages, returns = gae_by_hand(said, rewards, values, actor, batch)
        total = sum(
            ((value - torch.tensor(target)) ** 2).sum() / 2
            for (value, _), target in zip(values, returns, strict=True)
        )
        tokens = sum(len(value) for value, _ in values)
        model = values[0][1]
        gradients = torch.autograd.grad(total / tokens, [p for _, p in model], allow_unused=True)
        critic_gradients = dict(
            unfused((name, g.numpy()) for (name, _), g in zip(model, gradients, strict=True) if g is not None)
        )
    else:
        advantages = group_advantages_by_hand(said, rewards, actor)
        if "turns" in actor:
            advantages = turns_by_hand(advantages, actor["turns"], batch)
    total, tokens, metrics = 0.0, 0, Counter()
    for (logp, ref, taught, mu), advantage, trajectory, divergence in zip(
        said, advantages, batch.trajectories, divergences, strict=True
    ):
        a = torch.zeros(len(logp))
        if "reward" in terms:
            a = terms["reward"].get("weight", 1.0) * torch.tensor(advantage, dtype=torch.float32)
            metrics["advantage/reward_abs_mean"] += a.abs().sum().item()
        if "teacher" in terms:
            of_teacher = gap_by_hand(terms["teacher"], taught, logp, trajectory)
            metrics["advantage/teacher_mean"] += of_teacher.sum().item()
            a = a + of_teacher
        if "teacher_topk" in terms:
            total = total + terms["teacher_topk"].get("weight", 1.0) * divergence
            metrics["divergence"] += divergence.item()
        weight = (logp.detach() - mu).exp().clamp(max=5.0)
        total = total - (weight * a * (logp - logp.detach()).exp()).sum()
        if actor["kl"]["where"] == "loss":
            x = logp - ref
            total = total + actor["kl"]["coefficient"] * ((logp - mu).exp() * ((-x).exp() - 1 + x)).sum()
        tokens += len(logp)
    (total / tokens).backward()
    gradients = dict(unfused((name, p.grad.numpy()) for name, p in policy.named_parameters()))
    sum_of_reference = sum(((ref - logp).exp() - 1 + logp - ref).sum().item() for logp, ref, _, _ in said)
    means = {name: value / tokens for name, value in metrics.items()}
    if "teacher_topk" in terms:
        taught = [t.teacher.has_top_T[t.loss_mask_T] for t in batch.trajectories if t.teacher is not None]
        known = int(np.concatenate(taught).sum())
        means |= {"train/teacher_topk_kl": means.pop("divergence") * tokens / known}
        means |= {"train/teacher_topk_fraction": known / tokens}
    if "teacher" in terms and terms["teacher"].get("scores") is None:
        taught = [t.teacher.has_T[t.loss_mask_T] for t in batch.trajectories if t.teacher is not None]
        means["advantage/teacher_fraction"] = np.concatenate(taught).sum() / tokens
    return gradients, critic_gradients, {"train/reference_kl": sum_of_reference / tokens} | means


def gap_by_hand(term: dict, taught: torch.Tensor, logp: torch.Tensor, trajectory: Trajectory):
    """The teacher's term of each token: 0 where it has said nothing."""
    if term.get("scores") is None:
        nothing = np.full(len(trajectory.tokens_T), np.nan, np.float32)
        scores = nothing if trajectory.teacher is None else trajectory.teacher.logp_T
        taught = torch.from_numpy(scores)[torch.from_numpy(trajectory.loss_mask_T)]
    values = []
    for of_teacher, of_policy in zip(taught.tolist(), logp.tolist(), strict=True):
        gap = 0.0 if math.isnan(of_teacher) else of_teacher - of_policy
        clip = term.get("clip") or math.inf
        values.append(term["weight"] * max(-clip, min(clip, gap)))
    return torch.tensor(values, dtype=torch.float32)


def divergence_by_hand(policy, trajectory: Trajectory) -> torch.Tensor:
    """The sum of the divergences of a trajectory, one token at a time over the whole vocabulary."""
    total = torch.zeros(())
    if trajectory.teacher is None:
        return total
    logits = policy(torch.from_numpy(trajectory.tokens_T)[None]).logits[0].double() / TEMPERATURE
    logp_TV = logits.log_softmax(-1)
    for place in np.flatnonzero(trajectory.loss_mask_T & trajectory.teacher.has_top_T):
        ids = torch.from_numpy(trajectory.teacher.top_ids_TK[place].astype(np.int64))
        q = torch.from_numpy(trajectory.teacher.top_logp_TK[place]).double()
        s = logp_TV[place - 1, ids]
        rest, rest_q = 1 - s.exp().sum(), 1 - q.exp().sum()
        total = total + ((s.exp() * (s - q)).sum() + rest * (rest.log() - rest_q.log())).float()
    return total


_CRITICS: dict[Path, tuple] = {}


def values_of(folder: Path, trajectory):
    """Of the positions that predict what carries loss; and the critic's parameters by name."""
    if folder not in _CRITICS:
        model = reference_model(folder)
        score = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"])
        _CRITICS[folder] = (model, score)
    model, score = _CRITICS[folder]
    hidden = model.model(torch.from_numpy(trajectory.tokens_T)[None]).last_hidden_state[0, :-1]
    mask = torch.from_numpy(trajectory.loss_mask_T[1:])
    named = [(name, p) for name, p in model.named_parameters() if name != "lm_head.weight"]
    return (hidden @ score[0])[mask], [*named, ("score.weight", score)]


def gae_by_hand(said, rewards, values, actor, batch):
    advantages, returns = [], []
    turns = actor.get("turns", {"reward_coefficient": 1.0, "coefficient": 0.0})
    for (logp, ref, _, _), reward, (value, _), trajectory in zip(
        said, rewards, values, batch.trajectories, strict=True
    ):
        r = -actor["kl"]["coefficient"] * (logp - ref).detach().double().numpy()
        r[-1] += turns["reward_coefficient"] * reward
        for end, of_turn in trajectory.turn_rewards:
            before = int(trajectory.loss_mask_T[:end].sum())  # tokens with loss
            if before:
                r[before - 1] += turns["coefficient"] * of_turn
        v = value.detach().double().numpy()
        following, ahead, found = 0.0, 0.0, np.zeros(len(v))
        for t in reversed(range(len(v))):
            ahead = (
                r[t]
                + CRITIC["discount"] * following
                - v[t]
                + CRITIC["discount"] * CRITIC["gae_lambda"] * ahead
            )
            following, found[t] = v[t], ahead
        advantages.append(found)
        returns.append((found + v).astype(np.float32))
    every = np.concatenate(advantages)
    return [(a - every.mean()) / every.std() for a in advantages], returns


def group_advantages_by_hand(said, rewards, actor):
    rewards = np.array(rewards)
    if actor["kl"]["where"] == "reward":
        gaps = [(logp - ref).detach().double().numpy() for logp, ref, _, _ in said]
        rewards = rewards - actor["kl"]["coefficient"] * np.array([(gap**2 / 2).sum() for gap in gaps])
    pairs = rewards.reshape(-1, 2)
    found = ((pairs - pairs.mean(1, keepdims=True)) / (pairs.std(1, ddof=1, keepdims=True) + 1e-6)).flatten()
    return [np.full(len(logp), a) for (logp, *_), a in zip(said, found, strict=True)]


def turns_by_hand(advantages, settings, batch):
    """DeepSeekMath, 4.1.3, one token after the other."""
    found = []
    for i, (advantage, trajectory) in enumerate(zip(advantages, batch.trajectories, strict=True)):
        mates = [t for t, g in zip(batch.trajectories, batch.group_N, strict=True) if g == batch.group_N[i]]
        every = np.array([reward for mate in mates for _, reward in mate.turn_rewards])
        of_tokens = []
        for at in np.flatnonzero(trajectory.loss_mask_T):
            following = [reward for end, reward in trajectory.turn_rewards if end > at]
            scaled = [(reward - every.mean()) / (every.std(ddof=1) + 1e-6) for reward in following]
            of_tokens.append(sum(r * settings["discount"] ** k for k, r in enumerate(scaled)))
        found.append(
            settings["reward_coefficient"] * advantage + settings["coefficient"] * np.array(of_tokens)
        )
    return found


# ---- tests


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def by_hand(paths):
    return {name: expected(paths, case, batch_with_tools()) for name, case in cases(paths).items()}


@pytest.fixture(scope="module")
def results(paths, request):
    """By layout: what every rank has."""
    jobs = {}
    for layout in chosen(request, "layout"):
        parallel = LAYOUTS[layout]
        configs = {name: config_of(paths, parallel, case) for name, case in cases(paths).items()}
        world_size = next(iter(configs.values())).actor.parallel.world_size
        jobs[layout] = Job(world_size, gradients_of, (configs, batch_with_tools()))
    return run_jobs(jobs)


@pytest.mark.parametrize("layout", shortened(LAYOUTS, KEPT))
def test_gradients_with_other_models_are_those_worked_out_by_hand(results, by_hand, layout: str):
    ranks = results[layout]
    for name, (gradients, of_critic, metrics) in by_hand.items():
        _, found, found_of_critic = ranks[0][name]
        compare(found, gradients, name)
        assert (found_of_critic is None) == (of_critic is None)
        if of_critic is not None:
            compare(found_of_critic, of_critic, f"{name}: critic")
        [measured] = [rank[name][0] for rank in ranks if rank[name][0] is not None]
        for tag, value in metrics.items():
            assert measured[tag] == pytest.approx(value, rel=1e-4)
    (first, second, third), average = ranks[0]["average"]
    assert any(np.abs(third[name] - first[name]).max() > 1e-6 for name in first)
    for name, value in average.items():
        expected = DECAY * (DECAY * first[name] + (1 - DECAY) * second[name]) + (1 - DECAY) * third[name]
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7, err_msg=name)


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], told: str):
    assert found.keys() == expected.keys(), told
    for tensor, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(
            found[tensor] / scale, value / scale, atol=1e-4, err_msg=f"{told}: {tensor}"
        )
