"""Rules about generation, the schedule of groups and batches, and publishing."""

from collections.abc import Iterator

from slipstream.configs.rules.models import model_number
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.live import live_places
from slipstream.configs.schema.sampling import NEUTRAL
from slipstream.configs.violations import Violation, one_of

USUAL_OFFPOLICYNESS = 16
"""Largest bound that needs no second setting. Beyond it most importance weights are clipped."""


FP8_TRANSPORTS = ("delta", "disk")
"""Transports that carry the tensors of engines in fp8."""

FP8_ON_CPUS = (
    "expected null on CPUs: SGLang computes with fp8 weights on a CPU only through AMX kernels, which an "
    "environment for CPUs does not have; without them it ends as soon as it has loaded such a model"
)


def offpolicyness_is_usual(config: RunConfig) -> Iterator[Violation]:
    bound = config.rollout.max_head_offpolicyness
    if bound > USUAL_OFFPOLICYNESS and not config.rollout.allow_extreme_offpolicyness:
        yield Violation(
            "rollout.max_head_offpolicyness",
            bound,
            f"expected at most {USUAL_OFFPOLICYNESS} (2 to 8 is usual); "
            "to train on older tokens, set rollout.allow_extreme_offpolicyness to true",
        )


def volume_needs_ready_first(config: RunConfig) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.admission.type == "volume" and rollout.consumption.type != "ready_first":
        yield Violation(
            "rollout.consumption.type",
            rollout.consumption.type,
            "expected 'ready_first': rollout.admission.type: volume does not bound the age of a group, "
            "so that waiting for slow groups could exceed rollout.max_head_offpolicyness",
        )
    if rollout.admission.type == "volume" and rollout.over_sampling > 1:
        yield Violation(
            "rollout.over_sampling",
            rollout.over_sampling,
            "expected 1: the formula of rollout.admission.type: volume admits no surplus",
        )


def group_has_a_spread(config: RunConfig) -> Iterator[Violation]:
    samples = config.rollout.n_samples_per_prompt
    if live_places(config.live, config.rollout.batch_size) >= config.rollout.batch_size:
        return  # there are no groups
    if config.actor.estimator not in (None, "reinforce_pp", "gae", "reward") and samples < 2:
        yield Violation(
            "rollout.n_samples_per_prompt",
            samples,
            "expected at least 2: with one trajectory per group the reward minus the group mean is 0, so "
            f"nothing is learned from it (actor.advantage has the estimator {config.actor.estimator})",
        )


def batch_feeds_every_rank(config: RunConfig) -> Iterator[Violation]:
    live = live_places(config.live, config.rollout.batch_size)
    trajectories = (config.rollout.batch_size - live) * config.rollout.n_samples_per_prompt + live
    parallel = config.actor.parallel
    stages = parallel.microbatch_multiple
    shares = config.actor.minibatches * parallel.data * stages
    if trajectories < shares:
        by_live = f", less what live.share replaces by {live} live ones" if live else ""
        by_stage = " and, with virtual_pipeline, per pipeline stage" if stages > 1 else ""
        yield Violation(
            "rollout.batch_size",
            config.rollout.batch_size,
            f"a batch has {trajectories} trajectories (batch_size * n_samples_per_prompt{by_live}); "
            f"expected at least {shares}: one per mini-batch and data-parallel rank "
            f"(actor.minibatches * actor.parallel.data){by_stage}",
        )


def sampling_keeps_the_distribution(config: RunConfig) -> Iterator[Violation]:
    """Refuse truncated sampling.

    SGLang returns log-probs of the full softmax at the temperature. A token that is drawn from a truncated
    and renormalised distribution would enter the loss with too small a behaviour probability.
    """
    why = (
        "tokens would be sampled from a truncated distribution, but the engine returns log-probs of the "
        "whole one, so every importance weight would be wrong"
    )
    sampling = config.rollout.sampling
    if sampling.top_p < 1:
        yield Violation("rollout.sampling.top_p", sampling.top_p, f"expected 1: {why}")
    if sampling.top_k == 0 or sampling.top_k < -1:
        reason = "expected -1, the whole vocabulary: 0 would keep no token, and less than -1 has no meaning"
        yield Violation("rollout.sampling.top_k", sampling.top_k, reason)
    elif sampling.top_k > 0:
        yield Violation("rollout.sampling.top_k", sampling.top_k, f"expected -1, the whole vocabulary: {why}")
    for name, value in sampling.args.items():
        reason = why if name == "min_p" else _OTHER_DISTRIBUTION
        if name == "custom_params" or (name in NEUTRAL and value is not None and value not in NEUTRAL[name]):
            way_out = f"leave it out; an evaluation may have it: eval.sampling.args.{name}"
            yield Violation(f"rollout.sampling.args.{name}", value, f"{reason}; {way_out}")


_OTHER_DISTRIBUTION = (
    "the engine would sample from another distribution than that of the policy, whose log-probs the trainer "
    "computes, so that even fresh tokens would be off-policy"
)


def evaluation_can_be_sampled(config: RunConfig) -> Iterator[Violation]:
    if config.eval is None:
        return
    own = config.eval.sampling
    sampling = own.over(config.rollout.sampling)
    if own.top_k == 0 or own.top_k < -1:
        reason = "expected -1, the whole vocabulary, or the number of tokens to choose from"
        yield Violation("eval.sampling.top_k", own.top_k, reason)
    if own.min_new_tokens is not None and sampling.min_new_tokens > sampling.max_new_tokens:
        reason = f"expected at most {sampling.max_new_tokens}, the largest number of tokens of a completion"
        yield Violation("eval.sampling.min_new_tokens", own.min_new_tokens, reason)
    if config.eval.n_samples_per_prompt > 1 and own.is_greedy:
        reason = (
            "with eval.sampling.temperature: 0 all completions of a prompt would be equal; expected 1, or a "
            "temperature above 0, such as 1"
        )
        yield Violation("eval.n_samples_per_prompt", config.eval.n_samples_per_prompt, reason)


def stop_tokens_exist(config: RunConfig) -> Iterator[Violation]:
    size = model_number(config, "vocab_size")
    given = {"rollout.sampling.stop_token_ids": config.rollout.sampling.stop_token_ids}
    if config.eval is not None:
        given["eval.sampling.stop_token_ids"] = config.eval.sampling.stop_token_ids or []
    for path, ids in given.items():
        wrong = [each for each in ids if each < 0 or (size is not None and each >= size)]
        if wrong:
            reason = f"expected token ids of the model's vocabulary of {size}, found {wrong[:5]}"
            yield Violation(path, ids, reason)


def withheld_end_tokens_are_corrected(config: RunConfig) -> Iterator[Violation]:
    """SGLang takes the end tokens out of the distribution, and returns log-probs without them."""
    sampling = config.rollout.sampling
    if sampling.min_new_tokens > sampling.max_new_tokens:
        reason = f"expected at most {sampling.max_new_tokens}, which is rollout.sampling.max_new_tokens"
        yield Violation("rollout.sampling.min_new_tokens", sampling.min_new_tokens, reason)
    if sampling.min_new_tokens and not config.actor.use_decoupled_loss:
        yield Violation(
            "rollout.sampling.min_new_tokens",
            sampling.min_new_tokens,
            "expected 0: the first tokens are sampled from a distribution without end tokens, which only the "
            "importance weight of actor.use_decoupled_loss corrects",
        )


def seeds_have_an_effect(config: RunConfig) -> Iterator[Violation]:
    rollout = config.rollout
    is_deterministic = rollout.engine.args.get("enable_deterministic_inference") is True
    if rollout.sampling.seed is not None and not is_deterministic:
        yield Violation(
            "rollout.sampling.seed",
            rollout.sampling.seed,
            "expected null: SGLang uses the seeds of requests only with rollout.engine.args: "
            "{enable_deterministic_inference: true}",
        )
    if rollout.sampling.seed is not None and config.cluster.device == "cpu":
        reason = "expected null with cluster.device: cpu, because deterministic inference needs GPUs"
        yield Violation("rollout.sampling.seed", rollout.sampling.seed, reason)
    if is_deterministic and rollout.sampling.seed is None:
        yield Violation(
            "rollout.sampling.seed",
            None,
            "expected a seed: with enable_deterministic_inference SGLang gives all requests without one the "
            "same, so that the completions of a group would be equal",
        )


def shared_memory_is_on_one_node(config: RunConfig) -> Iterator[Violation]:
    colocated = config.rollout.engine.colocated
    if config.weights.transport.type == "tensor" and config.cluster.type != "local" and not colocated:
        yield Violation(
            "weights.transport.type",
            "tensor",
            "trainer and engines are on different nodes, which share no memory; "
            "expected 'shards', 'disk' or 'delta'",
        )


def digests_are_of_shards(config: RunConfig) -> Iterator[Violation]:
    weights = config.weights
    if weights.verify.type == "digests" and weights.transport.type != "shards":
        yield Violation(
            "weights.verify.type",
            "digests",
            f"only the transport 'shards' compares digests, and weights.transport.type is "
            f"{weights.transport.type!r}; expected 'always', 'every_n' or 'off'",
        )


def fp8_reaches_the_engines(config: RunConfig) -> Iterator[Violation]:
    quantization = config.rollout.engine.quantization
    if quantization is None:
        return
    if config.model.dtype != "bfloat16":
        yield Violation(
            "model.dtype",
            config.model.dtype,
            f"expected bfloat16, with which SGLang computes between {quantization} weights "
            "(rollout.engine.quantization)",
        )
    if config.actor.serves_adapter:
        yield Violation(
            "rollout.engine.quantization",
            quantization,
            "expected null with actor.lora.serve: adapter: adapters on weights in fp8 were not verified",
        )
    elif config.weights.transport.type not in FP8_TRANSPORTS:
        yield Violation(
            "weights.transport.type",
            config.weights.transport.type,
            f"expected {one_of(FP8_TRANSPORTS)}: engines in {quantization} (rollout.engine.quantization) get "
            "their versions from files",
        )
    if config.cluster.device == "cpu":
        yield Violation("rollout.engine.quantization", quantization, FP8_ON_CPUS)


def colocated_engines_can_stand_aside(config: RunConfig) -> Iterator[Violation]:
    if not config.rollout.engine.colocated:
        return
    otherwise = "or set rollout.engine.colocated to false"
    if config.weights.interrupt == "in_place" and config.rollout.engine.takes_turns:
        yield Violation(
            "weights.interrupt",
            "in_place",
            "engines that take turns release the memory that holds the KV cache of running requests; "
            f"expected 'retract', 'abort' or 'drain', {otherwise}",
        )
    if config.weights.transport.type == "shards":
        yield Violation(
            "weights.transport.type",
            "shards",
            "NCCL does not connect two processes on one GPU; "
            f"expected 'tensor' (on one node), 'disk' or 'delta', {otherwise}",
        )
    if config.cluster.type != "local" and config.cluster.trainer_nodes is not None:
        yield Violation(
            "cluster.trainer_nodes",
            config.cluster.trainer_nodes,
            f"colocated engines are on all nodes of the trainer; leave this setting out, {otherwise}",
        )


RULES = (
    Rule(
        offpolicyness_is_usual,
        ("rollout.max_head_offpolicyness", "rollout.allow_extreme_offpolicyness"),
    ),
    Rule(
        volume_needs_ready_first,
        ("rollout.admission", "rollout.consumption", "rollout.over_sampling"),
    ),
    Rule(
        group_has_a_spread,
        (
            "live.share",
            "live.train",
            "rollout.batch_size",
            "actor.advantage",
            "rollout.n_samples_per_prompt",
        ),
    ),
    Rule(
        batch_feeds_every_rank,
        (
            "live.share",
            "live.train",
            "rollout.batch_size",
            "rollout.n_samples_per_prompt",
            "actor.minibatches",
            "actor.parallel",
        ),
    ),
    Rule(
        sampling_keeps_the_distribution,
        ("rollout.sampling.top_p", "rollout.sampling.top_k", "rollout.sampling.args"),
    ),
    Rule(
        withheld_end_tokens_are_corrected,
        (
            "rollout.sampling.min_new_tokens",
            "rollout.sampling.max_new_tokens",
            "actor.use_decoupled_loss",
        ),
    ),
    Rule(evaluation_can_be_sampled, ("eval.sampling", "eval.n_samples_per_prompt", "rollout.sampling")),
    Rule(
        stop_tokens_exist,
        ("model.path", "rollout.sampling.stop_token_ids", "eval.sampling.stop_token_ids"),
    ),
    Rule(
        seeds_have_an_effect,
        ("rollout.sampling.seed", "rollout.engine.args", "cluster.device", "cluster.type"),
    ),
    Rule(
        shared_memory_is_on_one_node,
        ("weights.transport", "cluster.type", "rollout.engine.colocated"),
    ),
    Rule(digests_are_of_shards, ("weights.verify", "weights.transport")),
    Rule(
        fp8_reaches_the_engines,
        (
            "rollout.engine.quantization",
            "model.dtype",
            "weights.transport",
            "cluster.device",
            "actor.lora.serve",
        ),
    ),
    Rule(
        colocated_engines_can_stand_aside,
        (
            "rollout.engine.colocated",
            "rollout.engine.gpu_share",
            "weights.interrupt",
            "weights.transport",
            "cluster",
        ),
    ),
)
