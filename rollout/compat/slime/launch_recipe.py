"""Makes a recipe of a slime launch script: what it knows, and the rest with its reason.

script ──► flags ──► settings ──► loader ──► settings that it refuses are taken out again, with its reason
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from slipstream.configs.installed import MEGATRON, SGLANG, Library
from slipstream.rollout.compat.imports.launch_script import (
    Flag,
    FlagValues,
    LaunchScript,
    UnreadableScript,
    read_launch_script,
)
from slipstream.rollout.compat.imports.recipe import (
    MAPPED,
    NEEDS_NOTHING,
    REFUSES,
    UNKNOWN,
    FlagOutcome,
    ImportedRecipe,
    Settings,
)
from slipstream.rollout.compat.slime.launch_flags import (
    DATA,
    DEFAULT_HOOKS,
    HOOKS,
    NEEDLESS,
    OWN_HOOKS,
    PIPELINE,
    REFUSED,
    SETTINGS,
    TEACHER_READ,
    FlagError,
    is_supervised,
)
from slipstream.rollout.compat.slime.launch_objective import ObjectiveFlags

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

_FALLBACKS = {
    "model.path": "models/policy",
    "data.path": "set/this/path.jsonl",
    "rollout.batch_size": 1,
    "rollout.n_samples_per_prompt": 8,
    "rollout.reward": "slipstream.rollout.reward.FinalAnswer",
}
"""Settings that a recipe cannot be without, where the loader refuses what the script says."""

_USUAL_BOUND = 4
"""Bound on the lag for scripts of slime's fully asynchronous rollout, which has none."""


def read_recipe(
    files: Sequence[Path], overrides: Sequence[str], name: str
) -> tuple[ImportedRecipe, Collection[str]]:
    """Return the recipe of the one launch script in ``files``, and all flags that are known.

    ``name``: of the run. Raises OSError, and UnreadableScript for what is no such script.
    """
    if len(files) != 1 or overrides:
        raise UnreadableScript("expected one launch script of slime: change its flags in the script itself")
    script = read_launch_script(files[0], os.environ)
    if is_supervised(script):
        raise UnreadableScript(
            f"{files[0]} trains on given responses (--loss-type sft_loss), expected reinforcement: write a "
            "recipe of `slipstream sft` (configs/recipes/sft-qwen3-4b-1n8g-dp8.yaml is one)"
        )
    return recipe_of(script, name), {*SETTINGS, *HOOKS, *NEEDLESS, *REFUSED}


def recipe_of(script: LaunchScript, name: str) -> ImportedRecipe:
    """Return the recipe of a script. ``name``: of the run. The loader has not seen it."""
    return _Import(script, name).recipe


class _Import:
    def __init__(self, script: LaunchScript, name: str) -> None:
        self.recipe = ImportedRecipe("slime", "--{} {}", notes=list(script.notes), fallbacks=dict(_FALLBACKS))
        self._settings = self.recipe.settings
        self._all_flags = script.flags
        self._flags = FlagValues(script.flags)
        self._objective = ObjectiveFlags(self._flags, self.recipe)
        self._trainer = script.trainer
        self._settings |= {"run.name": name, "run.steps": 1000}
        self._settings["data.shuffle"] = "rollout-shuffle" in self._flags
        self._derived: dict[str, Callable[[], str]] = {
            "actor-num-nodes": lambda: "actor.parallel.data",
            "actor-num-gpus-per-node": lambda: "actor.parallel.data",
            "rollout-shuffle": lambda: "data.shuffle",
            "rollout-num-gpus": lambda: "rollout.engine.count",
            "rollout-num-gpus-per-engine": lambda: "rollout.engine.tensor_parallel",
            **dict.fromkeys(DATA, self._data_parallel),
            "sglang-enable-dp-attention": lambda: "rollout.engine.data_parallel",
            "sequence-parallel": lambda: self.recipe.set(
                "actor.parallel.sequence", self._flags.whole("tensor-model-parallel-size", 1) > 1
            ),
            "max-tokens-per-gpu": self._microbatch,
            "global-batch-size": self._minibatches,
            "over-sampling-batch-size": self._over_sampling,
            "advantage-estimator": lambda: "actor.advantage",
            "eps-clip": lambda: self._objective.clip("clip_low", "eps-clip"),
            "eps-clip-high": lambda: self._objective.clip("clip_high", "eps-clip-high"),
            "eps-clip-c": self._objective.dual_clip,
            "calculate-per-token-loss": lambda: "actor.averaging",
            "disable-grpo-std-normalization": lambda: "actor.advantage",
            "eval-prompt-data": self._eval_prompts,
            "prompt-data": lambda: self.recipe.set(
                "data.path", self._prompts(self._flags["prompt-data"].text)
            ),
            "update-weight-mode": lambda: "weights.transport.type",
            "disable-rewards-normalization": lambda: "actor.advantage",
            "update-weights-interval": lambda: "rollout.max_head_offpolicyness",
            "use-tis": lambda: self.recipe.set("actor.use_decoupled_loss", True),
            "use-rollout-logprobs": self._objective.behaviour_logprobs,
            "rollout-stop": lambda: self.recipe.set(
                "rollout.sampling.stop", list(self._flags["rollout-stop"].values)
            ),
            "rollout-stop-token-ids": self._stop_tokens,
            "decoder-last-pipeline-num-layers": self._pipeline_layers,
            "decoder-first-pipeline-num-layers": self._pipeline_layers,
            "sglang-server-concurrency": self._concurrency,
            "rollout-seed": lambda: self.recipe.set("run.seed", self._flags.whole("rollout-seed", 0)),
        }
        self._objective.estimator()
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
            if path.startswith("critic.") and not self._objective.has_critic():
                return FlagOutcome(flag, NEEDS_NOTHING, "there is no critic without the advantage `gae`")
            return FlagOutcome(flag, MAPPED, self.recipe.set(path, convert(flag.text)))
        if flag.name.startswith("sglang-") and flag.name not in REFUSED:
            name = flag.name.removeprefix("sglang-").replace("-", "_")
            return self._passed_on(flag, SGLANG, name, _plain(flag))
        return None

    def _passed_on(self, flag: Flag, library: Library, name: str, value: object) -> FlagOutcome:
        if (reason := library.refusal(name, value)) is not None:
            return FlagOutcome(flag, REFUSES, reason)
        return FlagOutcome(flag, MAPPED, self.recipe.set(f"{library.section}.{name}", value))

    def _other(self, flag: Flag) -> FlagOutcome:
        decide = {
            "optimizer": lambda: self._expected(flag, "adam", "the optimizer is Adam"),
            "attention-dropout": lambda: self._no_dropout(flag),
            "hidden-dropout": lambda: self._no_dropout(flag),
            "lora-dropout": lambda: self._no_dropout(flag),
            "kl-loss-type": self._objective.kl,
            "kl-loss-coef": self._objective.kl,
            "kl-coef": self._objective.kl,
            "use-kl-loss": self._objective.kl,
            "lr-decay-style": self._decay,
            "min-lr": self._decay,
            "lr-decay-iters": self._decay,
            "lr-warmup-fraction": self._warmup,
            **dict.fromkeys(_WANDB, lambda: self._wandb(flag)),
            "tis-clip": lambda: self._objective.weights(flag),
            "tis-clip-low": lambda: self._objective.weights(flag),
            "use-opsm": self._objective.masked_sequences,
            "opsm-delta": self._objective.masked_sequences,
            "normalize-advantages": self._objective.normalization,
            "num-epoch": self._epochs,
            **dict.fromkeys(
                ("use-opd", "opd-type", "opd-kl-coef", "opd-teacher-load"), self._objective.distillation
            ),
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
            return self._passed_on(flag, MEGATRON, name, value)
        return FlagOutcome(flag, UNKNOWN, "Slipstream knows no such flag of slime")

    def _hook(self, flag: Flag) -> FlagOutcome:
        if flag.text in DEFAULT_HOOKS:
            return FlagOutcome(flag, NEEDS_NOTHING, "Slipstream does the same without a hook")
        if flag.text == TEACHER_READ:
            return FlagOutcome(flag, NEEDS_NOTHING, "the custom_rm sets teacher_log_probs by itself")
        if "fully_async" in flag.text or "streaming" in flag.text:
            return FlagOutcome(flag, MAPPED, "rollout.max_head_offpolicyness")
        if "sleep" in flag.text.split(".")[-1]:
            return FlagOutcome(flag, REFUSES, "it is a tool of slime's developers")
        value: object = _text_of(flag)
        value = OWN_HOOKS.get(str(value), value)
        if flag.name == "rollout-sample-hook-path":  # the flag may stand several times
            value = [_text_of(each) for each in self._all_flags if each.name == flag.name]
        return FlagOutcome(flag, MAPPED, self.recipe.set(f"rollout.hooks.{HOOKS[flag.name]}", value))

    # ---- several flags together

    def _placement(self) -> None:
        gpus = self._flags.whole("actor-num-nodes", 1) * self._flags.whole("actor-num-gpus-per-node", 8)
        names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        share = 1
        for name in names:
            share *= self._flags.whole(name, 1)
        self._settings["actor.parallel.data"] = max(1, gpus // share)
        if gpus % share:
            self.recipe.notes.append(f"{gpus} GPUs of the trainer are no multiple of its layout's {share}")
        per_engine = self._flags.whole("rollout-num-gpus-per-engine", 1)
        of_rollout = gpus if "colocate" in self._flags else self._flags.whole("rollout-num-gpus", gpus)
        self._settings["rollout.engine.count"] = max(1, of_rollout // per_engine)
        if "rollout-num-gpus-per-engine" in self._flags:
            self._settings["rollout.engine.tensor_parallel"] = max(1, per_engine // self._stages())
        nodes = -(-per_engine // self._flags.whole("num-gpus-per-node", 8))
        if nodes > 1:
            self._settings["rollout.engine.nodes"] = nodes
        self._settings["rollout.max_head_offpolicyness"] = self._bound()

    def _bound(self) -> int:
        if self._trainer == "train.py":
            return 0
        path = self._flags.value("rollout-function-path", "")
        if "fully_async" in path:
            self.recipe.notes.append(
                f"this rollout function has no bound: rollout.max_head_offpolicyness is {_USUAL_BOUND}"
            )
            return _USUAL_BOUND
        return max(1, self._flags.whole("update-weights-interval", 1))

    def _stages(self) -> int:
        """Return the number of pipeline stages of an engine."""
        return max(self._flags.whole(name, 1) for name in PIPELINE)

    def _data_parallel(self) -> str:
        if "sglang-enable-dp-attention" not in self._flags:
            raise FlagError(
                "without sglang-enable-dp-attention it makes several engines of one: "
                "raise rollout.engine.count"
            )
        return self.recipe.set(
            "rollout.engine.data_parallel", max(self._flags.whole(name, 1) for name in DATA)
        )

    def _microbatch(self) -> str:
        tokens = self._flags.whole("max-tokens-per-gpu", 8192) * self._flags.whole("context-parallel-size", 1)
        return self.recipe.set("actor.microbatch_tokens", tokens)

    def _minibatches(self) -> str:
        trajectories = self._flags.whole("rollout-batch-size", 1) * self._flags.whole(
            "n-samples-per-prompt", 1
        )
        size = self._flags.whole("global-batch-size", trajectories)
        if not size or trajectories % size:
            raise FlagError(f"{trajectories} trajectories do not divide into mini-batches of {size}")
        return self.recipe.set("actor.minibatches", trajectories // size)

    def _over_sampling(self) -> str:
        ratio = self._flags.whole("over-sampling-batch-size", 1) / max(
            1, self._flags.whole("rollout-batch-size", 1)
        )
        return self.recipe.set("rollout.over_sampling", max(1.0, ratio))

    def _concurrency(self) -> str:
        each = self._flags.whole("sglang-server-concurrency", 512)
        return self.recipe.set("rollout.max_concurrent", each * self._settings["rollout.engine.count"])

    def _eval_prompts(self) -> str:
        words = self._flags["eval-prompt-data"].values
        if not words:
            raise FlagError("it has no value")
        if len(words) > 1:
            pairs = zip(words[::2], words[1::2], strict=False)
            return self.recipe.set(
                "eval.sets", [{"name": name, "path": self._prompts(path)} for name, path in pairs]
            )
        return self.recipe.set("eval.path", self._prompts(words[len(words) - 1]))

    def _stops(self) -> str:
        return self.recipe.set("rollout.sampling.stop", list(self._flags["rollout-stop"].values))

    def _stop_tokens(self) -> str:
        try:
            ids = [int(word) for word in self._flags["rollout-stop-token-ids"].values]
        except ValueError:
            raise FlagError("expected token ids") from None
        return self.recipe.set("rollout.sampling.stop_token_ids", ids)

    def _pipeline_layers(self) -> str:
        stages, layers = (
            self._flags.whole("pipeline-model-parallel-size", 1),
            self._flags.whole("num-layers", 0),
        )
        first = self._flags.whole("decoder-first-pipeline-num-layers", 0)
        last = self._flags.whole("decoder-last-pipeline-num-layers", 0)
        ends = bool(first) + bool(last)
        middle = layers - first - last
        if stages < 2 or middle <= 0 or stages <= ends or middle % (stages - ends):
            raise FlagError(f"{layers} layers cannot be spread so over {stages} pipeline stages")
        share = middle // (stages - ends)
        spread = [first] * bool(first) + [share] * (stages - ends) + [last] * bool(last)
        return self.recipe.set("actor.parallel.layers", spread)

    # ---- flags whose value decides

    def _expected(self, flag: Flag, value: str, reason: str) -> str:
        if flag.text != value:
            raise FlagError(reason)
        return reason

    def _no_dropout(self, flag: Flag) -> str:
        if self._flags.number(flag.name, 0.0):
            raise FlagError("Slipstream trains without dropout")
        return "Slipstream trains without dropout"

    def _decay(self) -> str:
        style = self._flags.value("lr-decay-style", "constant")
        if style not in ("constant", "linear", "cosine"):
            raise FlagError(f"{style!r} has no counterpart; these have: constant, linear, cosine")
        if style != "constant":
            self.recipe.set("actor.optimizer.decay.min_lr", self._flags.number("min-lr", 0.0))
        return self.recipe.set("actor.optimizer.decay.type", style)

    def _epochs(self) -> str:
        if "num-rollout" in self._flags:
            return "--num-rollout gives the length of the run"
        epochs = self._flags.whole("num-epoch", 0)
        if epochs < 1:
            raise FlagError(f"expected a number of epochs, found {self._flags['num-epoch'].text!r}")
        self._settings.pop("run.steps", None)
        return self.recipe.set("run.epochs", epochs)

    def _warmup(self) -> str:
        if "num-epoch" in self._flags and "num-rollout" not in self._flags:
            raise FlagError(
                "the steps of --num-epoch are known once the prompts are counted: set "
                "actor.optimizer.warmup_steps"
            )
        steps = round(self._flags.number("lr-warmup-fraction", 0.0) * self._flags.whole("num-rollout", 1000))
        return self.recipe.set("actor.optimizer.warmup_steps", steps)

    def _wandb(self, flag: Flag) -> str:
        if "use-wandb" not in self._flags or self._flags.value("wandb-mode", "") == "disabled":
            return "metrics go to Weights & Biases only with --use-wandb"
        project = self._flags.value("wandb-project", "")
        if not project:
            raise FlagError("log.wandb needs a project: name it with --wandb-project")
        value = project if flag.name == "use-wandb" else flag.text
        if not value:
            raise FlagError("it has no value")
        self.recipe.set("log.wandb.project", project)
        return self.recipe.set(f"log.wandb.{_WANDB[flag.name]}", value)

    # ---- what a recipe cannot be without

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
        nodes, is_colocated = self._flags.whole("actor-num-nodes", 1), "colocate" in self._flags
        spread = self._settings.get("rollout.engine.nodes", 1) > 1
        self._settings["cluster.type"] = "slurm" if nodes > 1 or spread else "local"
        self._settings["cluster.device"] = "gpu"
        if nodes > 1 and not is_colocated:
            self._settings["cluster.trainer_nodes"] = nodes
        if (is_colocated and spread) or self._stages() > 1:
            self._settings["weights.transport.type"] = "disk"
        elif self._flags.value("update-weight-mode", "") == "delta" or (is_colocated and nodes > 1):
            self._settings["weights.transport.type"] = "delta"
        elif is_colocated:
            self._settings["weights.transport.type"] = "tensor"
        if self._flags.whole("context-parallel-size", 1) > 1:
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
        self._objective.teacher_notes()
        self._objective.weight_notes()

    def _left_out(self) -> None:
        """Set slime's defaults of flags that the script leaves out, where Slipstream's are others."""
        clip = self._flags.number("eps-clip", 0.2)
        defaults: Settings = {
            "actor.objective.clip_high": clip,
            "actor.optimizer.weight_decay": 0.01,
            "actor.optimizer.beta2": 0.999,
            "actor.optimizer.distributed": True,  # slime sets it in its code
        }
        if self._settings["actor.objective.type"] != "cispo":
            defaults["actor.objective.clip_low"] = clip
        if {"eval.path", "eval.sets"} & self._settings.keys():
            defaults["eval.sampling.temperature"] = self._flags.number("rollout-temperature", 1.0)
        if self._objective.has_critic():
            defaults["critic.value_clip"] = 0.2
        if self._objective.caps_weights():
            defaults |= {"actor.correction.token.type": "cap", "actor.correction.token.cap": 2.0}
        if self._settings.get("rollout.engine.args.enable_deterministic_inference"):
            defaults["rollout.sampling.seed"] = self._flags.whole("rollout-seed", 42)
        defaults = {path: value for path, value in defaults.items() if path not in self._settings}
        self._settings |= defaults
        self.recipe.defaults = frozenset(defaults)

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
        if "num-rollout" not in self._flags and "run.epochs" not in self._settings:
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
