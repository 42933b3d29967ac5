"""Groups of sessions that a program outside opens and rewards: the policy learns from these rewards alone.

    python -m benchmarks.session_learning                        # one turn a session, three seeds
    python -m benchmarks.session_learning --turns 3 --seeds 0    # a reward at the end of three turns

`slipstream serve` serves and trains the quickstart's policy, without any prompt set or judge. The program is
a user's: `Client.group` opens eight sessions of one problem, OpenAI's client asks in each, and
`session.reward` gives 1 for a right result and else 0. Held-out problems are asked at temperature 0 before
and after the training steps. `gains` are percentage points, and `shuffled` those of runs in which the rewards
of a group are exchanged at random, so that they say nothing of the answers.

With three turns, each turn sums on from the answer of the turn before, in a request of its own, and the
session's reward says whether the last sum is right. Each way of `live.credit` is one run, `sum` also one with
exchanged rewards.
"""

import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from openai import AsyncOpenAI

from benchmarks.harness import parser
from benchmarks.live_learning import BATCH, TABLE, USERS, Conversations, Outcome, Served, learned, serve
from benchmarks.quickstart_users import LONGEST_ANSWER
from slipstream.backend.api.client import Client, GatewayRefused, RewardedSession
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.quickstart.task import is_held_out, operands_of, problem_of, sample_problem

GROUP = 8
"""Sessions of a group."""

CREDITS = ("last", "sum", "discount")


class Program:
    """A user's program: its tasks are solved in groups of sessions, which it rewards."""

    def __init__(self, served: Served, seed: int, turns: int, *, shuffled: bool) -> None:
        self._client = Client(served.url, served.key, timeout_s=120)
        self._policy = AsyncOpenAI(api_key=served.key, base_url=f"{served.url}/v1", timeout=120)
        self._seed, self._turns = seed, turns
        self._rng = random.Random(f"rewards-{seed}") if shuffled else None
        self._tasks = iter(range(1_000_000))
        self.answers: list[str] = []
        """All answers."""
        self.late = 0
        """Rewards that came after the turns had expired."""

    @asynccontextmanager
    async def solving(self, _: Conversations) -> AsyncIterator[list[str]]:
        """Solve tasks inside of the block, which gets the answers. Raises, in an ExceptionGroup, whatever a
        client raises.
        """
        with self._client:
            async with self._policy, asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._groups()) for _ in range(USERS // GROUP)]
                yield self.answers
                for group in groups:
                    group.cancel()

    async def _groups(self) -> None:
        for task in self._tasks:
            sessions = await asyncio.to_thread(self._client.group, task, GROUP)
            rewards = await asyncio.gather(*map(self._solve, sessions))
            if self._rng is not None:
                self._rng.shuffle(rewards)
            await asyncio.gather(*map(self._reward, sessions, rewards))

    async def _solve(self, session: RewardedSession) -> float:
        """Return whether the sum of all operands is right at the end."""
        policy = self._policy.with_options(base_url=session.base_url)
        total, said = 0, ""
        for turn in range(self._turns):
            prompt = self._prompt(session.prompt, turn, said)
            total += sum(operands_of(prompt)[bool(turn) :])
            reply = await policy.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=LONGEST_ANSWER
            )
            answer = reply.choices[0].message.content or ""
            self.answers.append(answer)
            said = answer.partition("#")[2]
            if len(said) != 1 or not said.isdigit():
                return 0.0
        return float(said == str(total % 10))

    def _prompt(self, task: object, turn: int, said: str) -> str:
        """Return what a turn asks: the same in all sessions of a task with ``said`` as their sum so far."""
        rng = random.Random(f"{self._seed}-{task}-{turn}-{said}")
        return next(prompt for prompt in _prompts(rng, said) if not is_held_out(prompt))

    async def _reward(self, session: RewardedSession, value: float) -> None:
        try:
            await asyncio.to_thread(session.reward, value)
        except GatewayRefused as refused:
            if refused.status != 409:
                raise
            self.late += 1


def _prompts(rng: random.Random, said: str) -> Iterator[str]:
    while True:
        operands = operands_of(sample_problem(rng).prompt)
        yield problem_of([int(said), *operands[1:]] if said else operands).prompt


async def learn(root: Path, seed: int, turns: int, credit: str, *, shuffled: bool) -> Outcome:
    """Have the policy of a seed learn from a program's rewards."""
    name = f"{credit}-{seed}{'-shuffled' * shuffled}"
    batch = turns * BATCH  # as many sessions in a step, however many turns they have
    served = serve(root, name, seed, f"live.credit.type={credit}", f"rollout.batch_size={batch}")
    program = Program(served, seed, turns, shuffled=shuffled)
    outcome = await learned(served, seed, shuffled, program.solving)
    print(f"{name}: {outcome}, {outcome.gain:+} points, {program.late} rewards too late", flush=True)
    return outcome


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--turns", type=int, choices=[1, 3], default=1)
    chosen = options.parse_args()
    ways = CREDITS if chosen.turns > 1 else ("sum",)
    courses = [
        *((credit, seed, False) for credit in ways for seed in chosen.seeds),
        *(("sum", seed, True) for seed in chosen.seeds),
    ]
    with tempfile.TemporaryDirectory(prefix="slipstream-session-learning-") as root:
        one = partial(learn, Path(root))
        outcomes = [
            (credit, asyncio.run(one(seed, chosen.turns, credit, shuffled=shuffled)))
            for credit, seed, shuffled in courses
        ]
    columns: Columns[tuple[str, Outcome]] = {
        "credit": lambda row: row[0],
        **{name: partial(lambda column, row: column(row[1]), column) for name, column in TABLE.items()},
    }
    table_console().print(rows_table("what a program's rewards teach", outcomes, columns, left=["credit"]))
    honest = [(credit, row.gain) for credit, row in outcomes if not row.shuffled]
    rows = [row for _, row in outcomes]
    print(
        json.dumps(
            {
                "turns": chosen.turns,
                "gains": {way: [gain for credit, gain in honest if credit == way] for way in ways},
                "shuffled": [row.gain for row in rows if row.shuffled],
                "before": [round(row.before, 3) for row in rows],
                "seconds": round(statistics.mean(row.seconds for row in rows), 1),
                "discrepancies": sum(row.discrepancies for row in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
