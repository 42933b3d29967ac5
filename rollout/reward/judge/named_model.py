"""The part of the recipe's section ``judge`` that judge processes are given."""

from slipstream.configs.schema import Judge, ModelConfig, ModelJudge, PluginConfig
from slipstream.rollout.reward.judge.wire import ModelSetup

TURN_VOTES = PluginConfig(path="slipstream.rollout.reward.model.turns.TurnVotes")


def judge_of_turns(judge: Judge) -> PluginConfig:
    """Return the code that judges turns of live users."""
    return TURN_VOTES if isinstance(judge, ModelJudge) else judge.code


def named_model(judge: Judge, policy: ModelConfig) -> ModelSetup | None:
    """Return the language model that judges; None: none does."""
    if not isinstance(judge, ModelJudge):
        return None
    return ModelSetup(judge.model_dump(mode="json"), str(policy.path.absolute()), dict(policy.template_args))
