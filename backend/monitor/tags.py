"""Every tag a run may log, with its unit and its meaning; ``docs/metrics.md`` shows the same to users."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tag:
    """What one tag stands for.

    `unit` is what a value of 1 means. `kind` decides what is logged under the tag: a number, integers to be
    counted into a histogram, or markdown.
    """

    unit: str
    meaning: str
    kind: Literal["scalar", "histogram", "text"] = "scalar"

    @property
    def description(self) -> str:
        """One line of markdown: meaning and unit."""
        return f"{self.meaning} [{self.unit}]"


TAGS: dict[str, Tag] = {
    "run/recipe": Tag("YAML", "The recipe of the run with every default filled in.", "text"),
    # reward
    "reward/mean": Tag("reward", "Mean reward of the trajectories trained in this step."),
    "reward/std": Tag(
        "reward", "Standard deviation of the reward over the trajectories trained in this step."
    ),
    "reward/turn_mean": Tag("reward", "Mean reward of their turns, where a workflow gives any."),
    # eval
    "eval/accuracy": Tag(
        "fraction",
        "Share of held-out prompts answered correctly by greedy decoding; step 0 is before training. "
        "While training goes on, a newer version may answer some of them.",
    ),
    "eval/response_length": Tag("tokens", "Mean length of the held-out answers."),
    # staleness
    "staleness/head_max": Tag(
        "versions",
        "Largest head lag in the batch; never above `rollout.max_head_offpolicyness`.",
    ),
    "staleness/head_mean": Tag("versions", "Mean head lag of the trajectories in the batch."),
    "staleness/token_mean": Tag("versions", "Mean lag of the trained tokens."),
    "staleness/token_lag": Tag("tokens per lag", "How many trained tokens have which lag.", "histogram"),
    "staleness/logprob_abs_mean": Tag(
        "nats",
        "Mean distance of trainer and behaviour log-prob over tokens of lag > 0: staleness plus mismatch.",
    ),
    # rollout
    "rollout/response_length": Tag("tokens", "Mean response length in the batch."),
    "rollout/response_length_max": Tag("tokens", "Longest response in the batch."),
    "rollout/response_lengths": Tag(
        "trajectories per length",
        "How many trajectories of the batch have which response length.",
        "histogram",
    ),
    "rollout/multi_version_fraction": Tag(
        "fraction", "Share of trajectories in the batch whose tokens come from more than one policy version."
    ),
    "rollout/truncated_fraction": Tag(
        "fraction", "Share of trajectories in the batch that were cut off by the token limit."
    ),
    "rollout/groups_admitted": Tag("groups, whole run", "Groups that were allowed to start."),
    "rollout/groups_trained": Tag("groups, whole run", "Groups that a training step has consumed."),
    "rollout/groups_filtered": Tag(
        "groups, whole run",
        "Finished groups that the group filter kept from training, e.g. all rewards equal.",
    ),
    "rollout/groups_expired": Tag(
        "groups, whole run", "Finished groups given up because their lag would break the bound."
    ),
    "rollout/groups_failed": Tag(
        "groups, whole run", "Groups given up because an episode failed in every one of its attempts."
    ),
    "rollout/groups_in_flight": Tag("groups, now", "Admitted groups still being generated or judged."),
    "rollout/requests_running": Tag("requests, now", "Requests that engines are answering."),
    "rollout/requests_limit": Tag(
        "requests, now",
        "How many are allowed: `rollout.max_concurrent`, or what the engines' KV memory has room for.",
    ),
    "rollout/groups_generating": Tag("groups, now", "Groups of which an answer is being generated."),
    "rollout/groups_judging": Tag("groups, now", "Groups that wait for nothing but rewards."),
    "rollout/groups_ready": Tag("groups, now", "Finished groups that wait for a training step."),
    "rollout/episode_retries": Tag(
        "episodes, whole run", "Attempts at an episode that failed and were made again."
    ),
    "rollout/retractions": Tag(
        "requests, whole run",
        "Running requests whose KV cache was dropped and computed again under newer weights.",
    ),
    "rollout/requests_resent": Tag(
        "requests, whole run",
        "Requests sent again because their engine was lost or had given them up.",
    ),
    # lost
    "lost/filtered": Tag("groups, whole run", "Groups that the group filter kept from training."),
    "lost/failed": Tag(
        "groups, whole run", "Groups of which an episode failed in every one of its attempts."
    ),
    "lost/stale": Tag(
        "groups, whole run",
        "Groups given up because they were outside the bound (`on_stale: drop`, or no token was left).",
    ),
    "lost/requeued": Tag(
        "groups, whole run",
        "Groups outside the bound whose prompts are generated again (`on_stale: requeue`).",
    ),
    "lost/surplus": Tag(
        "groups, whole run", "Over-sampled groups that were not needed before they became too old."
    ),
    "lost/tokens_masked": Tag(
        "tokens, this process", "Tokens of trained trajectories left out as too old (`on_stale: mask`)."
    ),
    "lost/filtered_lengths": Tag(
        "trajectories per length", "Lengths of the trajectories of filtered groups, this step.", "histogram"
    ),
    "lost/failed_lengths": Tag(
        "trajectories per length", "Lengths of the finished trajectories of failed groups.", "histogram"
    ),
    "lost/stale_lengths": Tag(
        "trajectories per length", "Lengths of the trajectories of groups given up as stale.", "histogram"
    ),
    "lost/requeued_lengths": Tag(
        "trajectories per length", "Lengths of the trajectories of requeued groups.", "histogram"
    ),
    "lost/surplus_lengths": Tag(
        "trajectories per length", "Lengths of the trajectories of finished surplus groups.", "histogram"
    ),
    # train
    "train/step": Tag("steps", "Training steps behind the published version; a restart repeats some."),
    "train/loss": Tag("1", "Policy loss, averaged by `actor.averaging`; its size says little, its jumps do."),
    "train/grad_norm": Tag("1", "Global gradient norm before clipping."),
    "train/lr": Tag("1", "Learning rate of this step."),
    "train/clip_fraction": Tag(
        "fraction",
        "Share of trained tokens on which the bound of the objective acts: their gradient is removed, or "
        "(cispo, aipo) their weight capped; 0 for sapo and reinforce.",
    ),
    "train/ratio_max": Tag("1", "Largest ratio r of the objective over the trained tokens."),
    "train/approx_kl": Tag(
        "nats", "Token mean of r - 1 - log r: how far the policy is from the one that r is taken to."
    ),
    "train/behaviour_weight_mean": Tag(
        "1",
        "Token mean of the behaviour weight before caps and masks: proximal / behaviour, or "
        "current / behaviour where there is no proximal policy; near 1 when all is well.",
    ),
    "train/behaviour_weight_capped_fraction": Tag(
        "fraction", "Share of trained tokens whose behaviour weight the cap has lowered."
    ),
    "train/masked_token_fraction": Tag(
        "fraction", "Share of trained tokens that `actor.correction.token` has dropped."
    ),
    "train/masked_sequence_fraction": Tag(
        "fraction", "Share of trained tokens in sequences that `actor.correction.sequence` has dropped."
    ),
    "train/masked_negative_fraction": Tag(
        "fraction", "Share of trained tokens in sequences that `actor.correction.negative` has dropped."
    ),
    "train/ess": Tag(
        "fraction",
        "Effective sample size of the behaviour weights w over N tokens: (sum w)^2 / (N sum w^2); at most 1.",
    ),
    "train/entropy": Tag("nats", "Token mean of the entropy of the current policy."),
    "train/reference_kl": Tag(
        "nats", "Estimated KL divergence of the policy from the reference model, token mean; with `actor.kl`."
    ),
    "train/teacher_gap": Tag(
        "nats", "Token mean of log pi_teacher - log pi; nearer 0: nearer the teacher. With `actor.teacher`."
    ),
    "train/preference_accuracy": Tag(
        "fraction", "Share of pairs whose chosen answer has the larger value; of a reward model."
    ),
    "train/tokens": Tag("tokens", "Tokens that carried loss in this step."),
    "train/tflop": Tag(
        "TFLOP",
        "What the policy's model asks for in this step: forward, backward and recomputed log-probs.",
    ),
    "train/skipped_updates": Tag(
        "updates", "Optimizer updates of this step that were left out because a gradient was not finite."
    ),
    "train/zero_advantage_fraction": Tag(
        "fraction", "Share of trained tokens with advantage 0: from groups whose rewards are all equal."
    ),
    # critic
    "critic/loss": Tag(
        "1", "Half the squared distance of value and return, token mean, with the value clip."
    ),
    "critic/explained_variance": Tag(
        "fraction",
        "Share of the returns' variance that the values of the step's beginning foresee; 1: all, below 0: "
        "worse than their mean.",
    ),
    "critic/value_mean": Tag("reward", "Token mean of the values that the step began with."),
    "critic/return_mean": Tag("reward", "Token mean of what the values should have been."),
    "critic/clip_fraction": Tag("fraction", "Share of tokens whose loss is that of the clipped value."),
    "critic/grad_norm": Tag("1", "Global gradient norm of the critic before clipping."),
    "critic/lr": Tag("1", "Learning rate of the critic in this step."),
    # packing
    "packing/fill": Tag(
        "fraction", "Tokens / (micro-batches * `actor.microbatch_tokens`), over all data-parallel ranks."
    ),
    "packing/imbalance": Tag(
        "1",
        "FLOPs of the data-parallel rank with the most / mean over ranks, mini-batch by mini-batch: how much "
        "longer than needed all of them take.",
    ),
    # mismatch
    "mismatch/logprob_abs_mean": Tag(
        "nats",
        "Mean distance of trainer and engine log-prob over tokens of lag 0: equal weights, two programs.",
    ),
    "mismatch/logprob_abs_max": Tag(
        "nats", "Largest distance of trainer and engine log-prob over tokens of lag 0."
    ),
    "mismatch/tokens": Tag(
        "tokens", "Tokens of lag 0 in this step: what the two figures above are based on."
    ),
    # perf
    "perf/checkpoint_stall_s": Tag("s", "How long training waited for the last checkpoint to be copied."),
    "perf/step_s": Tag("s", "From the end of the step before to the end of this one."),
    "perf/train_s": Tag("s", "Computing this step on the trainer: log-probs, gradients, optimizer."),
    "perf/generate_tokens_per_s": Tag("tokens/s", "Response tokens generated by all engines together."),
    "perf/train_tokens_per_s": Tag("tokens/s", "Tokens that carried loss per second of `perf/train_s`."),
    "perf/train_tflops": Tag(
        "TFLOP/s",
        "`train/tflop` / `perf/train_s`, all trainer ranks together. Over their devices' peak: MFU.",
    ),
    "perf/weight_update_s": Tag(
        "s", "Publishing a version: from its start until the last engine is running again."
    ),
    "perf/weight_update_stall_s": Tag("s", "How long generation stood still for publishing a version."),
    "perf/weight_bytes": Tag("bytes", "Size of the weights sent to one engine."),
    "perf/weight_gb_per_s": Tag("GB/s", "`perf/weight_bytes` / `perf/weight_update_s` / 10^9."),
    "perf/trainer_wait_s": Tag("s", "How long the trainer waited for its batch in this step."),
    "perf/trainer_wait_fraction": Tag("fraction", "`perf/trainer_wait_s` / `perf/step_s`."),
    "perf/engine_restarts": Tag("engines, whole run", "Engines that were lost and started again."),
}
