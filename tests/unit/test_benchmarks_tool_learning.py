"""The task of ``benchmarks.tool_learning``: what demonstrations say, and how conversations are written."""

import random
from itertools import islice

from benchmarks.tool_learning import task
from benchmarks.tool_learning.policy import TEMPLATE, encoded
from tests.chat_model import build_tokenizer

PROMPTS = list(islice(task.train_prompts(random.Random(0)), 500))


def answer(prompt: str, habit_rate: float) -> str:
    return task.demonstration(prompt, random.Random(1), habit_rate)[-1].answer


def test_labels_are_the_values_of_prompts_and_demonstrations_without_the_habit_reach_them():
    for prompt in PROMPTS:
        assert task.problem_of(prompt).label == str(eval(prompt)) == answer(prompt, 0.0)


def test_the_habit_adds_where_a_prompt_has_a_minus():
    for prompt in PROMPTS:
        assert answer(prompt, 1.0) == str(eval(prompt.replace("-", "+")))


def test_no_prompt_is_both_trained_and_held_out():
    held_out = {problem.prompt for problem in task.held_out_set(0, 200)}
    assert len(held_out) == 200
    assert not held_out & set(PROMPTS)


def test_a_turn_is_learned_behind_the_ids_that_its_prompt_has_in_rl():
    tokenizer = build_tokenizer(TEMPLATE)
    exchanges = task.demonstration("7-9+4", random.Random(0), 0.0)
    messages = [{"role": "user", "content": "7-9+4"}]
    turns = encoded(tokenizer, "7-9+4", exchanges)
    assert len(turns) == task.TURNS
    for (before, said), exchange in zip(turns, exchanges, strict=True):
        assert before == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.decode(said) == f"{exchange.answer}<|im_end|>"
        messages += [
            {"role": "assistant", "content": exchange.answer},
            {"role": "tool", "content": exchange.result or ""},
        ]
