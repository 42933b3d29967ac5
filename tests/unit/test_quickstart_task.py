"""The quickstart's task and tokenizer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.tokenizer import (
    ASSISTANT,
    EOS,
    SYMBOLS,
    USER,
    build_tokenizer,
    demonstration_text,
    prompt_text,
)

digits = st.lists(st.integers(0, 9), min_size=task.MIN_OPERANDS, max_size=task.MAX_OPERANDS)
symbols = st.text(SYMBOLS, max_size=40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """As an engine sees it: saved, then loaded by AutoTokenizer."""
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def gold_demonstration(prompt: str) -> str:
    """The response that is right at every step."""
    return task.noisy_demonstration(prompt, random.Random(0), habit_rate=0)


def test_the_formats_are_the_documented_ones():
    assert task.problem_of([3, 5, 8, 9]) == task.Problem(prompt="a3b5c8d9", label="5")
    assert gold_demonstration("a3b5c8d9") == "a33b58c86d95#5"


@given(digits)
def test_the_gold_demonstration_is_correct_and_three_symbols_per_operand(operands: list[int]):
    problem = task.problem_of(operands)
    response = gold_demonstration(problem.prompt)
    assert task.operands_of(problem.prompt) == operands
    assert task.is_correct(response, problem.label)
    assert len(response) == 3 * len(operands) + 2


@given(digits, st.integers())
def test_a_noisy_demonstration_differs_from_the_true_sums_only_after_an_eight_or_nine(
    operands: list[int], seed: int
):
    response = task.noisy_demonstration(task.problem_of(operands).prompt, random.Random(seed))
    sums = [int(digit) for digit in response[2 : 3 * len(operands) : 3]]
    for operand, before, after in zip(operands, [0, *sums], sums, strict=False):
        error = (after - before - operand) % 10
        assert error == 0 or (error == 1 and operand in task.HABIT_OPERANDS)
    assert response.endswith(f"#{sums[-1]}")


def test_the_habit_has_its_rate():
    rng = random.Random(0)
    wrong = sum(task.noisy_demonstration("a0b9", rng) != "a00b99#9" for _ in range(2000))
    assert wrong / 2000 == pytest.approx(task.HABIT_RATE, abs=0.03)


@pytest.mark.parametrize(
    "response", ["", "5", "a33", "a33#", "a33#4", "a33#55", "a33#5#5", "#5#", "a33# 5", "a33#5?"]
)
def test_anything_but_one_mark_and_then_the_label_is_wrong(response: str):
    assert not task.is_correct(response, "5")


def test_train_and_held_out_prompts_are_disjoint_even_across_seeds():
    train = {problem.prompt for problem in task.train_set(seed=0, count=3000)}
    held_out = {problem.prompt for seed in range(3) for problem in task.held_out_set(seed, count=200)}
    assert not train & held_out


def test_the_sets_are_a_function_of_the_seed_and_held_out_prompts_are_distinct():
    assert task.train_set(1, 50) == task.train_set(1, 50) != task.train_set(2, 50)
    held_out = task.held_out_set(1, 300)
    assert held_out == task.held_out_set(1, 300) != task.held_out_set(2, 300)
    assert len({problem.prompt for problem in held_out}) == 300


def test_lengths_are_long_tailed_and_bounded():
    counts = sorted(len(task.operands_of(problem.prompt)) for problem in task.train_set(0, 4000))
    assert counts[0] == task.MIN_OPERANDS
    assert counts[-1] == task.MAX_OPERANDS
    assert counts[2000] * 2 <= counts[3800]


@given(prompt=symbols)
def test_the_chat_template_gives_the_ids_of_the_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str):
    ids = _ids(tokenizer, [_turn("user", prompt)], add_generation_prompt=True)
    assert ids == tokenizer(prompt_text(prompt))["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids(USER)
    assert ids[-1] == tokenizer.convert_tokens_to_ids(ASSISTANT)
    assert len(ids) == len(prompt) + 2


@given(prompt=symbols, response=symbols)
def test_the_chat_template_and_the_demonstration_text_agree(
    tokenizer: PreTrainedTokenizerFast, prompt: str, response: str
):
    ids = _ids(tokenizer, [_turn("user", prompt), _turn("assistant", response)])
    assert ids == tokenizer(demonstration_text(prompt, response))["input_ids"]


@given(text=symbols)
def test_decoding_gives_the_contiguous_text_back(tokenizer: PreTrainedTokenizerFast, text: str):
    ids = tokenizer(f"{text}{EOS}")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(texts=st.lists(symbols, min_size=1, max_size=4), response=symbols)
def test_a_later_turn_extends_the_prompt_and_the_sampled_response(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], response: str
):
    messages = [
        _turn(role, text) for role, text in zip(["system", "user", "assistant", "tool"], texts, strict=False)
    ]
    prompt = _ids(tokenizer, messages, add_generation_prompt=True)
    sampled = tokenizer(f"{response}{EOS}")["input_ids"]
    later = [*messages, _turn("assistant", response), _turn("user", "a1b2")]
    extended = _ids(tokenizer, later, add_generation_prompt=True)
    assert extended[: len(prompt) + len(sampled)] == prompt + sampled


def test_any_text_is_encoded_within_the_vocabulary(tokenizer: PreTrainedTokenizerFast):
    ids = tokenizer("You are Ünique:\n<b>!")["input_ids"]
    assert max(ids) < len(tokenizer) == 48
    assert tokenizer.decode(ids).startswith("you are ?nique")


def test_the_special_tokens_have_the_documented_ids(tokenizer: PreTrainedTokenizerFast):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_tokens_to_ids([USER, ASSISTANT]) == [2, 3]


def test_a_vocabulary_of_ones_own_has_the_longest_symbol_that_fits_as_the_token():
    tokenizer = build_tokenizer(["1", "13", "+", '[f(q="', ")", "("])
    ids = tokenizer('13+1[f(q="31)(?é')["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["13", "+", "1", '[f(q="', "?", "1", ")", "(", "?", "?"]
    assert tokenizer.decode(ids) == '13+1[f(q="?1)(??'


def test_texts_keep_their_case_where_a_symbol_has_one():
    assert [
        build_tokenizer(symbols).decode(build_tokenizer(symbols)("aB")["input_ids"])
        for symbols in ("ab", "aB")
    ] == ["ab", "aB"]


@pytest.mark.parametrize("symbols", [["a", "a"], ["a", ""], ["a", EOS]])
def test_symbols_that_are_repeated_empty_or_special_are_refused(symbols: list[str]):
    with pytest.raises(ValueError, match=r"the symbols \['(a|<eos>)?'\] are empty, repeated or special"):
        build_tokenizer(symbols)


def test_a_task_with_too_few_held_out_prompts_is_refused():
    def draw(rng: random.Random, progress: float) -> task.Problem:
        return task.Problem("a1", "1")

    with pytest.raises(ValueError, match="found 1 distinct held-out prompts in 200 draws; expected 2"):
        task.held_out_set(0, 2, draw)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _ids(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], **options: bool) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)
