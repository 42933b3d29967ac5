"""What must hold between settings, and between settings and the files they name.

Each rule is a small function from a ``RunConfig`` to violations. ``RULES`` lists them with the settings that
they read: a rule is skipped when one of those is itself in error, so that one mistake is reported once. What
can be said about a single value is in the schema; what the installed packages accept is in ``installed``.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.configs import objective_rules, trainer_rules
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation, one_of

USUAL_OFFPOLICYNESS = 16
"""Largest bound on the lag without a second word: behind it most importance weights are clipped."""

PROMPT_SUFFIXES = (".jsonl", ".parquet")

POLICY, CRITIC = "model.path", "critic.path"
OTHER_MODELS = ("actor.kl.reference.path", "actor.teacher.path", CRITIC)
"""Settings with the checkpoints of models besides the policy, all of them in its layout."""
MODELS = (POLICY, *OTHER_MODELS)
PROMPTS = ("data.path", "eval.path")
PLUGINS = ("rollout.workflow", "rollout.reward", "rollout.group_filter", "prepare")
RESPONSE_LENGTHS = ("rollout.sampling.max_new_tokens", "eval.max_new_tokens")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
OPTIMIZERS = ("actor.optimizer", "critic.optimizer")
TENSOR_RANKS = ("actor.parallel.tensor", "rollout.engine.tensor_parallel")

LONGEST_NAME = 255
"""Bytes of one path component on every file system in use."""


def check_rules(config: RunConfig, unsure: Collection[str] = ()) -> Iterator[Violation]:
    """The violations of each rule that reads none of the ``unsure`` paths, nor anything in or around one."""
    for rule in RULES:
        if not any(_touches(read, path) for read in rule.reads for path in unsure):
            yield from rule.check(config)


def offpolicyness_is_usual(config: RunConfig) -> Iterator[Violation]:
    bound = config.rollout.max_head_offpolicyness
    if bound > USUAL_OFFPOLICYNESS and not config.rollout.allow_extreme_offpolicyness:
        yield Violation(
            "rollout.max_head_offpolicyness",
            bound,
            f"expected at most {USUAL_OFFPOLICYNESS} (2 to 8 is usual); to train tokens that stale, "
            "set rollout.allow_extreme_offpolicyness to true",
        )


def volume_needs_ready_first(config: RunConfig) -> Iterator[Violation]:
    rollout = config.rollout
    if rollout.admission.type == "volume" and rollout.consumption.type != "ready_first":
        yield Violation(
            "rollout.consumption.type",
            rollout.consumption.type,
            "expected 'ready_first': rollout.admission.type: volume does not bound how old a group becomes, "
            "so that whatever waits for slow groups could wait beyond the bound",
        )
    if rollout.admission.type == "volume" and rollout.over_sampling > 1:
        yield Violation(
            "rollout.over_sampling",
            rollout.over_sampling,
            "expected 1: rollout.admission.type: volume admits by its own formula, which knows no surplus",
        )


def group_has_a_spread(config: RunConfig) -> Iterator[Violation]:
    samples = config.rollout.n_samples_per_prompt
    if config.actor.advantage not in ("reinforce_pp", "gae", "reward") and samples < 2:
        yield Violation(
            "rollout.n_samples_per_prompt",
            samples,
            "expected at least 2: a reward minus the mean of a group of one is 0, so nothing is learned "
            f"(actor.advantage: {config.actor.advantage})",
        )


def batch_feeds_every_rank(config: RunConfig) -> Iterator[Violation]:
    trajectories = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    parallel = config.actor.parallel
    stages = parallel.microbatch_multiple
    shares = config.actor.minibatches * parallel.data * stages
    if trajectories < shares:
        by_stage = " and, with virtual_pipeline, for each pipeline stage" if stages > 1 else ""
        yield Violation(
            "rollout.batch_size",
            config.rollout.batch_size,
            f"a step has {trajectories} trajectories (batch_size * n_samples_per_prompt), "
            f"expected at least {shares}: one for each minibatch on each data-parallel rank "
            f"(actor.minibatches * actor.parallel.data){by_stage}",
        )


def sequence_parallel_needs_tensor(config: RunConfig) -> Iterator[Violation]:
    parallel = config.actor.parallel
    if parallel.sequence and parallel.tensor < 2:
        yield Violation(
            "actor.parallel.sequence",
            True,
            "sequence parallelism splits activations over the tensor-parallel group: "
            "set actor.parallel.tensor to at least 2, or this to false",
        )


def sampling_keeps_the_distribution(config: RunConfig) -> Iterator[Violation]:
    """Truncated sampling is refused: SGLang's log-prob is that of the full softmax at the temperature, so a
    token drawn from the renormalised rest would enter the loss with too small a behaviour probability."""
    why = (
        "tokens would be sampled from a truncated distribution, while the engine returns log-probs of the "
        "whole one, so every importance weight would be wrong"
    )
    sampling = config.rollout.sampling
    if sampling.top_p < 1:
        yield Violation("rollout.sampling.top_p", sampling.top_p, f"expected 1: {why}")
    if sampling.top_k == 0 or sampling.top_k < -1:
        reason = "expected -1, the whole vocabulary; 0 would keep nothing, and less than -1 has no meaning"
        yield Violation("rollout.sampling.top_k", sampling.top_k, reason)
    elif sampling.top_k > 0:
        yield Violation("rollout.sampling.top_k", sampling.top_k, f"expected -1, the whole vocabulary: {why}")


def run_folder_can_be_made(config: RunConfig) -> Iterator[Violation]:
    if len(config.run.name) > LONGEST_NAME:
        reason = f"expected at most {LONGEST_NAME} characters, as it names a folder"
        yield Violation("run.name", config.run.name, reason)
    elif os.path.exists(config.run.root) and not os.path.isdir(config.run.root):
        reason = "expected a directory, or a path where one can be made"
        yield Violation("run.root", str(config.run.root), reason)
    elif os.path.exists(config.run.folder) and not os.path.isdir(config.run.folder):
        reason = f"{config.run.folder} is there and is not a directory; choose another name"
        yield Violation("run.name", config.run.name, reason)


def prompts_have_a_known_format(config: RunConfig, path: str) -> Iterator[Violation]:
    file = setting(config, path)
    if file is not None and file.suffix not in PROMPT_SUFFIXES:
        yield Violation(path, str(file), f"expected a file that ends in {one_of(PROMPT_SUFFIXES)}")


def prompts_exist(config: RunConfig, path: str) -> Iterator[Violation]:
    file = setting(config, path)
    if file is None or config.prepare is not None:
        return
    if file.suffix in PROMPT_SUFFIXES and not os.path.isfile(file):
        yield Violation(path, str(file), "there is no such file, and no `prepare` that would make it")


def model_exists(config: RunConfig, path: str) -> Iterator[Violation]:
    folder = setting(config, path)
    made = config.prepare is not None and folder == config.model.path
    if folder is not None and not made and not os.path.isfile(folder / "config.json"):
        by = ", and no `prepare` that would make it" if path == POLICY else ""
        reason = (
            f"there is no config.json in it{by}; expected a Hugging Face checkpoint directory on this machine"
        )
        yield Violation(path, str(folder), reason)


def plugin_can_be_found(config: RunConfig, path: str) -> Iterator[Violation]:
    """Only the package of an import path is looked for: importing the rest could bring in torch."""
    plugin = setting(config, path)
    package = plugin.path.partition(".")[0] if plugin else None
    if package and not _is_importable(package):
        reason = f"there is no Python package {package!r}; install it or add its folder to PYTHONPATH"
        yield Violation(path, plugin.path, reason)


def model_config_is_readable(config: RunConfig, path: str) -> Iterator[Violation]:
    folder = setting(config, path)
    if folder is not None and os.path.isfile(folder / "config.json") and _model_config(config, path) is None:
        reason = "its config.json is not a JSON object that can be read"
        yield Violation(path, str(folder), reason)


def vocabulary_is_the_policys(config: RunConfig, path: str) -> Iterator[Violation]:
    own, other = (_model_number(config, "vocab_size", model) for model in (POLICY, path))
    if own and other and own != other:
        reason = f"its vocabulary has {other} tokens, that of model.path {own}: expected the same tokens"
        yield Violation(path, str(setting(config, path)), reason)


def response_fits_the_model(config: RunConfig, path: str) -> Iterator[Violation]:
    """The prompt's length is not known here, but it has at least one token."""
    length = setting(config, path)
    context = _model_number(config, "max_position_embeddings")
    if length is not None and context is not None and length >= context:
        reason = f"expected less than {context}: the prompt too has to fit into max_position_embeddings"
        yield Violation(path, length, reason)


def heads_split_over_ranks(config: RunConfig, path: str, model: str) -> Iterator[Violation]:
    """What Megatron and SGLang refuse, known before any of their processes starts."""
    ranks = setting(config, path)
    heads = _model_number(config, "num_attention_heads", model)
    groups = _model_number(config, "num_key_value_heads", model)
    if heads and heads % ranks:
        reason = f"expected a divisor of {heads}, the number of attention heads of {_named(model)}"
        yield Violation(path, ranks, reason)
    elif groups and groups % ranks and (path == "actor.parallel.tensor" or ranks % groups):
        also = "" if path == "actor.parallel.tensor" else " or a multiple"
        reason = f"expected a divisor{also} of {groups}, the number of key-value heads of {_named(model)}"
        yield Violation(path, ranks, reason)


def stages_can_interleave(config: RunConfig) -> Iterator[Violation]:
    parallel = config.actor.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        reason = (
            "expected 1: the schedule that interleaves parts of the model needs actor.parallel.pipeline > 1"
        )
        yield Violation("actor.parallel.virtual_pipeline", parallel.virtual_pipeline, reason)


def layers_split_over_stages(config: RunConfig, model: str) -> Iterator[Violation]:
    parallel = config.actor.parallel
    parts = parallel.pipeline * parallel.virtual_pipeline
    layers = _model_number(config, "num_hidden_layers", model)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        return
    if parallel.layers is not None:
        if len(parallel.layers) != parts or layers not in (None, sum(parallel.layers)):
            of = f", that sum to {layers}, the number of layers of {_named(model)}" if layers else ""
            reason = f"expected {parts} numbers (actor.parallel.pipeline * virtual_pipeline){of}"
            yield Violation("actor.parallel.layers", parallel.layers, reason)
    elif layers and layers % parts:
        interleaved = parallel.virtual_pipeline > 1
        path = f"actor.parallel.{'virtual_pipeline' if interleaved else 'pipeline'}"
        also = " for pipeline * virtual_pipeline" if interleaved else ""
        reason = (
            f"expected a divisor of {layers}{also}, the number of layers of {_named(model)}, or "
            "actor.parallel.layers: how many each part has"
        )
        yield Violation(path, setting(config, path), reason)


def experts_split_over_ranks(config: RunConfig, model: str) -> Iterator[Violation]:
    parallel = config.actor.parallel
    expert_tensor = parallel.expert_tensor or parallel.tensor
    experts = next(filter(None, (_model_number(config, name, model) for name in EXPERT_COUNTS)), None)
    known = _model_config(config, model) is not None
    if model != POLICY and experts is None:
        return
    if known and experts is None:
        for name in ("expert", "expert_tensor"):
            if (found := getattr(parallel, name)) not in (None, 1):
                yield Violation(f"actor.parallel.{name}", found, "expected 1: the model has no experts")
        return
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (parallel.expert * expert_tensor):
        reason = (
            f"with {expert_tensor} ranks for each expert (expert_tensor, or tensor) expected a divisor of "
            f"{ranks}, the ranks of a pipeline stage (tensor * context * data)"
        )
        yield Violation("actor.parallel.expert", parallel.expert, reason)
    if experts and experts % parallel.expert:
        reason = f"expected a divisor of {experts}, the number of experts of {_named(model)}"
        yield Violation("actor.parallel.expert", parallel.expert, reason)
    width = _model_number(config, "moe_intermediate_size", model)
    if width and width % expert_tensor:
        reason = f"expected a divisor of {width}, the width of an expert"
        yield Violation("actor.parallel.expert_tensor", expert_tensor, reason)
    if experts and parallel.tensor > 1 and not parallel.sequence:
        reason = (
            "expected true: Megatron trains experts on tensor-parallel ranks with sequence parallelism only"
        )
        yield Violation("actor.parallel.sequence", False, reason)


def shared_memory_is_on_one_node(config: RunConfig) -> Iterator[Violation]:
    colocated = config.rollout.engine.colocated
    if config.weights.transport.type == "tensor" and config.cluster.type == "slurm" and not colocated:
        yield Violation(
            "weights.transport.type",
            "tensor",
            "in a Slurm job trainer and engines are on different nodes, which share no memory: "
            "expected 'distributed', 'disk' or 'delta'",
        )


def colocated_engines_can_stand_aside(config: RunConfig) -> Iterator[Violation]:
    if not config.rollout.engine.colocated:
        return
    otherwise = "or set rollout.engine.colocated to false"
    if config.weights.interrupt == "in_place":
        yield Violation(
            "weights.interrupt",
            "in_place",
            "colocated engines give up the memory that holds the KV of running requests: expected 'retract', "
            f"'abort' or 'drain', {otherwise}",
        )
    if config.weights.transport.type == "distributed":
        yield Violation(
            "weights.transport.type",
            "distributed",
            "NCCL does not connect two processes on one GPU: expected 'tensor' (on one node), 'disk' or "
            f"'delta', {otherwise}",
        )
    if config.cluster.type == "slurm" and config.cluster.trainer_nodes is not None:
        yield Violation(
            "cluster.trainer_nodes",
            config.cluster.trainer_nodes,
            f"colocated engines are on all nodes of the trainer: leave this out, {otherwise}",
        )


def lora_targets_exist(config: RunConfig) -> Iterator[Violation]:
    targets = setting(config, "actor.lora.targets")
    if targets is None or _model_config(config) is None:
        return
    names = ["linear_proj", "linear_fc1", "linear_fc2"]
    if _model_number(config, "kv_lora_rank") is None:
        names.append("linear_qkv")
    else:
        names += ["linear_kv_down_proj", "linear_kv_up_proj"]
        narrow = _model_number(config, "q_lora_rank") is not None
        names += ["linear_q_down_proj", "linear_q_up_proj"] if narrow else ["linear_q_proj"]
    if missing := [name for name in targets if name not in names]:
        reason = f"the model has no {one_of(missing)}; its linear layers are {', '.join(sorted(names))}"
        yield Violation("actor.lora.targets", targets, reason)


@dataclass(frozen=True)
class Rule:
    check: Callable[[RunConfig], Iterator[Violation]]
    reads: tuple[str, ...]
    """Every setting that ``check`` looks at."""


RULES: tuple[Rule, ...] = (
    Rule(
        objective_rules.decoupled_needs_proximal,
        ("actor.use_decoupled_loss", "actor.recompute_logprobs", "actor.interpolate_logprobs"),
    ),
    Rule(
        objective_rules.interpolation_is_of_use,
        ("actor.interpolate_logprobs", "actor.recompute_logprobs", "actor.use_decoupled_loss"),
    ),
    Rule(objective_rules.corrected_once, ("actor.use_decoupled_loss", "actor.objective")),
    Rule(
        objective_rules.stale_data_is_bounded,
        (
            "actor.objective",
            "actor.correction",
            "actor.use_decoupled_loss",
            "rollout.max_head_offpolicyness",
        ),
    ),
    Rule(
        objective_rules.token_correction_has_a_weight, ("actor.correction.token", "actor.use_decoupled_loss")
    ),
    Rule(
        objective_rules.masks_need_proximal,
        ("actor.correction", "actor.recompute_logprobs", "actor.interpolate_logprobs"),
    ),
    Rule(objective_rules.sequence_ratio_keeps_its_tokens, ("actor.objective", "actor.correction.token")),
    Rule(objective_rules.overlong_has_a_slope, ("actor.overlong",)),
    Rule(objective_rules.critic_is_of_use, ("actor.advantage", "critic")),
    Rule(
        objective_rules.rewards_reach_the_advantage,
        ("actor.kl", "actor.teacher", "actor.advantage", "actor.turns"),
    ),
    Rule(objective_rules.values_are_of_the_same_rewards, ("actor.advantage", "actor.turns")),
    *(Rule(partial(trainer_rules.decay_goes_down, path=path), (path,)) for path in OPTIMIZERS),
    *(
        Rule(partial(trainer_rules.gather_has_what_it_overlaps_with, path=path), (path, "actor.minibatches"))
        for path in OPTIMIZERS
    ),
    Rule(trainer_rules.recompute_details_fit, ("actor.recompute", "actor.megatron")),
    Rule(
        trainer_rules.transformer_engine_can_be_used,
        ("actor.layer_spec", "actor.lora", "cluster.device"),
    ),
    Rule(trainer_rules.context_needs_transformer_engine, ("actor.layer_spec", "actor.parallel.context")),
    Rule(
        offpolicyness_is_usual,
        ("rollout.max_head_offpolicyness", "rollout.allow_extreme_offpolicyness"),
    ),
    Rule(
        volume_needs_ready_first,
        ("rollout.admission", "rollout.consumption", "rollout.over_sampling"),
    ),
    Rule(group_has_a_spread, ("actor.advantage", "rollout.n_samples_per_prompt")),
    Rule(
        batch_feeds_every_rank,
        (
            "rollout.batch_size",
            "rollout.n_samples_per_prompt",
            "actor.minibatches",
            "actor.parallel",
        ),
    ),
    Rule(sequence_parallel_needs_tensor, ("actor.parallel.sequence", "actor.parallel.tensor")),
    Rule(sampling_keeps_the_distribution, ("rollout.sampling.top_p", "rollout.sampling.top_k")),
    Rule(run_folder_can_be_made, ("run.name", "run.root")),
    *(Rule(partial(prompts_have_a_known_format, path=path), (path,)) for path in PROMPTS),
    *(Rule(partial(prompts_exist, path=path), ("prepare", path)) for path in PROMPTS),
    *(Rule(partial(model_exists, path=path), ("prepare", "model.path", path)) for path in MODELS),
    *(Rule(partial(plugin_can_be_found, path=path), (path,)) for path in PLUGINS),
    *(Rule(partial(model_config_is_readable, path=path), (path,)) for path in MODELS),
    *(Rule(partial(vocabulary_is_the_policys, path=path), ("model.path", path)) for path in OTHER_MODELS),
    *(Rule(partial(response_fits_the_model, path=path), ("model.path", path)) for path in RESPONSE_LENGTHS),
    *(
        Rule(partial(heads_split_over_ranks, path=path, model=POLICY), ("model.path", path))
        for path in TENSOR_RANKS
    ),
    *(
        Rule(
            partial(heads_split_over_ranks, path="actor.parallel.tensor", model=model),
            (model, "actor.parallel.tensor"),
        )
        for model in OTHER_MODELS
    ),
    Rule(stages_can_interleave, ("actor.parallel",)),
    *(Rule(partial(layers_split_over_stages, model=model), (model, "actor.parallel")) for model in MODELS),
    *(Rule(partial(experts_split_over_ranks, model=model), (model, "actor.parallel")) for model in MODELS),
    Rule(
        shared_memory_is_on_one_node,
        ("weights.transport", "cluster.type", "rollout.engine.colocated"),
    ),
    Rule(
        colocated_engines_can_stand_aside,
        ("rollout.engine.colocated", "weights.interrupt", "weights.transport", "cluster"),
    ),
    Rule(lora_targets_exist, ("model.path", "actor.lora.targets")),
)


def _touches(read: str, path: str) -> bool:
    return read == path or read.startswith(f"{path}.") or path.startswith(f"{read}.")


def setting(config: RunConfig, path: str) -> Any:
    """The value at a dotted path, or None where an optional section on the way is not given."""
    value: Any = config
    for name in path.split("."):
        # One kind of a section may have what another one does not.
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


def _is_importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        return False


def _named(model: str) -> str:
    return "the model" if model == POLICY else f"the model in {model}"


def _model_config(config: RunConfig, model: str = POLICY) -> dict[str, Any] | None:
    """Of the model at a setting; None where it is not given or cannot be read."""
    folder = setting(config, model)
    if folder is None:
        return None
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _model_number(config: RunConfig, key: str, model: str = POLICY) -> int | None:
    found = (_model_config(config, model) or {}).get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
