"""Every tag that a run may log, with its unit and meaning: the text that `slipstream metrics` prints.

To add a metric, give it a `Tag` here, and return its value under this tag where it is measured: on a rank in
`TrainerRank._train` or `StepStatistics`, on the driver in `Recorder.step`, or as a source of `SideMetrics`.
`MetricsLog.log` refuses tags without an entry; it writes all others to `metrics.jsonl` and to TensorBoard,
which takes the description from here.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tag:
    """Unit, meaning and kind of one metric.

    `kind` says what is logged under the tag: a number, integers that are counted into a histogram, markdown,
    or numbers by name. Each of the latter is logged by itself, with its name in place of `parts` in the tag.
    """

    unit: str
    meaning: str
    kind: Literal["scalar", "histogram", "text", "parts"] = "scalar"

    @property
    def description(self) -> str:
        """One line of markdown for TensorBoard."""
        return f"{self.meaning} [{self.unit}]"


_PROCESSES = {
    "driver": "the threads of the driver",
    "collectors": "the collectors, their judges and sandboxes",
    "engines": "the processes of all engines, also of the judge's",
    "trainer": "the trainer's ranks",
}
"""Groups of processes by name, and what their metrics say of them."""

_ON_GPUS = {group: who for group, who in _PROCESSES.items() if group in ("engines", "trainer")}

GROUPS: dict[str, str] = {
    "run": "The settings of the run, on TensorBoard's page *Text*.",
    "reward": "How well the policy does on the prompts that it trains on.",
    "episode": "Numbers that workflows record of their episodes (docs/metrics.md#metrics-of-your-own).",
    "eval": "How well the policy does on prompts that it never trains on.",
    "staleness": "How old the data is. The *lag* of a token is the number of policy updates between the "
    "version that sampled the token and the version that the training step starts from. The *head lag* of "
    "a trajectory is the largest lag of its tokens that carry loss.",
    "rollout": "What the engines generate, and where the groups are. At every step `admitted = trained + "
    "filtered + expired + failed + in_flight + ready`: no group disappears.",
    "lost": "Each way of losing work has a counter, and a histogram of the lengths that were lost: a "
    "policy that mostly loses long completions learns from a biased sample.",
    "live": "Turns of the users of a gateway (docs/live.md). A run without the section `live` logs none of "
    "them.",
    "train": "The optimization. *Current* is the policy that is being updated, *proximal* the policy that "
    "the training step started from, and *behaviour* the policy that sampled the token. The ratio r is "
    "current / proximal. Without a proximal policy, and for objectives that are defined by the behaviour "
    "policy, r is current / behaviour (docs/objectives.md). The *importance weight* is proximal / "
    "behaviour.",
    "advantage": "The terms of `actor.advantage`, before they are added up. The ratio of their absolute "
    "means says how much each of them steers.",
    "hook": "Metrics of hooks written for slime.",
    "batch": "Metrics of the classes in `actor.metrics` (docs/customization.md#metric).",
    "critic": "The value model of `estimator: gae`. As long as `critic/explained_variance` is 0 or less, "
    "advantages are hardly better than rewards: `critic.warmup_steps` trains the critic before the policy.",
    "packing": "How the trajectories of a step are packed into micro-batches. Every data-parallel rank has "
    "the same number of micro-batches, the smallest that suffices. A low `packing/fill` therefore comes "
    "from too few tokens for the number of ranks, or from lengths that do not fit together. "
    "`packing/imbalance` stays above 1 if one trajectory costs more than a rank's share of its mini-batch. "
    "FLOPs are those of the model's matrix products, attention included.",
    "mismatch": "How much trainer and engine differ with the same weights. Only tokens of lag 0 count, so "
    "that staleness has no influence; a step without such tokens has no value. Needs recomputed log-probs.",
    "perf": "Where the time goes.",
    "process": "What the processes of the run use on all nodes. A small process on each node samples it "
    "every ten seconds. CPU and memory come from `/proc`, and figures of GPUs from NVIDIA's driver if "
    "nvidia-ml-py is installed, as it is in the environment for GPUs. Gateways and Ray's own processes are "
    "not counted.",
}
"""Meaning of each group of tags, by the part of their names before the slash. Markdown."""

TAGS: dict[str, Tag] = {
    "run/recipe": Tag("YAML", "The recipe of the run, with all defaults filled in.", "text"),
    "run/episodes": Tag(
        "markdown",
        "The worst, the best and the stalest episode of a step, with reward and lag. They come from the "
        "episode log, at most once a minute.",
        "text",
    ),
    # reward
    "reward/mean": Tag("reward", "Mean reward of the trajectories in the batch."),
    "reward/std": Tag("reward", "Standard deviation of the rewards in the batch."),
    "reward/turn_mean": Tag(
        "reward", "Mean reward of the turns in the batch. Only with workflows that reward single turns."
    ),
    "reward/parts": Tag(
        "as the reward says",
        "`reward/NAME` for each further number of a reward that returns a mapping: its mean over the "
        "trajectories of the batch that have it. `reward/NAME/min` and `reward/NAME/max` are its extremes.",
        "parts",
    ),
    "reward/source_parts": Tag(
        "reward",
        "`reward/source_NAME` for each of several sources of prompts (`data.sources`): mean reward of its "
        "trajectories in the batch.",
        "parts",
    ),
    # episode
    "episode/parts": Tag(
        "as the workflow says",
        "`episode/NAME` for each number that a workflow records: its mean over the episodes of the batch "
        "that have it. `episode/NAME/min` and `episode/NAME/max` are its extremes.",
        "parts",
    ),
    # eval
    "eval/reward": Tag(
        "reward",
        "Mean reward of completions of the held-out prompts, of all sets together. Step 0 is the initial "
        "policy. During training, a newer version may generate some of the tokens.",
    ),
    "eval/accuracy": Tag(
        "fraction",
        "Fraction of the held-out prompts that are answered correctly: `eval/reward` of a reward that has "
        "`is_accuracy`. Only with such rewards.",
    ),
    "eval/reward_parts": Tag(
        "as the reward says",
        "`eval/reward_NAME` for each further number of a reward that returns a mapping: its mean in the "
        "evaluation. Also for each of several sets (`eval.sets`): the mean reward of the set.",
        "parts",
    ),
    "eval/episode_parts": Tag(
        "as the workflow says",
        "`eval/episode_NAME` for each number that a workflow records: its mean in the evaluation.",
        "parts",
    ),
    "eval/avg_at_parts": Tag(
        "reward",
        "`eval/avg_at_N` with N = `eval.n_samples_per_prompt` above 1: mean reward over N completions of "
        "each prompt, of all sets together. `eval/avg_at_N/NAME` is the same of one of several sets.",
        "parts",
    ),
    "eval/pass_at_parts": Tag(
        "fraction",
        "`eval/pass_at_K` for K = 1, 2, 4 and so on up to `eval.n_samples_per_prompt`, if there is more "
        "than one: probability that at least one of K completions of a prompt has a reward of 1 or more, "
        "estimated without bias. `eval/pass_at_K/NAME` is the same of one of several sets.",
        "parts",
    ),
    "eval/response_length": Tag("tokens", "Mean response length in the evaluation."),
    # staleness
    "staleness/head_max": Tag(
        "versions",
        "Largest head lag in the batch. Never larger than `rollout.max_head_offpolicyness`.",
    ),
    "staleness/head_mean": Tag("versions", "Mean head lag of the trajectories in the batch."),
    "staleness/token_mean": Tag("versions", "Mean lag of the tokens that carry loss."),
    "staleness/token_lag": Tag("tokens per lag", "Number of tokens that carry loss, by lag.", "histogram"),
    "staleness/logprob_abs_mean": Tag(
        "nats",
        "Mean absolute difference of proximal and behaviour log-prob over tokens with a lag above 0: the "
        "effect of staleness and mismatch together. Needs recomputed log-probs.",
    ),
    "staleness/kl": Tag(
        "nats",
        "KL(behaviour, proximal) per token, estimated by mean(w - 1 - log w) with w = proximal / behaviour: "
        "how far the policy has moved away from the one that sampled the batch. `actor.drift.kl` limits it. "
        "Needs recomputed log-probs.",
    ),
    # rollout
    "rollout/response_length": Tag("tokens", "Mean response length in the batch."),
    "rollout/response_length_max": Tag("tokens", "Largest response length in the batch."),
    "rollout/response_lengths": Tag(
        "trajectories per length", "Number of trajectories in the batch, by response length.", "histogram"
    ),
    "rollout/multi_version_fraction": Tag(
        "fraction",
        "Fraction of the trajectories in the batch with tokens of more than one policy version.",
    ),
    "rollout/truncated_fraction": Tag(
        "fraction", "Fraction of the trajectories in the batch that ended at the token limit."
    ),
    "rollout/source_parts": Tag(
        "trajectories",
        "`rollout/source_NAME` for each of several sources of prompts: number of its trajectories in the "
        "batch.",
        "parts",
    ),
    "rollout/groups_admitted": Tag("groups, whole run", "Number of groups that were admitted."),
    "rollout/groups_trained": Tag("groups, whole run", "Number of groups that training steps consumed."),
    "rollout/groups_filtered": Tag(
        "groups, whole run",
        "Number of finished groups that the group filter kept from training, for example because all "
        "rewards are equal.",
    ),
    "rollout/groups_expired": Tag(
        "groups, whole run",
        "Number of groups that were lost to the bound: the sum of `lost/stale`, `lost/requeued` and "
        "`lost/surplus`.",
    ),
    "rollout/groups_failed": Tag(
        "groups, whole run",
        "Number of groups that were lost because all attempts at one of their episodes failed.",
    ),
    "rollout/groups_in_flight": Tag("groups, now", "Number of admitted groups that are not finished."),
    "rollout/requests_running": Tag(
        "requests, now", "Number of requests of rollouts that engines are serving."
    ),
    "rollout/engines_serving": Tag(
        "engines, now",
        "Number of engines that serve. The others start, have failed, or wait for the current weights.",
    ),
    "rollout/requests_limit": Tag(
        "requests, now",
        "Largest permitted number of running requests: `rollout.max_concurrent`, or fewer if the KV memory "
        "of the engines holds fewer.",
    ),
    "rollout/groups_generating": Tag("groups, now", "Number of groups with a completion in progress."),
    "rollout/groups_judging": Tag("groups, now", "Number of groups that only wait for rewards."),
    "rollout/groups_ready": Tag("groups, now", "Number of finished groups that wait for a training step."),
    "rollout/episode_retries": Tag("episodes, this process", "Number of attempts at an episode that failed."),
    "rollout/retractions": Tag(
        "requests, this process",
        "Number of times that a request of a trained trajectory lost its KV cache, which was then computed "
        "again.",
    ),
    "rollout/requests_resent": Tag(
        "requests, this process",
        "Number of requests that were sent again because their engine was lost or had aborted them.",
    ),
    # lost
    "lost/filtered": Tag("groups, whole run", "Number of groups that the group filter kept from training."),
    "lost/failed": Tag(
        "groups, whole run",
        "Number of groups that were lost because all attempts at one of their episodes failed.",
    ),
    "lost/quarantined": Tag(
        "groups, whole run",
        "Number of groups that were given up because training steps with them ended the trainer.",
    ),
    "lost/stale": Tag(
        "groups, whole run",
        "Number of groups that were given up as too old: with `on_stale: drop`, or because none of their "
        "tokens was within the bound.",
    ),
    "lost/requeued": Tag(
        "groups, whole run",
        "Number of groups that were given up as too old and whose prompts were admitted again "
        "(`on_stale: requeue`).",
    ),
    "lost/surplus": Tag(
        "groups, whole run", "Number of over-sampled groups that became too old before a batch needed them."
    ),
    "lost/tokens_masked": Tag(
        "tokens, this process",
        "Number of tokens of trained trajectories that carried no loss because they were too old "
        "(`on_stale: mask`).",
    ),
    "lost/filtered_lengths": Tag(
        "trajectories per length",
        "Response lengths of the groups that were filtered since the previous step.",
        "histogram",
    ),
    "lost/failed_lengths": Tag(
        "trajectories per length",
        "Response lengths of the finished trajectories of the groups that failed since the previous step.",
        "histogram",
    ),
    "lost/quarantined_lengths": Tag(
        "trajectories per length",
        "Response lengths of the groups that were quarantined since the previous step.",
        "histogram",
    ),
    "lost/stale_lengths": Tag(
        "trajectories per length",
        "Response lengths of the groups that were given up as stale since the previous step.",
        "histogram",
    ),
    "lost/requeued_lengths": Tag(
        "trajectories per length",
        "Response lengths of the groups that were requeued since the previous step.",
        "histogram",
    ),
    "lost/surplus_lengths": Tag(
        "trajectories per length",
        "Response lengths of the finished trajectories of the surplus groups since the previous step.",
        "histogram",
    ),
    # live
    "live/requests_running": Tag("requests, now", "Number of requests of users that engines are serving."),
    "live/turns_waiting": Tag(
        "turns, now", "Number of turns of live users that still wait for what the user does next."
    ),
    "live/turns_unjudged": Tag("turns, now", "Number of turns that wait for their verdict."),
    "live/turns_ready": Tag("turns, now", "Number of judged turns that wait for a training step."),
    "live/oldest_waiting_s": Tag(
        "s, now",
        "Age of the oldest turn that still waits for what the user does next, from the end of its answer.",
    ),
    "live/oldest_unjudged_s": Tag("s, now", "Age of the oldest turn that waits for its verdict."),
    "live/oldest_ready_s": Tag("s, now", "Age of the oldest judged turn that waits for a training step."),
    "live/trained": Tag("turns, whole run", "Number of turns that training steps consumed."),
    "live/side": Tag(
        "turns, whole run",
        "Number of turns that are not part of the task, or whose sampling the trainer cannot reproduce.",
    ),
    "live/side_helpers": Tag(
        "turns, this process",
        "Number of side turns by which agents help themselves: titles, summaries, suggestions.",
    ),
    "live/side_sampling": Tag(
        "turns, this process",
        "Number of turns that are side turns only because of their sampling (`gateway.sampling`).",
    ),
    "live/filtered": Tag(
        "turns, whole run",
        "Number of turns with nothing to train: they have no sampled token, `live.train` is false, the last "
        "training step is done, the judge has neither a score nor a hint, or a teacher's scores alone train "
        "and the turn has none.",
    ),
    "live/expired": Tag(
        "turns, whole run", "Number of turns that were given up because all of their tokens were too old."
    ),
    "live/failed": Tag(
        "turns, whole run",
        "Number of turns whose tokens are incomplete or damaged, or with which training steps have ended the "
        "trainer.",
    ),
    "live/cancelled": Tag("turns, whole run", "Number of turns whose client has gone before the end."),
    "live/unpaired": Tag(
        "turns, whole run",
        "Number of turns whose next state was lost, because their clients rewrote what would tell.",
    ),
    "live/forgotten": Tag("turns, whole run", "Number of turns that were removed by request."),
    "live/verdicts": Tag("turns, this process", "Number of turns that judges have given a score."),
    "live/put_off": Tag(
        "attempts, this process",
        "Number of times that a turn was put off, because the judge had no score or every attempt failed.",
    ),
    "live/given_up": Tag(
        "turns, this process",
        "Number of turns that have failed because they waited longer than `judge.give_up_s` for their "
        "verdict.",
    ),
    "live/votes_tied": Tag(
        "questions, this process", "Number of times that two scores led in the votes on a turn."
    ),
    "live/votes_unparsable": Tag(
        "votes, this process", "Number of votes in which nothing could be read, or that were cut off."
    ),
    "live/votes_missing": Tag(
        "votes, this process", "Number of votes that have not come, because the request for them failed."
    ),
    "live/judge_outages": Tag(
        "outages, this process", "Number of times that judge processes had to be started again."
    ),
    "live/late_rewards": Tag(
        "rewards, this process", "Number of rewards of clients for turns that had ended already."
    ),
    "live/batch_turns": Tag("turns", "Number of turns in the batch."),
    "live/score_mean": Tag("reward", "Mean score of the turns in the batch."),
    "live/trained_age_s": Tag(
        "s", "Mean age of the turns in the batch, from the end of the answer until the batch was taken."
    ),
    "live/expired_lags": Tag(
        "turns per lag", "Number of turns that expired since the batch was taken, by lag.", "histogram"
    ),
    "live/expired_age_s": Tag("s", "Mean age of these turns."),
    "live/baseline": Tag(
        "reward", "Running mean of the scores. Scores of the next batch are compared with it."
    ),
    # train
    "train/step": Tag(
        "steps",
        "Number of training steps that led to the published version. A restart may repeat some of them.",
    ),
    "train/loss": Tag(
        "1",
        "Policy loss, averaged as `actor.averaging` says. Its value says little, but a sudden change says "
        "much.",
    ),
    "train/grad_norm": Tag("1", "Global gradient norm before clipping, mean over the updates of the step."),
    "train/lr": Tag("1", "Learning rate of the policy in this step."),
    "train/clip_fraction": Tag(
        "fraction",
        "Fraction of the tokens that carry loss on which the objective's bound acts: the bound removes their "
        "gradient, or caps their weight (cispo, aipo). Always 0 for sapo and reinforce.",
    ),
    "train/ratio_max": Tag("1", "Largest ratio r of the objective over the tokens that carry loss."),
    "train/approx_kl": Tag(
        "nats",
        "Token mean of r - 1 - log r, an estimate of the KL divergence between the two policies of the "
        "ratio r.",
    ),
    "train/importance_weight_mean": Tag(
        "1",
        "Token mean of the importance weight before caps and masks: proximal / behaviour, or current / "
        "behaviour without a proximal policy. Close to 1 in a healthy run.",
    ),
    "train/importance_weight_capped_fraction": Tag(
        "fraction", "Fraction of the tokens that carry loss whose importance weight is above its cap."
    ),
    "train/masked_token_fraction": Tag(
        "fraction", "Tokens that `actor.correction.token` drops, as a fraction of all tokens that carry loss."
    ),
    "train/masked_sequence_fraction": Tag(
        "fraction",
        "Tokens of sequences that `actor.correction.sequence` drops, as a fraction of all tokens that "
        "carry loss.",
    ),
    "train/masked_negative_fraction": Tag(
        "fraction",
        "Tokens of sequences that `actor.correction.negative` drops, as a fraction of all tokens that "
        "carry loss.",
    ),
    "train/ess": Tag(
        "fraction",
        "Effective sample size of the importance weights w over N tokens, divided by N: "
        "(sum w)^2 / (N sum w^2). 1 if all weights are equal.",
    ),
    "train/entropy": Tag("nats", "Token mean of the entropy of the current policy."),
    "train/reference_kl": Tag(
        "nats",
        "Token mean of the estimated KL divergence of the policy from the reference model. Only with "
        "`actor.kl`.",
    ),
    "train/teacher_topk_kl": Tag(
        "nats",
        "Mean KL divergence of the policy from the teacher over the teacher's likeliest tokens and the rest "
        "of the vocabulary, over the tokens that have them. Only with a term of type `teacher_topk`.",
    ),
    "train/teacher_topk_fraction": Tag(
        "fraction",
        "Fraction of the tokens that carry loss at which the teacher's likeliest tokens are known. Only with "
        "a term of type `teacher_topk`.",
    ),
    "train/masked_hook_fraction": Tag(
        "fraction",
        "Fraction of the tokens that carry loss whose loss was removed by hooks of `rollout.hooks`. Only "
        "with `custom_tis_function` and `rollout_data_postprocess`.",
    ),
    "train/preference_accuracy": Tag(
        "fraction",
        "Fraction of pairs in which the chosen response has the larger value. Only for reward models.",
    ),
    "train/tokens": Tag("tokens", "Number of tokens that carried loss in this step."),
    "train/tflop": Tag(
        "TFLOP",
        "Arithmetic that the policy's model needs for this step: forward and backward passes and recomputed "
        "log-probs.",
    ),
    "train/skipped_updates": Tag(
        "updates",
        "Number of the policy's optimizer updates in this step that no rank made, because a loss or a "
        "gradient was not finite. Their tokens are in no other metric of the trainer. "
        "`run.max_skipped_updates` bounds the total.",
    ),
    "train/zero_advantage_fraction": Tag(
        "fraction",
        "Fraction of the tokens that carry loss with advantage 0, as in groups whose rewards are all equal.",
    ),
    # advantage
    "advantage/reward_mean": Tag(
        "1", "Token mean of the advantage from rewards, times its weight. Only with a term of type `reward`."
    ),
    "advantage/reward_abs_mean": Tag(
        "1", "Token mean of the absolute value of the advantage from rewards, times its weight."
    ),
    "advantage/teacher_mean": Tag(
        "nats",
        "Token mean of log pi_teacher - log pi_old, clipped and times its weight. The value of a token is "
        "0 if the teacher has no log-prob of it, or if policy and teacher agree. Only with a term of type "
        "`teacher`.",
    ),
    "advantage/teacher_abs_mean": Tag(
        "nats", "Token mean of the absolute value of the teacher's term, times its weight."
    ),
    "advantage/teacher_fraction": Tag(
        "fraction", "Fraction of the tokens that carry loss for which a teacher has a log-prob."
    ),
    "advantage/teacher_clipped_fraction": Tag(
        "fraction", "Fraction of the tokens that carry loss whose teacher's term was cut by its `clip`."
    ),
    "advantage/plugin_mean": Tag(
        "1",
        "Token mean of the recipe's own term, times its weight. Only with a term of type `plugin`.",
    ),
    "advantage/plugin_abs_mean": Tag(
        "1", "Token mean of the absolute value of the recipe's own term, times its weight."
    ),
    # hook
    "hook/parts": Tag(
        "as the hook says",
        "`hook/NAME` for each metric that `custom_tis_function` or `custom_loss_function` returns: the mean "
        "over the units of `actor.averaging`.",
        "parts",
    ),
    # batch
    "batch/parts": Tag(
        "as the metric says",
        "`batch/NAME` for each number that the classes of `actor.metrics` return for a training step.",
        "parts",
    ),
    # critic
    "critic/loss": Tag(
        "1", "Token mean of half the squared difference of value and return, with the value clip applied."
    ),
    "critic/explained_variance": Tag(
        "fraction",
        "Fraction of the variance of the returns that is explained by the values at the beginning of the "
        "step. 1: all of it. Below 0: the mean return would predict better.",
    ),
    "critic/value_mean": Tag("reward", "Token mean of the values at the beginning of the step."),
    "critic/return_mean": Tag("reward", "Token mean of the returns, which the values should predict."),
    "critic/clip_fraction": Tag(
        "fraction", "Fraction of tokens for which the clipped value determines the loss."
    ),
    "critic/grad_norm": Tag(
        "1", "Global gradient norm of the critic before clipping, mean over the updates of the step."
    ),
    "critic/lr": Tag("1", "Learning rate of the critic in this step."),
    "critic/skipped_updates": Tag(
        "updates",
        "Number of the critic's optimizer updates in this step that no rank made, because a loss or a "
        "gradient was not finite.",
    ),
    # packing
    "packing/fill": Tag(
        "fraction",
        "Tokens / (micro-batches * `actor.microbatch_tokens`), over all data-parallel ranks.",
    ),
    "packing/imbalance": Tag(
        "1",
        "FLOPs of the most loaded data-parallel rank / mean over the ranks, taken for each mini-batch: the "
        "factor by which imbalance prolongs the step.",
    ),
    "packing/saved_tokens": Tag(
        "fraction",
        "Fraction of the tokens that are not computed, because `actor.share_prefixes` computes them for "
        "another trajectory of the micro-batch.",
    ),
    "packing/saved_flops": Tag(
        "fraction", "Fraction of the FLOPs that `actor.share_prefixes` saves, attention included."
    ),
    # mismatch
    "mismatch/logprob_abs_mean": Tag(
        "nats",
        "Mean absolute difference of proximal and behaviour log-prob over tokens of lag 0. Trainer and "
        "engine hold the same weights for them.",
    ),
    "mismatch/logprob_square_mean": Tag(
        "nats^2",
        "Mean squared difference of proximal and behaviour log-prob over tokens of lag 0. "
        "`actor.correction.negative` allows for an average of it.",
    ),
    "mismatch/logprob_abs_max": Tag(
        "nats", "Largest absolute difference of proximal and behaviour log-prob over tokens of lag 0."
    ),
    "mismatch/tokens": Tag(
        "tokens", "Number of tokens of lag 0 that carry loss, from which the metrics above are computed."
    ),
    "mismatch/unrouted": Tag(
        "fraction",
        "Share of the tokens, the last one of each trajectory left out, whose experts no engine has told. "
        "They go where the trainer's router sends them. Only with `actor.routing_replay: rollout`.",
    ),
    # perf
    "perf/checkpoint_stall_s": Tag("s", "Time for which the last checkpoint's copy held up training."),
    "perf/step_s": Tag(
        "s", "Duration of the step: waiting for the batch, training, and publishing the new version."
    ),
    "perf/train_s": Tag("s", "Duration of training on the batch: log-probs, gradients, optimizer."),
    "perf/generate_tokens_per_s": Tag(
        "tokens/s",
        "Response tokens that all engines together generated per second since the previous step, those for "
        "users included.",
    ),
    "perf/train_tokens_per_s": Tag("tokens/s", "`train/tokens` / `perf/train_s`."),
    "perf/train_tflops": Tag(
        "TFLOP/s",
        "`train/tflop` / `perf/train_s`, for all trainer ranks together. Divided by the peak of their "
        "devices, it is the MFU.",
    ),
    "perf/weight_update_s": Tag("s", "Duration of publishing the version, until the last engine runs again."),
    "perf/weight_update_stall_s": Tag(
        "s", "Time from the pause of the first engine until the last engine runs again, in a publication."
    ),
    "perf/weight_bytes": Tag("bytes", "Bytes that the publication sent to one engine."),
    "perf/weight_gb_per_s": Tag("GB/s", "`perf/weight_bytes` / `perf/weight_update_s` / 10^9."),
    "perf/weight_ipc_ranks": Tag(
        "ranks",
        "Ranks of engines that read the publication from the memory of the trainer's GPU (CUDA IPC); with "
        "`weights.transport: tensor`, all others read host memory.",
    ),
    "perf/weight_transports_given_up": Tag(
        "transports, whole run",
        "Number of transports that were given up at their first publication; 0 while versions take "
        "`weights.transport`.",
    ),
    "perf/trainer_wait_s": Tag("s", "Time for which the trainer waited for its batch in this step."),
    "perf/trainer_wait_fraction": Tag("fraction", "`perf/trainer_wait_s` / `perf/step_s`."),
    "perf/collector_restarts": Tag(
        "collectors, this process", "Number of times that a collector was lost and started again."
    ),
    "perf/engine_restarts": Tag(
        "engines, this process", "Number of times that an engine was lost and started again."
    ),
    "perf/trainer_restarts": Tag(
        "restarts, this process", "Number of times that the trainer was started again from a checkpoint."
    ),
    # process
    **{
        f"process/{group}_cpu_cores": Tag("cores", f"CPU cores that were kept busy by {who}.")
        for group, who in _PROCESSES.items()
    },
    **{
        f"process/{group}_memory_gib": Tag(
            "GiB", f"Resident memory of {who}, without files and shared memory."
        )
        for group, who in _PROCESSES.items()
    },
    **{
        f"process/{group}_gpu_fraction": Tag(
            "fraction",
            f"Share of the time in which a kernel ran: mean over the GPUs of {who}. Only with GPUs.",
        )
        for group, who in _ON_GPUS.items()
    },
    **{
        f"process/{group}_gpu_memory_gib": Tag("GiB", f"GPU memory of {who}. Only with GPUs.")
        for group, who in _ON_GPUS.items()
    },
}
