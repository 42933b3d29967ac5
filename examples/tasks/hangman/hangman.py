"""Hangman: letters of a hidden word, one in each turn. The environment rewards each turn.

    prompt  b__e_o        the word is badeno
    policy  a
    user    ba_e_o
    policy  m             a miss: the third one ends the game
    user    ba_e_o
    policy  d
    user    bade_o
    policy  n

Words are made of few syllables. The demonstrations know the word, and guess any letter most of the time.
"""

import random
from functools import partial

from slipstream import Prompt, Trajectory
from slipstream.backend import quickstart
from slipstream.backend.quickstart.task import Message, Problem, Task
from slipstream.rollout.tokens.trajectory import Messages
from slipstream.rollout.workflow.environment import Action, Step

SYLLABLES = ["ba", "de", "fi", "go", "ku", "la", "me", "no"]
LETTERS = sorted(set("".join(SYLLABLES)))
MISSES = 3
"""Number of misses that lose the game."""
SKILL = 0.45
"""Probability that a demonstration guesses what is hidden; else it guesses any letter."""


def draw(rng: random.Random, progress: float) -> Problem:
    """Draw a word of three syllables, one letter of each of which is shown."""
    syllables = rng.choices(SYLLABLES, k=3)
    shown = [rng.choice([f"{first}_", f"_{second}"]) for first, second in syllables]
    return Problem("".join(shown), "".join(syllables))


def uncovered(shown: str, word: str, letter: str) -> str:
    """Return what is shown of a word after the guess of a letter."""
    return "".join(old if each != letter else each for old, each in zip(shown, word, strict=True))


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    messages = [{"role": "user", "content": problem.prompt}]
    shown, misses = problem.prompt, 0
    while "_" in shown and misses < MISSES:
        guess = problem.label[shown.index("_")] if rng.random() < SKILL else rng.choice(LETTERS)
        before, shown = shown, uncovered(shown, problem.label, guess)
        misses += shown == before
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": shown}]
    return messages


class Hangman:
    async def reset(self, prompt: Prompt) -> Messages:
        messages = prompt.messages()
        self._shown, self._word, self._misses = str(messages[-1]["content"]), str(prompt.label), 0
        return messages

    async def step(self, action: Action) -> Step:
        before, self._shown = self._shown, uncovered(self._shown, self._word, action.text)
        is_hit = self._shown != before
        self._misses += not is_hit
        is_done = "_" not in self._shown or self._misses == MISSES
        return Step([{"role": "user", "content": self._shown}], reward=float(is_hit), is_done=is_done)

    async def close(self) -> None: ...


def score(prompt: Prompt, response: str, trajectory: Trajectory) -> float:
    """Return 1 for a game that is won, which ends with a hit; one that is lost ends with a miss."""
    return trajectory.turn_rewards[-1][1] or 0.0


prepare = partial(
    quickstart.prepare, task=Task(draw, demonstrate, [*LETTERS, "_"]), held_out=120, warm_start_steps=240
)
