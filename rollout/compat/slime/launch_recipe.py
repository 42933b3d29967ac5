"""Makes a recipe of a slime launch script: what it knows, and the rest with its reason.

script ──► flags ──► settings ──► loader ──► settings that it refuses are taken out again, with its reason
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.rollout.compat.slime.launch_flags import (
    DEFAULT_HOOKS,
    HOOKS,
    NEEDLESS,
    REFUSED,
    SETTINGS,
    SGLANG_NAMES,
    FlagError,
)
from slipstream.rollout.compat.slime.launch_script import Flag, LaunchScript

MAPPED, NEEDS_NOTHING, REFUSES, UNKNOWN = "mapped", "needs nothing", "refused", "unknown"
Settings = dict[str, Any]

_ESTIMATORS = {
    "grpo": ("grpo", "ppo"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_pp", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "ppo"),
    "ppo": ("gae", "ppo"),
}
"""Estimator of `actor.advantage` and the type of `actor.objective` of slime's advantage estimators."""

_KL_TYPES = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "kl": "k1"}
_OF_MEGATRON = re.compile(r"moe-|no-|deterministic|attention-backend|decoder-|cross-entropy|tp-comm")
"""Flags of Megatron that are passed on. The loader refuses those that it has no field for."""

_WANDB = {
    "use-wandb": "project",
    "wandb-project": "project",
    "wandb-group": "group",
    "wandb-team": "entity",
    "wandb-mode": "mode",
}
"""Settings in `log.wandb` of slime's flags for Weights & Biases."""

_USUAL_BOUND = 4
"""Bound on the lag for scripts of slime's fully asynchronous rollout, which has none."""


@dataclass(frozen=True)
class FlagOutcome:
    """What became of one flag."""

    flag: Flag
    outcome: str
    reason: str = ""
    """The setting of a mapped flag, and otherwise why there is none."""


@dataclass
class ImportedRecipe:
    """A recipe made of a script."""

    settings: Settings = field(default_factory=dict[str, Any])
    """By dotted path."""
    outcomes: list[FlagOutcome] = field(default_factory=list[FlagOutcome])
    notes: list[str] = field(default_factory=list[str])

    def nested(self) -> Settings:
        """Return the settings as a recipe holds them."""
        recipe: Settings = {}
        for path, value in self.settings.items():
            *sections, name = path.split(".")
            place = recipe
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return recipe

    def counts(self) -> Counter[str]:
        """Return the number of flags by outcome."""
        return Counter(outcome.outcome for outcome in self.outcomes)

    def refuse(self, path: str, reason: str) -> bool:
        """Take out a setting, and what lies in it, that the loader refuses. Return whether there was one."""
        taken = [name for name in self.settings if name == path or name.startswith(f"{path}.")]
        for name in taken:
            del self.settings[name]
        for position, outcome in enumerate(self.outcomes):
            if outcome.outcome == MAPPED and outcome.reason in taken:
                self.outcomes[position] = FlagOutcome(outcome.flag, REFUSES, f"{path}: {reason}")
        if taken:
            self.notes.append(f"{path} is left out: {reason}")
        return bool(taken)


def recipe_of(script: LaunchScript, name: str) -> ImportedRecipe:
    """Return the recipe of a script. ``name``: of the run. The loader has not seen it."""
    return _Import(script, name).recipe


class _Import:
    def __init__(self, script: LaunchScript, name: str) -> None:
        self.recipe = ImportedRecipe(notes=list(script.notes))
        self._settings = self.recipe.settings
        self._all_flags = script.flags
        self._flags = {flag.name: flag for flag in script.flags}  # the last one counts, as in argparse
        self._trainer = script.trainer
        self._settings |= {"run.name": name, "run.steps": 1000}
        self._settings["data.shuffle"] = "rollout-shuffle" in self._flags
        self._derived: dict[str, Callable[[], str]] = {
            "actor-num-nodes": lambda: "actor.parallel.data",
            "actor-num-gpus-per-node": lambda: "actor.parallel.data",
            "rollout-shuffle": lambda: "data.shuffle",
            "rollout-num-gpus": lambda: "rollout.engine.count",
            "sequence-parallel": self._sequence_parallel,
            "max-tokens-per-gpu": self._microbatch,
            "global-batch-size": self._minibatches,
            "over-sampling-batch-size": self._over_sampling,
            "advantage-estimator": lambda: "actor.advantage",
            "eps-clip": lambda: self._clip("clip_low", "eps-clip"),
            "eps-clip-high": lambda: self._clip("clip_high", "eps-clip-high"),
            "eps-clip-c": self._dual_clip,
            "calculate-per-token-loss": lambda: "actor.averaging",
            "disable-grpo-std-normalization": lambda: "actor.advantage",
            "eval-prompt-data": self._eval_prompts,
            "prompt-data": self._data,
            "update-weight-mode": lambda: "weights.transport.type",
            "disable-rewards-normalization": lambda: "actor.advantage",
            "update-weights-interval": lambda: "rollout.max_head_offpolicyness",
            "use-tis": lambda: self._set("actor.use_decoupled_loss", True),
            "use-rollout-logprobs": self._behaviour_logprobs,
            "rollout-stop": lambda: self._set(
                "rollout.sampling.stop", list(self._flags["rollout-stop"].values)
            ),
            "rollout-stop-token-ids": self._stop_tokens,
            "decoder-last-pipeline-num-layers": self._pipeline_layers,
            "decoder-first-pipeline-num-layers": self._pipeline_layers,
            "sglang-server-concurrency": self._concurrency,
            "rollout-seed": lambda: self._set("run.seed", self._whole("rollout-seed", 0)),
        }
        self._objective()
        self._placement()
        self._machines()
        for flag in self._flags.values():
            self.recipe.outcomes.append(self._outcome(flag))
        self._completion()

    # ---- flags

    def _outcome(self, flag: Flag) -> FlagOutcome:
        try:
            return self._mapped(flag) or self._other(flag)
        except FlagError as error:
            return FlagOutcome(flag, REFUSES, str(error))

    def _mapped(self, flag: Flag) -> FlagOutcome | None:
        if flag.name in HOOKS:
            return self._hook(flag)
        if flag.name in self._derived and flag.name not in NEEDLESS:
            return FlagOutcome(flag, MAPPED, self._derived[flag.name]())
        if flag.name in SETTINGS and SETTINGS[flag.name][0]:
            path, convert = SETTINGS[flag.name]
            if path.startswith("critic.") and not self._has_critic():
                return FlagOutcome(flag, NEEDS_NOTHING, "there is no critic without the advantage `gae`")
            return FlagOutcome(flag, MAPPED, self._set(path, convert(flag.text)))
        if flag.name.startswith("sglang-") and flag.name not in REFUSED:
            name = flag.name.removeprefix("sglang-").replace("-", "_")
            name = SGLANG_NAMES.get(name, name)
            return FlagOutcome(flag, MAPPED, self._set(f"rollout.engine.args.{name}", _plain(flag)))
        return None

    def _other(self, flag: Flag) -> FlagOutcome:
        decide = {
            "optimizer": lambda: self._expected(flag, "adam", "the optimizer is Adam"),
            "attention-dropout": lambda: self._no_dropout(flag),
            "hidden-dropout": lambda: self._no_dropout(flag),
            "kl-loss-type": self._kl,
            "kl-loss-coef": self._kl,
            "kl-coef": self._kl,
            "use-kl-loss": self._kl,
            "lr-decay-style": self._decay,
            "min-lr": self._decay,
            "lr-decay-iters": self._decay,
            "lr-warmup-fraction": self._warmup,
            **dict.fromkeys(_WANDB, lambda: self._wandb(flag)),
            "tis-clip": lambda: self._weights(flag),
            "tis-clip-low": lambda: self._weights(flag),
            "use-opsm": self._masked_sequences,
            "opsm-delta": self._masked_sequences,
            "loss-type": lambda: self._expected(flag, "policy_loss", REFUSED["loss-type"]),
        }
        if flag.name in decide:
            place = decide[flag.name]()
            return FlagOutcome(flag, NEEDS_NOTHING if " " in place else MAPPED, place)
        if flag.name in REFUSED:
            return FlagOutcome(flag, REFUSES, REFUSED[flag.name])
        if flag.name in NEEDLESS:
            return FlagOutcome(flag, NEEDS_NOTHING, NEEDLESS[flag.name])
        if _OF_MEGATRON.match(flag.name):
            name = flag.name.removeprefix("no-").replace("-", "_")
            value = False if flag.name.startswith("no-") else _plain(flag)
            return FlagOutcome(flag, MAPPED, self._set(f"actor.megatron.{name}", value))
        return FlagOutcome(flag, UNKNOWN, "Slipstream knows no such flag of slime")

    def _hook(self, flag: Flag) -> FlagOutcome:
        if flag.text in DEFAULT_HOOKS:
            return FlagOutcome(flag, NEEDS_NOTHING, "Slipstream does the same without a hook")
        if "fully_async" in flag.text or "streaming" in flag.text:
            return FlagOutcome(flag, MAPPED, "rollout.max_head_offpolicyness")
        if "sleep" in flag.text.split(".")[-1]:
            return FlagOutcome(flag, REFUSES, "it is a tool of slime's developers")
        value: object = _text_of(flag)
        if flag.name == "rollout-sample-hook-path":  # the flag may stand several times
            value = [_text_of(each) for each in self._all_flags if each.name == flag.name]
        return FlagOutcome(flag, MAPPED, self._set(f"rollout.hooks.{HOOKS[flag.name]}", value))

    def _set(self, path: str, value: object) -> str:
        self._settings[path] = value
        return path

    def _whole(self, name: str, default: int) -> int:
        flag = self._flags.get(name)
        if flag is None:
            return default
        try:
            return int(flag.text)
        except ValueError:
            return default

    def _number(self, name: str, default: float) -> float:
        flag = self._flags.get(name)
        try:
            return float(flag.text) if flag is not None else default
        except ValueError:
            return default

    def _value(self, name: str, default: str) -> str:
        return self._flags[name].text if name in self._flags else default

    # ---- several flags together

    def _has_critic(self) -> bool:
        return self._value("advantage-estimator", "grpo") == "ppo"

    def _objective(self) -> None:
        estimator = self._value("advantage-estimator", "grpo")
        advantage, objective = _ESTIMATORS.get(estimator, ("grpo", "ppo"))
        if "disable-grpo-std-normalization" in self._flags and advantage == "grpo":
            advantage = "dr_grpo"
        if "disable-rewards-normalization" in self._flags and advantage != "gae":
            advantage = "reward"
        self._settings["actor.advantage"] = [{"type": "reward", "estimator": advantage}]
        self._settings["actor.objective.type"] = objective
        if estimator not in _ESTIMATORS:
            self.recipe.notes.append(f"--advantage-estimator {estimator} is unknown: the estimator is grpo")
        if advantage == "gae":
            self._settings["critic.path"] = None
        is_by_token = "calculate-per-token-loss" in self._flags
        self._settings["actor.averaging"] = "token" if is_by_token else "sequence"

    def _clip(self, setting: str, name: str) -> str:
        if self._settings["actor.objective.type"] == "cispo" and setting == "clip_low":
            raise FlagError("this objective has no lower clip range")
        path = self._set(f"actor.objective.{setting}", self._number(name, 0.2))
        if name == "eps-clip" and "eps-clip-high" not in self._flags:
            self._set("actor.objective.clip_high", self._number(name, 0.2))
        return path

    def _behaviour_logprobs(self) -> str:
        self._set("actor.use_decoupled_loss", "use-tis" in self._flags)
        return self._set("actor.recompute_logprobs", False)

    def _dual_clip(self) -> str:
        if self._settings["actor.objective.type"] not in ("ppo", "dual_clip"):
            raise FlagError("this objective has no bound of the loss for negative advantages")
        self._settings["actor.objective.type"] = "dual_clip"
        return self._set("actor.objective.bound", self._number("eps-clip-c", 3.0))

    def _placement(self) -> None:
        gpus = self._whole("actor-num-nodes", 1) * self._whole("actor-num-gpus-per-node", 8)
        names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        share = 1
        for name in names:
            share *= self._whole(name, 1)
        self._settings["actor.parallel.data"] = max(1, gpus // share)
        if gpus % share:
            self.recipe.notes.append(f"{gpus} GPUs of the trainer are no multiple of its layout's {share}")
        per_engine = self._whole("rollout-num-gpus-per-engine", 1)
        of_rollout = gpus if "colocate" in self._flags else self._whole("rollout-num-gpus", gpus)
        self._settings["rollout.engine.count"] = max(1, of_rollout // per_engine)
        self._settings["rollout.max_head_offpolicyness"] = self._bound()

    def _bound(self) -> int:
        if self._trainer == "train.py":
            return 0
        path = self._value("rollout-function-path", "")
        if "fully_async" in path:
            self.recipe.notes.append(
                f"this rollout function has no bound: rollout.max_head_offpolicyness is {_USUAL_BOUND}"
            )
            return _USUAL_BOUND
        return max(1, self._whole("update-weights-interval", 1))

    def _sequence_parallel(self) -> str:
        return self._set("actor.parallel.sequence", self._whole("tensor-model-parallel-size", 1) > 1)

    def _microbatch(self) -> str:
        tokens = self._whole("max-tokens-per-gpu", 8192) * self._whole("context-parallel-size", 1)
        return self._set("actor.microbatch_tokens", tokens)

    def _minibatches(self) -> str:
        trajectories = self._whole("rollout-batch-size", 1) * self._whole("n-samples-per-prompt", 1)
        size = self._whole("global-batch-size", trajectories)
        if not size or trajectories % size:
            raise FlagError(f"{trajectories} trajectories do not divide into mini-batches of {size}")
        return self._set("actor.minibatches", trajectories // size)

    def _over_sampling(self) -> str:
        ratio = self._whole("over-sampling-batch-size", 1) / max(1, self._whole("rollout-batch-size", 1))
        return self._set("rollout.over_sampling", max(1.0, ratio))

    def _concurrency(self) -> str:
        each = self._whole("sglang-server-concurrency", 512)
        return self._set("rollout.max_concurrent", each * self._settings["rollout.engine.count"])

    def _eval_prompts(self) -> str:
        words = self._flags["eval-prompt-data"].values
        if not words:
            raise FlagError("it has no value")
        last = words[len(words) - 1]
        if len(words) > 2:
            pairs = zip(words[::2], words[1::2], strict=False)
            return self._set(
                "eval.sets", [{"name": name, "path": self._prompts(path)} for name, path in pairs]
            )
        return self._set("eval.path", self._prompts(last))

    def _stops(self) -> str:
        return self._set("rollout.sampling.stop", list(self._flags["rollout-stop"].values))

    def _stop_tokens(self) -> str:
        try:
            ids = [int(word) for word in self._flags["rollout-stop-token-ids"].values]
        except ValueError:
            raise FlagError("expected token ids") from None
        return self._set("rollout.sampling.stop_token_ids", ids)

    def _pipeline_layers(self) -> str:
        stages, layers = self._whole("pipeline-model-parallel-size", 1), self._whole("num-layers", 0)
        first = self._whole("decoder-first-pipeline-num-layers", 0)
        last = self._whole("decoder-last-pipeline-num-layers", 0)
        ends = bool(first) + bool(last)
        middle = layers - first - last
        if stages < 2 or middle <= 0 or stages <= ends or middle % (stages - ends):
            raise FlagError(f"{layers} layers cannot be spread so over {stages} pipeline stages")
        share = middle // (stages - ends)
        spread = [first] * bool(first) + [share] * (stages - ends) + [last] * bool(last)
        return self._set("actor.parallel.layers", spread)

    # ---- flags whose value decides

    def _expected(self, flag: Flag, value: str, reason: str) -> str:
        if flag.text != value:
            raise FlagError(reason)
        return reason

    def _no_dropout(self, flag: Flag) -> str:
        if self._number(flag.name, 0.0):
            raise FlagError("Slipstream trains without dropout")
        return "Slipstream trains without dropout"

    def _kl(self) -> str:
        in_loss = self._number("kl-loss-coef", 0.0) if "use-kl-loss" in self._flags else 0.0
        in_reward = self._number("kl-coef", 0.0)
        if not in_loss and not in_reward:
            return "the coefficient is 0: no reference model is loaded"
        self._set("actor.kl.where", "loss" if in_loss else "reward")
        estimator = self._value("kl-loss-type", "k1")
        if estimator not in _KL_TYPES:
            raise FlagError(f"{estimator!r} has no counterpart; these have: {', '.join(_KL_TYPES)}")
        self._set("actor.kl.estimator", _KL_TYPES[estimator])
        return self._set("actor.kl.coefficient", in_loss or in_reward)

    def _decay(self) -> str:
        style = self._value("lr-decay-style", "constant")
        if style not in ("constant", "linear", "cosine"):
            raise FlagError(f"{style!r} has no counterpart; these have: constant, linear, cosine")
        if style != "constant":
            self._set("actor.optimizer.decay.min_lr", self._number("min-lr", 0.0))
        return self._set("actor.optimizer.decay.type", style)

    def _warmup(self) -> str:
        steps = round(self._number("lr-warmup-fraction", 0.0) * self._whole("num-rollout", 1000))
        return self._set("actor.optimizer.warmup_steps", steps)

    def _wandb(self, flag: Flag) -> str:
        if "use-wandb" not in self._flags or self._value("wandb-mode", "") == "disabled":
            return "metrics go to Weights & Biases only with --use-wandb"
        project = self._value("wandb-project", "")
        if not project:
            raise FlagError("log.wandb needs a project: name it with --wandb-project")
        value = project if flag.name == "use-wandb" else flag.text
        if not value:
            raise FlagError("it has no value")
        self._set("log.wandb.project", project)
        return self._set(f"log.wandb.{_WANDB[flag.name]}", value)

    def _caps_weights(self) -> bool:
        return "use-tis" in self._flags and "custom-tis-function-path" not in self._flags

    def _weights(self, flag: Flag) -> str:
        if "use-tis" not in self._flags:
            return "importance weights are clipped only with --use-tis"
        if not self._caps_weights():
            raise FlagError("the custom_tis_function decides about importance weights")
        if flag.name == "tis-clip-low":
            if self._number(flag.name, 0.0) > 0:
                raise FlagError("an importance weight has no lower limit: actor.correction.token caps it")
            return "importance weights have no lower limit"
        self._set("actor.correction.token.type", "cap")
        return self._set("actor.correction.token.cap", self._number(flag.name, 2.0))

    def _masked_sequences(self) -> str:
        if "use-opsm" not in self._flags:
            return "sequences are masked only with --use-opsm"
        if "use-rollout-logprobs" not in self._flags:
            raise FlagError(
                "without --use-rollout-logprobs slime compares the policy with that of the step's start, and "
                "actor.correction.negative with the one that sampled (docs/objectives.md)"
            )
        self._set("actor.correction.negative.errors", None)
        return self._set("actor.correction.negative.delta", self._number("opsm-delta", 1e-4))

    # ---- what a recipe cannot be without

    def _data(self) -> str:
        return self._set("data.path", self._prompts(self._flags["prompt-data"].text))

    def _prompts(self, path: str) -> str:
        """Return the path of a prompt set without slime's slice of rows."""
        file, marker, rows = path.partition("@[")
        if marker:
            self.recipe.notes.append(
                f"rows [{rows} of {file} were asked for: a prompt set is taken as a whole"
            )
        if Path(file).suffix not in (".jsonl", ".parquet"):
            raise FlagError(f"{path!r} is no .jsonl or .parquet file")
        return file

    def _machines(self) -> None:
        nodes, is_colocated = self._whole("actor-num-nodes", 1), "colocate" in self._flags
        self._settings["cluster.type"] = "slurm" if nodes > 1 else "local"
        self._settings["cluster.device"] = "gpu"
        if nodes > 1 and not is_colocated:
            self._settings["cluster.trainer_nodes"] = nodes
        if self._value("update-weight-mode", "") == "delta" or (is_colocated and nodes > 1):
            self._settings["weights.transport.type"] = "delta"
        elif is_colocated:
            self._settings["weights.transport.type"] = "tensor"
        if self._whole("context-parallel-size", 1) > 1:
            self._settings["actor.layer_spec"] = "transformer_engine"

    def _completion(self) -> None:
        hooks = [path for path in self._settings if path.startswith("rollout.hooks.")]
        if "apply-chat-template" not in self._flags and hooks:
            self._settings["rollout.hooks.apply_chat_template"] = False
        rewards = [f"rollout.hooks.{name}" for name in ("rm_type", "custom_rm", "custom_generate_function")]
        if not any(path in self._settings for path in rewards):
            self._settings["rollout.reward"] = "slipstream.rollout.reward.FinalAnswer"
            self.recipe.notes.append("the script names no reward: rollout.reward is FinalAnswer")
        if not {"eval.path", "eval.sets"} & self._settings.keys():
            for path in [path for path in self._settings if path.startswith("eval.")]:
                del self._settings[path]
        self._left_out()
        self._requirements()

    def _left_out(self) -> None:
        """Set slime's defaults of flags that the script leaves out, where Slipstream's are others."""
        clip = self._number("eps-clip", 0.2)
        defaults: Settings = {
            "actor.objective.clip_high": clip,
            "actor.optimizer.weight_decay": 0.01,
            "actor.optimizer.beta2": 0.999,
        }
        if self._settings["actor.objective.type"] != "cispo":
            defaults["actor.objective.clip_low"] = clip
        if {"eval.path", "eval.sets"} & self._settings.keys():
            defaults["eval.sampling.temperature"] = self._number("rollout-temperature", 1.0)
        if self._caps_weights():
            defaults |= {"actor.correction.token.type": "cap", "actor.correction.token.cap": 2.0}
        if self._settings.get("rollout.engine.args.enable_deterministic_inference"):
            defaults["rollout.sampling.seed"] = self._whole("rollout-seed", 42)
        self._settings |= {path: value for path, value in defaults.items() if path not in self._settings}

    def _requirements(self) -> None:
        required = {
            "model.path": "--hf-checkpoint",
            "data.path": "--prompt-data",
            "rollout.batch_size": "--rollout-batch-size",
            "rollout.n_samples_per_prompt": "--n-samples-per-prompt",
        }
        for path, flag in required.items():
            if path not in self._settings:
                self._settings[path] = 1 if "_" in path else "set/this/path.jsonl"
                self.recipe.notes.append(f"the script has no readable {flag}: set {path}")
        if "num-rollout" not in self._flags:
            self.recipe.notes.append("the script has no --num-rollout: set run.steps, which is 1000")


def _plain(flag: Flag) -> object:
    """Return the value of a flag that is passed on: a number, a text, a list, or true."""
    values = [_word(word) for word in flag.values]
    return True if not values else values[0] if len(values) == 1 else values


def _word(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def _text_of(flag: Flag) -> str:
    if len(flag.values) != 1:
        raise FlagError(f"expected one import path, found {flag.text!r}")
    return flag.values[0]


def run_name(path: Path) -> str:
    """Return a name for the run of a script."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "imported"
