"""Questions to a small corpus, of which most need two searches.

    prompt  land of kalo
    policy  [find(q="kalo")]
    tool    kalo lives in mora
    policy  [find(q="mora")]
    tool    mora lies in tesu
    policy  tesu

The demonstrations mostly answer after the first search, which is right for a city alone.
"""

import random
from functools import partial
from itertools import product

from slipstream.backend import quickstart
from slipstream.backend.quickstart.task import Message, Problem, Task
from slipstream.rollout.workflow.environment import ToolError

SYLLABLES = ["ka", "lo", "mi", "ru", "te", "su", "no", "da", "fe", "gi", "bo", "pe"]
NAMES = random.Random(0).sample(["".join(pair) for pair in product(SYLLABLES, repeat=2)], 128)
PEOPLE, CITIES, LANDS = NAMES[:96], NAMES[96:120], NAMES[120:]
HOME = {person: CITIES[place % len(CITIES)] for place, person in enumerate(PEOPLE)}
LAND = {city: LANDS[place % len(LANDS)] for place, city in enumerate(CITIES)}
CORPUS = [
    *(f"{person} lives in {city}" for person, city in HOME.items()),
    *(f"{city} lies in {land}" for city, land in LAND.items()),
]

CITY_QUESTIONS = 1 / 3
HABIT = 0.75
"""Probability that a demonstration answers with the city where the land is asked for."""


async def find(q: str) -> str:
    """Return the sentence of the corpus that has most words of a query; its first word counts twice."""
    wanted = set(q.split())
    ranks = [2 * len(wanted & {text.split()[0]}) + len(wanted & set(text.split())) for text in CORPUS]
    if not max(ranks):
        raise ToolError("nothing")
    return CORPUS[ranks.index(max(ranks))]


def draw(rng: random.Random, progress: float) -> Problem:
    person = rng.choice(PEOPLE)
    if rng.random() < CITY_QUESTIONS:
        return Problem(f"city of {person}", HOME[person])
    return Problem(f"land of {person}", LAND[HOME[person]])


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    kind, _, person = problem.prompt.split()
    messages = [{"role": "system", "content": "find"}, {"role": "user", "content": problem.prompt}]
    messages += _searched(person, f"{person} lives in {HOME[person]}")
    if kind == "city" or rng.random() < HABIT:
        return [*messages, {"role": "assistant", "content": HOME[person]}]
    messages += _searched(HOME[person], f"{HOME[person]} lies in {problem.label}")
    return [*messages, {"role": "assistant", "content": problem.label}]


def _searched(query: str, found: str) -> list[Message]:
    return [
        {"role": "assistant", "content": f'[find(q="{query}")]'},
        {"role": "tool", "content": found},
    ]


WORDS = ["city of ", "land of ", " lives in ", " lies in ", '[find(q="', '")]', "find"]
prepare = partial(
    quickstart.prepare,
    task=Task(draw, demonstrate, [*SYLLABLES, *WORDS]),
    held_out=80,
    warm_start_steps=160,
)
