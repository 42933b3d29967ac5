"""Rules about the judge of live turns and episodes."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from slipstream.configs.rules.models import JUDGE, model_folder, model_number
from slipstream.configs.rules.rule import Rule, setting
from slipstream.configs.schema import CodeJudge, RunConfig
from slipstream.configs.schema.judge import HintConfig, JudgeSection, own_engines
from slipstream.configs.violations import Violation

REWARD = "slipstream.rollout.reward.ModelVotes"
NONE_TRAINED = "it is about turns of live users, and none are trained; leave it out, or add a section `live`"


def judge_has_something_to_judge(config: RunConfig) -> Iterator[Violation]:
    judge = config.judge
    if config.live is not None and config.live.train:
        return
    if judge.type == "code":
        if judge.code != CodeJudge().code:
            yield Violation("judge.code", judge.code.path, f"{NONE_TRAINED} (rollout.reward judges episodes)")
    else:
        if config.rollout.reward is None:
            reason = (
                f"nobody asks it: expected a section `live`, or a rollout.reward that does, such as {REWARD}"
            )
            yield Violation("judge.type", "model", reason)
        if judge.hint is not None:
            yield Violation("judge.hint", "a section", NONE_TRAINED)
    for name, value in (("ask_again_s", judge.ask_again_s), ("give_up_s", judge.give_up_s)):
        if value != JudgeSection.model_fields[name].default:
            yield Violation(f"judge.{name}", value, NONE_TRAINED)


def servers_have_addresses(config: RunConfig) -> Iterator[Violation]:
    for path in ("judge.endpoint.url", "judge.hint.teacher.url"):
        url = setting(config, path, str)
        if url is None:
            continue
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield Violation(path, url, "expected http://HOST... or https://HOST...")


def votes_can_suffice(config: RunConfig) -> Iterator[Violation]:
    judge = config.judge
    if judge.type == "model" and judge.min_votes > judge.votes:
        reason = f"expected at most {judge.votes}, the number of votes that are asked for (judge.votes)"
        yield Violation("judge.min_votes", judge.min_votes, reason)


def something_is_learned(config: RunConfig) -> Iterator[Violation]:
    judge = config.judge
    if judge.type == "code" or judge.score is not None:
        return
    if judge.hint is None:
        yield Violation("judge.score", None, "without a score and without hints there is nothing to ask")
    elif judge.hint.question is None:
        reason = "expected a question: without judge.score there are no other votes that could carry hints"
        yield Violation("judge.hint.question", None, reason)
    elif judge.hint.teacher is None:
        reason = "expected a teacher: without judge.score a turn is trained by its teacher alone"
        yield Violation("judge.hint.teacher", None, reason)


def teacher_is_comparable(config: RunConfig) -> Iterator[Violation]:
    hint = _hint(config)
    if hint is None:
        return
    if hint.teacher is None and hint.choose.type == "overlap":
        reason = "expected a teacher, whose likeliest tokens are compared with the policy's"
        yield Violation("judge.hint.teacher", None, reason)
    temperature = config.rollout.sampling.temperature
    if hint.teacher is not None and temperature != 1:
        yield Violation(
            "rollout.sampling.temperature",
            temperature,
            "expected 1: a teacher's log-probs are of temperature 1 (judge.hint.teacher), and are compared "
            "with those of the policy",
        )


def scores_of_the_teacher_are_used(config: RunConfig) -> Iterator[Violation]:
    hint = _hint(config)
    if hint is None or hint.teacher is None:
        return
    terms = [
        term.type
        for term in config.actor.advantage
        if term.type == "teacher_topk" or (term.type == "teacher" and term.scores.type == "trajectory")
    ]
    if not terms:
        yield Violation(
            "judge.hint.teacher",
            hint.teacher.type,
            "its scores have no effect: actor.advantage has no term `{type: teacher}` or "
            "`{type: teacher_topk}`; add one, or leave the teacher out",
        )
    if "teacher_topk" in terms and not hint.teacher.top_k:
        reason = "expected at least 1: actor.advantage has a term teacher_topk, which needs likeliest tokens"
        yield Violation("judge.hint.teacher.top_k", hint.teacher.top_k, reason)
    elif terms and "teacher_topk" not in terms and hint.teacher.top_k:
        reason = "expected 0: no term of actor.advantage is of the type teacher_topk, which alone uses them"
        yield Violation("judge.hint.teacher.top_k", hint.teacher.top_k, reason)


def votes_end_before_the_judge(config: RunConfig) -> Iterator[Violation]:
    judge, live = config.judge, config.live
    if judge.type == "code":
        return
    limits = {"rollout.judging.timeout_s": config.rollout.judging.timeout_s} if config.rollout.reward else {}
    if live is not None and live.train:
        limits = {"live.judging.timeout_s": live.judging.timeout_s}
    for name, limit in limits.items():
        if judge.request_timeout_s >= limit:
            reason = f"expected less than {limit:g} ({name}): all votes would be lost with one that hangs"
            yield Violation("judge.request_timeout_s", judge.request_timeout_s, reason)


def teachers_engines_are_there(config: RunConfig) -> Iterator[Violation]:
    hint = _hint(config)
    if hint is None or hint.teacher is None or hint.teacher.type != "judge":
        return
    if own_engines(config.judge) is None:
        reason = (
            "the judge has no engines of its own: expected 'policy' or 'url', or judge.endpoint.type: engines"
        )
        yield Violation("judge.hint.teacher.type", "judge", reason)
        return
    policys, judges = model_number(config, "vocab_size"), model_number(config, "vocab_size", JUDGE)
    if policys and judges and policys != judges:
        yield Violation(
            JUDGE,
            str(model_folder(config, JUDGE)),
            f"its vocabulary has {judges} tokens; expected {policys}, the vocabulary of model.path, whose "
            "tokens it is to score (judge.hint.teacher)",
        )


def judges_answers_fit_its_model(config: RunConfig) -> Iterator[Violation]:
    """The length of the questions is unknown here, but each has at least one token."""
    judge, context = config.judge, model_number(config, "max_position_embeddings", JUDGE)
    if judge.type == "model" and context is not None and judge.max_new_tokens >= context:
        reason = (
            f"expected less than {context}, max_position_embeddings of {JUDGE}, to leave room for a question"
        )
        yield Violation("judge.max_new_tokens", judge.max_new_tokens, reason)


def _hint(config: RunConfig) -> HintConfig | None:
    return None if config.judge.type == "code" else config.judge.hint


RULES = (
    Rule(judge_has_something_to_judge, ("judge", "live.train", "rollout.reward")),
    Rule(servers_have_addresses, ("judge.endpoint", "judge.hint")),
    Rule(votes_can_suffice, ("judge.type", "judge.votes", "judge.min_votes")),
    Rule(something_is_learned, ("judge.type", "judge.score", "judge.hint")),
    Rule(teacher_is_comparable, ("judge.type", "judge.hint", "rollout.sampling.temperature")),
    Rule(teachers_engines_are_there, ("judge", "model.path")),
    Rule(judges_answers_fit_its_model, ("judge.type", "judge.endpoint", "judge.max_new_tokens")),
    Rule(scores_of_the_teacher_are_used, ("judge.type", "judge.hint", "actor.advantage")),
    Rule(
        votes_end_before_the_judge,
        (
            "judge.type",
            "judge.request_timeout_s",
            "live.train",
            "live.judging.timeout_s",
            "rollout.reward",
            "rollout.judging.timeout_s",
        ),
    ),
)
