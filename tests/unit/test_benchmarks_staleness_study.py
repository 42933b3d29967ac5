"""The staleness study: its sampler, its lag, and its training step against independent arithmetic."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.staleness_study.methods import (
    ETAS,
    METHODS,
    POSITIVES,
    REFERENCE,
    SAME_WHEN_FRESH,
    UNBOUNDED,
    cells,
    config_of,
    sampled_from,
)
from benchmarks.staleness_study.report import (
    Interval,
    Results,
    at_best_rate,
    best_rates_table,
    correlations_table,
    coverage,
    fill_in,
    final,
    leads_table,
    levels_table,
    rank_correlation,
)
from benchmarks.staleness_study.sampler import Sampler, rounded_to_float8
from benchmarks.staleness_study.study import Inputs, Run, Setting, narrow_policy
from benchmarks.staleness_study.trainer import Trainer
from slipstream.backend.batch.train_batch import StalenessViolation
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, prompt_text

SETTING = Setting("test", lr=1e-3, steps=3, eval_every=3, held_out=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    """Random weights: answers are noise of all lengths, and differ between neighbouring versions."""
    tokenizer = build_tokenizer()
    warm = narrow_policy(tokenizer, seed=3).eval()
    return Inputs(3, warm, tokenizer, task.train_set(3, 40), task.held_out_set(3, SETTING.held_out))


def rewarded(batch):
    """``batch`` with rewards that differ within each group, which noise would hardly earn."""
    return replace(
        batch,
        trajectories=tuple(
            replace(one, reward=float(n % 3 == 0)) for n, one in enumerate(batch.trajectories)
        ),
    )


def reference_logp(policy, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits_TV = policy(torch.tensor([prompt + answer])).logits[0]
    logp_TV = logits_TV.double().log_softmax(-1)
    return logp_TV[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]


# ---- the sampler


def test_logprobs_of_samples_are_those_of_transformers(inputs):
    problems = task.held_out_set(1, 12)
    prompts = [inputs.tokenizer(prompt_text(problem.prompt))["input_ids"] for problem in problems]
    assert len({len(prompt) for prompt in prompts}) > 3
    answers = Sampler(inputs.warm).sample(prompts, torch.Generator().manual_seed(0), longest=40)
    assert {answer.ended for answer in answers} == {True, False}
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            expected = reference_logp(inputs.warm, prompt, answer.tokens)
        np.testing.assert_allclose(answer.logps, expected, atol=1e-4)


def test_greedy_answers_are_those_of_transformers(inputs):
    problems = task.held_out_set(2, 8)
    prompts = [inputs.tokenizer(prompt_text(problem.prompt))["input_ids"] for problem in problems]
    for prompt, answer in zip(prompts, Sampler(inputs.warm).greedy(prompts, longest=12), strict=True):
        expected = inputs.warm.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert answer.tokens == expected[0, len(prompt) :].tolist()


def test_samples_have_the_frequencies_of_the_policy(inputs):
    prompt = inputs.tokenizer(prompt_text("a1b2"))["input_ids"]
    answers = Sampler(inputs.warm).sample([prompt] * 4000, torch.Generator().manual_seed(0), longest=1)
    counts = np.bincount([answer.tokens[0] for answer in answers], minlength=48)
    with torch.no_grad():
        p_V = inputs.warm(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    # 48 symbols: none further from its expectation than 5 standard errors.
    assert (np.abs(counts / 4000 - p_V) <= 5 * np.sqrt(p_V / 4000) + 1e-3).all()


def test_a_sampler_keeps_the_weights_it_was_made_with(inputs):
    policy = copy.deepcopy(inputs.warm)
    sampler = Sampler(policy)
    prompt = inputs.tokenizer(prompt_text("a1b2"))["input_ids"]
    before = sampler.greedy([prompt], longest=5)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.normal_()
    assert sampler.greedy([prompt], longest=5) == before


def test_float8_is_the_nearest_value_of_e4m3_under_a_scale_for_each_row():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = values[values.isfinite()]
    for row, rounded in zip(x.double(), rounded_to_float8(x).double(), strict=True):
        scale = row.abs().max() / 448
        nearest = (row[:, None] / scale - values).abs().min(dim=1).values
        torch.testing.assert_close((row - rounded).abs() / scale, nearest, atol=1e-4, rtol=1e-4)


def test_an_engine_that_rounds_more_is_further_from_transformers(inputs):
    prompts = [inputs.ids(problem) for problem in task.held_out_set(1, 24)]
    gaps = []
    for precision in ("float32", "bfloat16", "float8"):
        sampler = Sampler(inputs.warm, precision)
        answers = sampler.sample(prompts, torch.Generator().manual_seed(0), longest=20)
        with torch.no_grad():
            differences = [
                torch.tensor(answer.logps) - reference_logp(inputs.warm, prompt, answer.tokens)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        gaps.append(torch.cat(differences).abs().mean().item())
    assert 10 * gaps[0] < gaps[1] < gaps[2] < 0.2


# ---- lag


def test_the_lag_is_the_bound_after_the_first_steps():
    assert [sampled_from(step, 0) for step in range(4)] == [0, 1, 2, 3]
    assert [step - sampled_from(step, 3) for step in range(8)] == [0, 1, 2, 3, 3, 3, 3, 3]


def test_without_a_bound_the_lag_grows_to_half_of_the_steps():
    assert [sampled_from(step, UNBOUNDED) for step in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert [step - sampled_from(step, UNBOUNDED) for step in range(7)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("eta", [2, pytest.param(UNBOUNDED, marks=pytest.mark.slow)])
def test_behaviour_logprobs_are_those_of_the_version_that_the_lag_says(inputs, eta):
    run = Run(SETTING, "naive", eta, inputs)
    snapshots = [copy.deepcopy(inputs.warm)]
    for step in range(4):
        batch = run.batch(step)
        version = sampled_from(step, eta)
        for trajectory in batch.trajectories[:3]:
            asked = trajectory.loss_mask_T
            assert set(trajectory.versions_T[asked]) == {version}
            tokens = trajectory.tokens_T.tolist()
            prompt = len(tokens) - int(asked.sum())
            with torch.no_grad():
                expected = reference_logp(snapshots[version], tokens[:prompt], tokens[prompt:])
            np.testing.assert_allclose(trajectory.logprobs_T[asked], expected, atol=1e-4)
        run.trainer.train(rewarded(batch), max_lag=step - version)
        run.keep(step + 1)
        snapshots.append(copy.deepcopy(run.trainer.policy))


def test_uniform_lags_are_those_of_groups_and_reach_from_0_to_the_bound(inputs):
    run = Run(replace(SETTING, lag="uniform"), "naive", 3, inputs)
    lags = set()
    for step in range(8):
        batch = run.batch(step)
        by_group = [set() for _ in range(8)]
        for group, trajectory in zip(batch.group_N, batch.trajectories, strict=True):
            by_group[group] |= set(trajectory.versions_T[trajectory.loss_mask_T])
        assert all(len(versions) == 1 for versions in by_group)
        lags |= {step - version for versions in by_group for version in versions}
        run.trainer.version += 1
        run.keep(step + 1)
    assert lags == {0, 1, 2, 3}


def test_a_batch_that_is_too_old_is_refused(inputs):
    run = Run(SETTING, "naive", 2, inputs)
    batch = replace(run.batch(0), version=3)
    with pytest.raises(StalenessViolation):
        run.trainer.train(batch, max_lag=2)


# ---- the training step


def plain_step(policy, batch, *, decoupled: bool, lr: float, moments, step: int) -> None:
    """A decoupled or naive PPO step on one mini-batch, written out in float64: a row at a time, AdamW and
    clipping by their formulas, with the recipe's numbers."""
    reward = torch.tensor([one.reward for one in batch.trajectories], dtype=torch.float64)
    group = torch.from_numpy(batch.group_N)
    losses, tokens = [], 0
    for n, trajectory in enumerate(batch.trajectories):
        siblings = reward[group == group[n]]
        advantage = (reward[n] - siblings.mean()) / (siblings.std() + 1e-6)
        mask = trajectory.loss_mask_T
        prompt = int((~mask).sum())
        ids = trajectory.tokens_T.tolist()
        logp = reference_logp(policy, ids[:prompt], ids[prompt:])
        behaviour = torch.from_numpy(trajectory.logprobs_T[mask]).double()
        old = logp.detach() if decoupled else behaviour
        weight = (logp.detach() - behaviour).exp().clamp(max=5.0) if decoupled else 1.0
        ratio = (logp - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        losses.append((-weight * surrogate).sum())
        tokens += len(logp)
    gradients = torch.autograd.grad(sum(losses) / tokens, list(policy.parameters()))
    norm = torch.sqrt(sum((one**2).sum() for one in gradients))
    for weight, gradient, (first, second) in zip(policy.parameters(), gradients, moments, strict=True):
        gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
        first.mul_(0.9).add_(0.1 * gradient)
        second.mul_(0.95).add_(0.05 * gradient**2)
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        with torch.no_grad():
            weight.sub_(lr * moved)


@pytest.mark.parametrize(
    ("method", "decoupled"), [pytest.param("naive", False, marks=pytest.mark.slow), ("decoupled", True)]
)
def test_a_training_step_is_the_one_written_out(inputs, method, decoupled):
    actor = config_of(method, 1e-3).actor.model_copy(update={"minibatches": 1})
    run = Run(SETTING, method, 2, inputs)
    run.trainer = Trainer(copy.deepcopy(inputs.warm), actor, seed=3)
    plain = copy.deepcopy(inputs.warm).double()
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in plain.parameters()]
    for step in range(2):
        batch = rewarded(run.batch(step))
        run.trainer.train(batch, max_lag=2)
        lr = 1e-3 * min(1.0, (step + 1) / 3)
        plain_step(plain, batch, decoupled=decoupled, lr=lr, moments=moments, step=step + 1)
    before = torch.cat([one.flatten() for one in inputs.warm.parameters()]).double()
    found = torch.cat([one.flatten() for one in run.trainer.policy.parameters()]).double() - before
    expected = torch.cat([one.flatten() for one in plain.parameters()]) - before
    # Adam divides by the root of tiny second moments: single entries of no gradient are float32 noise.
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_methods_that_are_one_at_lag_0_make_the_same_step(inputs):
    found = {}
    for method in sorted(SAME_WHEN_FRESH):
        run = Run(SETTING, method, 0, inputs)
        run.trainer.train(rewarded(run.batch(0)), max_lag=0)
        found[method] = torch.cat([one.flatten() for one in run.trainer.policy.parameters()])
    expected = found[REFERENCE].detach()
    for method, weights in found.items():
        np.testing.assert_allclose(weights.detach(), expected, atol=3e-5, err_msg=method)


def test_the_step_reports_how_far_pi_old_is_from_mu(inputs):
    run = Run(SETTING, "decoupled", 2, inputs)
    fresh = run.trainer.train(rewarded(run.batch(0)), max_lag=0)
    stale = run.trainer.train(rewarded(run.batch(1)), max_lag=1)
    assert fresh.gap < 1e-5 < stale.gap
    assert fresh.ess == pytest.approx(1, abs=1e-6)
    assert 0 < stale.ess < 1
    assert stale.kl > 0
    assert len(stale.grad_norms) == 4


def test_the_control_learns_nothing_from_negative_advantages(inputs):
    both, positives = (Run(SETTING, method, 0, inputs).trainer for method in (REFERENCE, POSITIVES))
    batch = rewarded(Run(SETTING, REFERENCE, 0, inputs).batch(0))
    expected_N, found_N = both._advantages(batch), positives._advantages(batch)
    assert expected_N.min() < 0 < expected_N.max()
    torch.testing.assert_close(found_N, torch.where(expected_N > 0, expected_N, 0.0))


@pytest.mark.parametrize(
    ("engine", "method", "dropped"),
    [
        ("float32", "negative", False),
        ("bfloat16", "negative", True),
        ("bfloat16", "negative_relative", False),
    ],
)
def test_a_fixed_threshold_drops_fresh_failures_of_an_engine_that_rounds(inputs, engine, method, dropped):
    run = Run(replace(SETTING, engine=engine), method, 0, inputs)
    run.trainer.train(rewarded(run.batch(0)), max_lag=0)  # which measures the mismatch
    run.keep(1)
    report = run.trainer.train(rewarded(run.batch(1)), max_lag=0)
    assert report.first_failures == 10  # two thirds of the 16 trajectories of a mini-batch
    assert (report.first_dropped > 2) is dropped


# ---- cells, report


def test_every_method_is_a_valid_recipe_that_changes_the_actor_alone():
    reference = config_of(REFERENCE, 1e-4)
    for method in METHODS:
        config = config_of(method, 1e-4)
        assert config.model_copy(update={"actor": reference.actor}) == reference
        assert (config.actor == reference.actor) == (method in (REFERENCE, POSITIVES))


def test_every_cell_is_run_once():
    chosen = list(cells(("naive", "decoupled", "m2po"), ETAS))
    assert len(chosen) == len(set(chosen)) == 3 * len(ETAS) - 1
    assert ("naive", 0) not in chosen
    assert ("m2po", 0) in chosen


def test_a_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    ranks = [1.0, 2.5, 2.5, 4.0], [1.0, 2.0, 3.0, 4.0]
    assert rank_correlation([0, 5, 5, 7], [1, 2, 3, 4]) == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_an_interval_is_students():
    found = Interval.of([1.0, 2.0, 4.0])
    assert (found.mean, found.n) == (pytest.approx(7 / 3), 3)
    assert found.half == pytest.approx(4.303 * np.std([1, 2, 4], ddof=1) / np.sqrt(3))


def record(method: str, eta: int, seed: int, accuracy: float) -> dict:
    return {"setting": "s", "method": method, "eta": eta, "seed": seed, "accuracy": [[9, accuracy]]}


def test_differences_are_paired_by_seed():
    results = Results(
        [record("decoupled", 0, seed, 0.5 + 0.1 * seed) for seed in range(3)]
        + [record("naive", 8, seed, 0.4 + 0.1 * seed) for seed in range(3)]
        + [record("decoupled", 8, seed, 0.3 + 0.1 * seed) for seed in range(3)],
        "s",
        seeds=(0, 1, 2),
    )
    change, lead = results.change(final, "naive", 8), results.lead(final, "naive", 8)
    assert (change.mean, change.half) == (pytest.approx(-10), pytest.approx(0))
    assert (lead.mean, lead.half) == (pytest.approx(10), pytest.approx(0))
    # Fresh, `naive` is `decoupled`. Nothing has run at the other etas.
    assert levels_table(results, final).splitlines() == [
        "| eta | 0 | 8 |",
        "|---|---|---|",
        "| `naive` | 60.0 ± 24.8 | 50.0 ± 24.8 |",
        "| `decoupled` | 60.0 ± 24.8 | 40.0 ± 24.8 |",
    ]


def test_a_lead_is_over_the_method_that_is_asked_for():
    results = Results(
        [record("positives", 8, seed, 0.5) for seed in range(2)]
        + [record("decoupled", 8, seed, 0.4 + 0.01 * seed) for seed in range(2)],
        "s",
        seeds=(0, 1),
    )
    assert leads_table(results, final).splitlines()[2:] == ["| `positives` | **+9.5 ± 6.4** |"]
    assert leads_table(results, final, "positives").splitlines()[2:] == ["| `decoupled` | **-9.5 ± 6.4** |"]


def test_the_best_rate_of_a_seed_is_chosen_by_the_other_seeds():
    accuracies = {1e-4: (0.1, 0.6, 0.6), 2e-4: (0.9, 0.5, 0.5)}
    by_rate = {
        rate: Results([record("naive", 8, seed, value) for seed, value in enumerate(values)], "s", (0, 1, 2))
        for rate, values in accuracies.items()
    }
    # Seeds 1 and 2 prefer 1e-4 for seed 0. Seed 0 prefers 2e-4 so much that each of the others gets it.
    assert at_best_rate(by_rate, "naive", 8) == (2e-4, {0: 10.0, 1: 50.0, 2: 50.0})
    assert "(2)" in best_rates_table(by_rate, (8,))
    by_rate[4e-4] = Results([], "s", (0, 1, 2))
    assert at_best_rate(by_rate, "naive", 8) is None


def test_correlations_are_of_cell_means_and_their_intervals_of_resampled_seeds():
    def run(eta: int, seed: int, accuracy: float, kl: float) -> dict:
        return record("naive", eta, seed, accuracy) | {"kl": kl}

    # Accuracy falls with lr * eta in every seed. Eta alone orders the cells (1e-4, 8) and (4e-4, 4) wrongly.
    by_rate = {
        lr: Results(
            [
                run(eta, seed, 1 - 100 * lr * eta + 1e-3 * seed, lr * eta)
                for eta in (4, 8)
                for seed in range(3)
            ],
            "s",
            (0, 1, 2),
        )
        for lr in (1e-4, 4e-4)
    }
    table = correlations_table(by_rate, ("naive",)).splitlines()
    assert table[2] == (
        "| `naive` | 4 | -0.45 (-0.45 to -0.45) | -1.00 (-1.00 to -1.00) | -1.00 (-1.00 to -1.00) "
        "| -0.55 (-0.55 to -0.55) |"
    )


def test_coverage_names_the_cells_that_lack_runs():
    plan = [(replace(SETTING, name="s"), [("naive", 8), ("dppo", 8), ("cispo", UNBOUNDED)])]
    records = [record("naive", 8, seed, 0.5) | {"cpu_s": 10.0} for seed in range(2)]
    records.append(record("dppo", 8, 0, 0.5) | {"cpu_s": 13.0})
    lines = coverage(plan, (0, 1), records).splitlines()
    assert lines[0].startswith("3 of the plan's 6 runs are done. They took 33 s of CPU, 11.0 s each;")
    assert lines[-2:] == ["- s, eta 8: `dppo`", "- s, eta unbounded: `cispo`"]


def test_a_cell_without_all_seeds_does_not_count():
    results = Results([record("decoupled", 0, seed, 0.5) for seed in range(2)], "s", seeds=(0, 1, 2))
    assert results.methods() == []
    assert results.interval(final, "decoupled", 0) is None


def test_tables_are_written_between_their_marks():
    assert fill_in("a <!-- t --> old <!-- end --> z", {"t": "new"}) == "a <!-- t -->\n\nnew\n\n<!-- end --> z"
    with pytest.raises(ValueError, match="no '<!-- u -->'"):
        fill_in("a", {"u": "new"})
