"""slime's flags of what training minimises: estimator, objective, corrections, penalty and teacher."""

from slipstream.configs.schema.advantage import WHITENING
from slipstream.rollout.compat.imports.launch_script import Flag, FlagValues
from slipstream.rollout.compat.imports.recipe import ImportedRecipe
from slipstream.rollout.compat.slime.launch_flags import OWN_HOOKS, FlagError

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


class ObjectiveFlags:
    """Sets the settings of these flags in a recipe. A method returns the setting of its flag, or in words why
    it needs none, and raises FlagError for what has no counterpart.
    """

    def __init__(self, flags: FlagValues, recipe: ImportedRecipe) -> None:
        self._flags = flags
        self._recipe = recipe
        self._settings = recipe.settings

    def has_critic(self) -> bool:
        return self._flags.value("advantage-estimator", "grpo") == "ppo"

    def estimator(self) -> None:
        estimator = self._flags.value("advantage-estimator", "grpo")
        advantage, objective = _ESTIMATORS.get(estimator, ("grpo", "ppo"))
        if "disable-grpo-std-normalization" in self._flags and advantage == "grpo":
            advantage = "dr_grpo"
        if "disable-rewards-normalization" in self._flags and advantage != "gae":
            advantage = "reward"
        self._settings["actor.advantage"] = [{"type": "reward", "estimator": advantage}]
        self._settings["actor.objective.type"] = objective
        if estimator not in _ESTIMATORS:
            self._recipe.notes.append(f"--advantage-estimator {estimator} is unknown: the estimator is grpo")
        if advantage == "gae":
            self._settings["critic.path"] = None
        is_by_token = "calculate-per-token-loss" in self._flags
        self._settings["actor.averaging"] = "token" if is_by_token else "sequence"

    def clip(self, setting: str, name: str) -> str:
        if self._settings["actor.objective.type"] == "cispo" and setting == "clip_low":
            raise FlagError("this objective has no lower clip range")
        path = self._recipe.set(f"actor.objective.{setting}", self._flags.number(name, 0.2))
        if name == "eps-clip" and "eps-clip-high" not in self._flags:
            self._recipe.set("actor.objective.clip_high", self._flags.number(name, 0.2))
        return path

    def behaviour_logprobs(self) -> str:
        self._recipe.set("actor.use_decoupled_loss", "use-tis" in self._flags)
        return self._recipe.set("actor.recompute_logprobs", False)

    def dual_clip(self) -> str:
        if self._settings["actor.objective.type"] not in ("ppo", "dual_clip"):
            raise FlagError("this objective has no bound of the loss for negative advantages")
        self._settings["actor.objective.type"] = "dual_clip"
        return self._recipe.set("actor.objective.bound", self._flags.number("eps-clip-c", 3.0))

    def kl(self) -> str:
        in_loss = self._flags.number("kl-loss-coef", 0.0) if "use-kl-loss" in self._flags else 0.0
        in_reward = self._flags.number("kl-coef", 0.0)
        if not in_loss and not in_reward:
            return "the coefficient is 0: no reference model is loaded"
        self._recipe.set("actor.kl.where", "loss" if in_loss else "reward")
        estimator = self._flags.value("kl-loss-type", "k1")
        if estimator not in _KL_TYPES:
            raise FlagError(f"{estimator!r} has no counterpart; these have: {', '.join(_KL_TYPES)}")
        self._recipe.set("actor.kl.estimator", _KL_TYPES[estimator])
        return self._recipe.set("actor.kl.coefficient", in_loss or in_reward)

    def caps_weights(self) -> bool:
        return "use-tis" in self._flags and "custom-tis-function-path" not in self._flags

    def weight_notes(self) -> None:
        """Note the importance weight that slime has only with a flag."""
        if not self._flags.keys() & {"use-tis", "use-rollout-logprobs", "custom-tis-function-path"}:
            self._recipe.notes.append(
                "without --use-tis slime has no importance weight; the recipe has one, which is at most "
                "actor.correction.token.cap (default 5), and 1 where trainer and engine agree"
            )

    def weights(self, flag: Flag) -> str:
        if "use-tis" not in self._flags:
            return "importance weights are clipped only with --use-tis"
        if not self.caps_weights():
            raise FlagError("the custom_tis_function decides about importance weights")
        if flag.name == "tis-clip-low":
            if self._flags.number(flag.name, 0.0) > 0:
                raise FlagError("an importance weight has no lower limit: actor.correction.token caps it")
            return "importance weights have no lower limit"
        self._recipe.set("actor.correction.token.type", "cap")
        return self._recipe.set("actor.correction.token.cap", self._flags.number(flag.name, 2.0))

    def distillation(self) -> str:
        if "use-opd" not in self._flags:
            return "a teacher is used only with --use-opd"
        weight = self._flags.number("opd-kl-coef", 1.0)
        if weight <= 0:
            return "the coefficient is 0: no teacher is used"
        kind, load = self._flags.value("opd-type", ""), self._flags.value("opd-teacher-load", "")
        if kind not in ("megatron", "sglang"):
            raise FlagError("expected --opd-type megatron or sglang, which slime requires with --use-opd")
        if (kind == "megatron") != bool(load):
            raise FlagError(
                "expected --opd-teacher-load with --opd-type megatron, and none with --opd-type sglang"
            )
        scores = {"type": "model", "path": load} if load else {"type": "trajectory"}
        term = {"type": "teacher", "weight": weight, "clip": None, "scores": scores}
        return self._recipe.set("actor.advantage", [self._settings["actor.advantage"][0], term])

    def teacher_notes(self) -> None:
        """Note what the user still has to do for a teacher."""
        terms = self._settings.get("actor.advantage", [])
        for scores in (term["scores"] for term in terms if term["type"] == "teacher"):
            if scores["type"] == "model":
                self._recipe.notes.append(
                    f"the teacher {scores['path']} is a checkpoint of Megatron's in slime, expected a "
                    "directory in the format of Hugging Face: set the path in actor.advantage"
                )
            elif self._settings.get("rollout.hooks.custom_rm") not in OWN_HOOKS.values():
                self._recipe.notes.append(
                    "with --opd-type sglang a generate function, a rollout_sample_hook or the custom_rm has "
                    "to set teacher_log_probs: a custom_reward_post_process comes too late (docs/slime.md)"
                )

    def normalization(self) -> str:
        estimator = self._settings["actor.advantage"][0]["estimator"]
        if estimator in WHITENING:
            return f"the estimator {estimator} normalizes over the batch by itself"
        # slime adds 1e-8 to the variance.
        return self._recipe.set("actor.advantage_norm.eps", 1e-4)

    def masked_sequences(self) -> str:
        if "use-opsm" not in self._flags:
            return "sequences are masked only with --use-opsm"
        if "use-rollout-logprobs" not in self._flags:
            raise FlagError(
                "without --use-rollout-logprobs slime compares the policy with that of the step's start, and "
                "actor.correction.negative with the one that sampled (docs/objectives.md)"
            )
        self._recipe.set("actor.correction.negative.errors", None)
        return self._recipe.set("actor.correction.negative.delta", self._flags.number("opsm-delta", 1e-4))
