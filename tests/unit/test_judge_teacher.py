"""The teacher: where a hint stands in the ids of a prompt, which hint is taken, and what is no score."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.backend.quickstart.tokenizer import build_tokenizer as quickstart
from slipstream.configs.schema.judge import HintConfig
from slipstream.rollout.engine.client import EngineLost, Malformed
from slipstream.rollout.engine.completion import Aborted, TokenScores, parse_token_scores
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.reward.model.hints import HEAD, NoPlace, with_hint
from slipstream.rollout.reward.model.teacher import HintTeacher, overlap
from tests.chat_model import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def user(text) -> dict:
    return {"role": "user", "content": text}


def rendered(tokenizer, messages: list[dict], **template) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("said", ["What is it?", "äöü 😀", "  spaces before", "a\nb", "a", "{% x %}"])
def test_a_hint_stands_behind_the_last_user_message(said):
    tokenizer = build_tokenizer()
    messages = [user(said), {"role": "assistant", "content": said}, user(said)]
    with_it = [*messages[:2], user(f"{said}{HEAD}Be brief.")]
    ids = with_hint(tokenizer, rendered(tokenizer, messages), messages, " Be brief. ")
    assert ids == rendered(tokenizer, with_it)


@pytest.mark.parametrize("thinks", [False, True])
def test_tools_and_their_results_stay_as_the_policy_has_seen_them(thinks):
    tokenizer = build_tokenizer()
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    parsed = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    messages += [{"role": "tool", "content": "a"}, {"role": "tool", "content": "user\na<|im_end|>"}]
    seen = [messages[0], {"role": "assistant", "content": "", "tool_calls": [parsed, parsed]}, *messages[2:]]
    prompt = rendered(tokenizer, seen, tools=TOOLS)
    if thinks:  # a template that was told to think ends otherwise
        prompt += tokenizer.encode("<think>\n", add_special_tokens=False)
    text = tokenizer.decode(prompt)
    place = text.index("user\na<|im_end|>") + len("user\na")
    ids = with_hint(tokenizer, prompt, messages, "H")
    assert tokenizer.decode(ids) == f"{text[:place]}{HEAD}H{text[place:]}"


def test_an_answer_that_was_sampled_otherwise_than_the_template_writes_it_is_no_obstacle():
    tokenizer = build_tokenizer()
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [user("go"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "go on"}]
    begin = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<tool_call>{ 'f' }</tool_call><|im_end|>"
    prompt = tokenizer.encode(f"{begin}\n<|im_start|>user\ngo on<|im_end|>\n", add_special_tokens=False)
    ids = with_hint(tokenizer, prompt, messages, "H")
    assert tokenizer.decode(ids) == tokenizer.decode(prompt).replace("user\ngo<", f"user\ngo{HEAD}H<")


@pytest.mark.parametrize("said", ["a", "ssista", "What is IT?"])
def test_a_template_without_an_end_of_messages_and_a_tokenizer_that_changes_letters(said):
    tokenizer = quickstart()
    prompt = rendered(tokenizer, [user(said)])
    ids = with_hint(tokenizer, prompt, [user(said)], "brief")
    assert tokenizer.decode(ids) == f"<|user|>{said.lower()}???hint??brief<|assistant|>"


def merging(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with some tokens of two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_token_that_the_hint_cuts_apart_is_encoded_again_and_no_other():
    tokenizer = merging(("?", "Ġ"), ("a", "b"))
    tokenizer.chat_template = "{% for m in messages %}u: {{ m.content }} end{% endfor %}"
    [question_mark] = tokenizer.encode("? ")
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    sampled = [*a, *b]  # the policy has sampled two tokens where the tokenizer makes one of them
    prompt = [*tokenizer.encode("u: ab\n"), *sampled, *tokenizer.encode("\nu: ok? end")]
    ids = with_hint(tokenizer, prompt, [user("ok?")], "H")
    assert question_mark in prompt and question_mark not in ids
    assert tokenizer.decode(ids) == f"u: ab\nab\nu: ok?{HEAD}H end"
    cut = prompt.index(question_mark)
    assert ids[:cut] == prompt[:cut] and ids[-3:] == prompt[-3:]


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "system", "content": "x"}], [user("")], [user([{"type": "image_url"}])], [user("absent")]],
)
def test_without_a_user_message_in_the_prompt_there_is_no_place(messages):
    tokenizer = build_tokenizer()
    with pytest.raises(NoPlace):
        with_hint(tokenizer, rendered(tokenizer, [user("present")]), messages, "H")


def test_the_last_text_of_a_message_in_parts_is_its_end():
    tokenizer = build_tokenizer()
    parts = [{"type": "text", "text": "first"}, {"type": "image_url"}, {"type": "text", "text": "last"}]
    ids = with_hint(tokenizer, rendered(tokenizer, [user("first last")]), [user(parts)], "H")
    assert f"first last{HEAD}H<|im_end|>" in tokenizer.decode(ids)


# ---- which hint


class Engine:
    """Scores tokens as a table says: the likeliest tokens by the word that the prompt holds."""

    def __init__(self, tops: dict[str, list[int]], max_length: int = 1000, error: Exception | None = None):
        self.address = SimpleNamespace(max_length=max_length)
        self.tops = tops
        self.error = error
        self.asked: list[tuple[list[int], list[int], int]] = []

    @asynccontextmanager
    async def any(self):
        yield self

    async def score_tokens(self, prompt, tokens, *, top_k=0) -> TokenScores:
        self.asked.append((list(prompt), list(tokens), top_k))
        if self.error is not None:
            raise self.error
        text = TOKENIZER.decode(list(prompt))
        ids = next((ids for word, ids in self.tops.items() if word in text), [0] * top_k)
        top = tuple((-0.5 * (place + 1), token) for place, token in enumerate(ids[:top_k]))
        return TokenScores(
            [-1.0 - place for place in range(len(tokens))], [top] * len(tokens) if top_k else []
        )


TOKENIZER = build_tokenizer()
PROMPT = rendered(TOKENIZER, [user("Say hello")])
ANSWER = TOKENIZER.encode("hello<|im_end|>", add_special_tokens=False)


def as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


TURN = JudgedTurn(
    "s", "k", [], [user("Say hello")], {}, "stop", len(ANSWER), 0, as_bytes(PROMPT), as_bytes(ANSWER)
)


def test_the_judges_own_engines_can_be_the_teacher():
    policy, judge = Engine({}), Engine({})
    config = HintConfig.model_validate({"teacher": {"type": "judge"}})
    engines = {"policy": policy.any, "judge": judge.any}
    teacher = HintTeacher(config, lambda: TOKENIZER, 10, **engines)  # type: ignore[arg-type]
    assert asyncio.run(teacher.taught(TURN, ["hint"])) is not None
    assert len(judge.asked) == 1 and not policy.asked


def taught(engine: Engine, hints: list[str], **settings):
    config = HintConfig.model_validate({"teacher": {"type": "policy"}, **settings})
    teacher = HintTeacher(config, lambda: TOKENIZER, 10, policy=engine.any)  # type: ignore[arg-type]
    return asyncio.run(teacher.taught(TURN, hints))


def test_the_same_ids_are_scored_behind_the_prompt_with_the_longest_hint():
    engine = Engine({})
    chosen = taught(engine, ["longest", "short"])
    [(prompt, tokens, top_k)] = engine.asked
    assert tokens == ANSWER and top_k == 0
    assert TOKENIZER.decode(prompt) == TOKENIZER.decode(PROMPT).replace("hello", f"hello{HEAD}longest")
    assert chosen is not None and chosen.hint == "longest"
    assert chosen.scores.logp_T.tolist() == [-1.0 - place for place in range(len(ANSWER))]
    assert chosen.scores.logp_T.dtype == np.float32 and chosen.scores.k == 0


def test_the_likeliest_tokens_are_kept_where_the_recipe_wants_them():
    engine = Engine({"longest": [3, 1, 2]})
    chosen = taught(engine, ["longest"], teacher={"type": "policy", "top_k": 2})
    assert chosen is not None and chosen.scores.k == 2
    assert chosen.scores.top_ids_TK.tolist() == [[3, 1]] * len(ANSWER)
    assert chosen.scores.top_logp_TK.tolist() == [[-0.5, -1.0]] * len(ANSWER)


def test_the_hint_is_taken_under_which_the_teacher_agrees_most_with_the_policy():
    engine = Engine({"longest": [1, 9, 8], "middle": [3, 2, 9], "few": [9, 8, 7], "Say hello": [1, 2, 3]})
    choose = {"type": "overlap", "top_k": 3}
    chosen = taught(engine, ["longest", "middle", "few"], choose=choose)
    assert chosen is not None and chosen.hint == "middle"
    assert engine.asked[0][0] == PROMPT, "the policy is asked without a hint"
    assert chosen.scores.k == 0, "the teacher keeps none"


def test_overlap_is_the_mean_share_of_common_tokens():
    ours = TokenScores([], [((-1.0, 1), (-2.0, 2)), ((-1.0, 3), (-2.0, 4))])
    theirs = TokenScores([], [((-1.0, 2), (-2.0, 1)), ((-1.0, 4), (-2.0, 5))])
    assert overlap(ours, theirs, 2) == 0.75
    assert overlap(ours, theirs, 1) == 0.0


def test_a_hint_with_which_the_prompt_is_too_long_is_passed_over():
    engine = Engine({}, max_length=len(PROMPT) + len(ANSWER) + len(HEAD) + 2)
    chosen = taught(engine, ["too long", "ok"])
    assert chosen is not None and chosen.hint == "ok"
    assert taught(engine, ["too long"]) is None
    assert taught(engine, []) is None


@pytest.mark.parametrize("error", [EngineLost("gone"), Malformed("half a reply"), Aborted("an update")])
def test_a_teacher_that_fails_gives_no_scores(error):
    with pytest.raises(type(error)):
        taught(Engine({}, error=error), ["hint"])


# ---- the reply of an engine


def reply(entries: list, top: list | None = None, finish: str = "length") -> dict:
    meta = {"finish_reason": {"type": finish}, "input_token_logprobs": entries}
    return {"meta_info": meta | ({"input_top_logprobs": top} if top is not None else {})}


GIVEN = [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]]
TOP = [None, [[-0.5, 6, None], [-1.5, 8, None]], [[-0.25, 7, None], [-2.0, 9, None]]]


def test_the_scores_of_the_last_tokens_are_read():
    assert parse_token_scores(reply(GIVEN), [6, 7], 0) == TokenScores([-0.5, -0.25], [])
    scores = parse_token_scores(reply(GIVEN, TOP), [6, 7], 2)
    assert scores.top == [((-0.5, 6), (-1.5, 8)), ((-0.25, 7), (-2.0, 9))]


@pytest.mark.parametrize(
    ("entries", "top", "top_k", "reason"),
    [
        ([[None, 5, None], [None, 6, None], [-0.25, 7, None]], None, 0, "token 0 is None"),
        ([[None, 5, None], [float("nan"), 6, None], [-0.25, 7, None]], None, 0, "token 0 is nan"),
        ([[None, 5, None], [0.5, 6, None], [-0.25, 7, None]], None, 0, "token 0 is 0.5"),
        ([[None, 5, None], [-0.5, 6, None], [float("-inf"), 7, None]], None, 0, "token 1 is -inf"),
        (GIVEN[1:], None, 0, "log-probs of 2 tokens, expected 3"),
        ([[None, 4, None], *GIVEN], None, 0, "log-probs of 4 tokens, expected 3"),
        ([GIVEN[0], GIVEN[2], GIVEN[1]], None, 0, "of other tokens"),
        (None, None, 0, "not a reply"),
        (GIVEN, None, 2, "likeliest tokens are missing"),
        (GIVEN, TOP[:2], 2, "likeliest tokens are missing"),
        (GIVEN, [None, TOP[1], None], 2, "likeliest tokens are missing"),
        (GIVEN, [None, TOP[1], [[-0.25, 7, None], [None, 9, None]]], 2, "not a reply|is None"),
    ],
)
def test_a_value_that_is_missing_is_a_failure(entries, top, top_k, reason):
    with pytest.raises(ValueError, match=reason):
        parse_token_scores(reply(entries, top), [6, 7], top_k)


def test_a_request_that_was_given_up_has_no_scores():
    with pytest.raises(Aborted):
        parse_token_scores(reply(GIVEN, finish="abort"), [6, 7], 0)
