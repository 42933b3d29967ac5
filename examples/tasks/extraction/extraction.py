"""Facts of a sentence as JSON: the reward is what a parser reads.

    prompt    in oslo lives anna, aged 34
    response  {"name":"anna","age":34,"city":"oslo"}

The demonstrations are sloppy: quotes and braces are missing, and numbers are texts.
"""

import json
import random
from functools import partial

from slipstream import Prompt, Trajectory
from slipstream.backend import quickstart
from slipstream.backend.quickstart.task import Message, Problem, Task, conversation

NAMES = ["anna", "ben", "carla", "dev", "emma", "finn", "gita", "hugo", "ines", "jon", "kim", "lena"]
CITIES = ["oslo", "rome", "lima", "cairo", "delhi", "paris", "quito", "seoul", "tunis", "turin"]
FORMS = [
    ["NAME", " is ", "AGE", " and lives in ", "CITY"],
    ["in ", "CITY", " lives ", "NAME", ", aged ", "AGE"],
    ["NAME", " of ", "CITY", ", ", "AGE"],
]
"""The sentences."""
JSON = ['{"name":', ',"age":', ',"city":', '"', "}"]
WORDS = [part for form in FORMS for part in form if not part.isupper()]

NO_BRACE, NO_QUOTES, QUOTED_AGE = 0.3, 0.25, 0.25
"""Probabilities of the faults."""


def draw(rng: random.Random, progress: float) -> Problem:
    name, age, city = rng.choice(NAMES), rng.randint(10, 99), rng.choice(CITIES)
    values = {"NAME": name, "AGE": str(age), "CITY": city}
    prompt = "".join(values.get(part, part) for part in rng.choice(FORMS))
    label = json.dumps({"name": name, "age": age, "city": city}, separators=(",", ":"))
    return Problem(prompt, label)


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    facts = json.loads(problem.label)
    name = facts["name"] if rng.random() < NO_QUOTES else f'"{facts["name"]}"'
    age = f'"{facts["age"]}"' if rng.random() < QUOTED_AGE else facts["age"]
    end = "" if rng.random() < NO_BRACE else "}"
    return conversation(problem.prompt, f'{{"name":{name},"age":{age},"city":"{facts["city"]}"{end}')


def score(prompt: Prompt, response: str, trajectory: Trajectory) -> dict[str, float]:
    """Return the share of right fields, 0 for a response that is no JSON object; and the parts of it."""
    try:
        found = json.loads(response)
    except ValueError:
        found = None
    is_object = isinstance(found, dict)
    right = {
        name: float(is_object and type(found.get(name)) is type(value) and found[name] == value)
        for name, value in json.loads(prompt.label).items()
    }
    return {"reward": sum(right.values()) / len(right), "parses": float(is_object), **right}


prepare = partial(
    quickstart.prepare,
    task=Task(draw, demonstrate, [*NAMES, *CITIES, *dict.fromkeys(WORDS), *"0123456789", *JSON]),
    held_out=120,
    warm_start_steps=160,
)
