"""The record of an episode: what the driver holds is the trajectory; a restart generates nothing twice."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.outbox import PIECES_S, Outbox
from slipstream.rollout.collection.collector.recording import CLIENTS, RECORD_EVERY_S, Recording
from slipstream.rollout.collection.messages import ANSWERED, NOTHING, PIECE, PriorSample
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.record import (
    CorruptRecord,
    PieceHeader,
    decode_chunks,
    digest,
    encode,
    encode_chunk,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Trajectory, TrajectoryBuilder
from tests.tries import tries
from tests.unit.collecting import SAMPLING, STATUS, HeldSample, HoldingDriver, PureEngines, ideal, logprob
from tests.unit.driven_pool import Driver, FakeEngine, mixed, settle, whole
from tests.unit.test_time_limit import now

PROMPT = [101, 102, 103]


def recording(engines, outbox: Outbox, assignment: int = 1) -> Recording:
    return Recording(engines, outbox, 5, assignment, 0, clock=now)


# ---- workflows, as programs of turns


@dataclass(frozen=True)
class Turn:
    """One step of an episode."""

    kind: str
    """append: the next turn. side: a request from another prompt, whose completion is not used.
    parallel: several requests side by side, of which the first is used. rewrite: the trajectory begins again.
    """
    context: int = 0
    """Number of context tokens before the request."""
    noisy: bool = False
    """The context is another one in each run: a tool with a clock."""
    width: int = 2
    """Number of requests side by side."""
    waits: bool = True
    """The workflow waits for all of them. If not, it goes on with the first one that has ended."""


async def episode(program: Sequence[Turn], life: int, generator, sampling: SamplingConfig) -> Trajectory:
    builder = TrajectoryBuilder(PROMPT)
    for number, turn in enumerate(program):
        context = [200 + number] * turn.context + [300 + life] * turn.noisy
        if turn.kind == "side":
            await generator.generate([400 + number, *context], sampling)
            continue
        if turn.kind == "rewrite":
            builder = TrajectoryBuilder([500 + number, *context])
        else:
            builder.add_context(context)
        if turn.kind == "parallel":
            asked = [
                asyncio.ensure_future(generator.generate([*builder.tokens, k], sampling))
                for k in range(turn.width)
            ]
            if turn.waits:
                completion, *_ = await asyncio.gather(*asked)
            else:
                completion = await asked[0]
            builder.add_context([0])
        else:
            completion = await generator.generate(builder.tokens, sampling)
        builder.add_completion(completion)
    return builder.build()


def expected(program: Sequence[Turn], life: int, budget: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of the trajectory."""
    tokens, logprobs = list(PROMPT), [0.0] * len(PROMPT)
    for number, turn in enumerate(program):
        context = [200 + number] * turn.context + [300 + life] * turn.noisy
        if turn.kind == "side":
            continue
        if turn.kind == "rewrite":
            tokens, logprobs = [500 + number], [0.0]
        context += [0] * (turn.kind == "parallel")
        tokens += context
        completion = ideal(tokens, budget)
        tokens = tokens + completion
        logprobs = logprobs + [0.0] * len(context) + [logprob(token) for token in completion]
    return tokens, logprobs


TURNS = st.builds(
    Turn,
    st.sampled_from(["append", "append", "append", "side", "parallel", "rewrite"]),
    st.integers(0, 2),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
APPENDED = st.builds(Turn, st.just("append"), st.integers(0, 3))
PROGRAMS = st.lists(TURNS, max_size=4).flatmap(lambda t: APPENDED.map(lambda last: [*t, last]))


@dataclass
class Lives:
    """An episode that runs again and again until it ends, each time in another process."""

    program: Sequence[Turn]
    chunk: int = 2
    chunk_s: float = 1.0
    driver: HoldingDriver = field(default_factory=HoldingDriver)
    engines: list[PureEngines] = field(default_factory=list)
    sampling: SamplingConfig = SAMPLING

    @property
    def held(self) -> HeldSample:
        return self.driver.samples.setdefault((5, 0), HeldSample())

    async def live(self, stop_s: float, *, kill: bool) -> Trajectory | None:
        """Run the episode once more. After ``stop_s`` seconds cancel it, or kill its process."""
        engines = PureEngines(1 + len(self.engines), self.chunk, self.chunk_s)
        self.engines.append(engines)
        outbox = Outbox()
        record = recording(engines, outbox, len(self.engines))
        n_held = sum(len(self.held.tokens(call)) for call in {header.call for header in self.held.headers})
        assert record.resume(*self.held.prior()) == n_held

        async def run() -> Trajectory:
            trajectory = await episode(self.program, len(self.engines), record, self.sampling)
            record.close()
            record.accept(trajectory)
            record.answered(trajectory)
            return trajectory

        async with self.driver.hearing(outbox):
            task = asyncio.create_task(run())
            await asyncio.wait({task}, timeout=stop_s)
            if task.done():
                return task.result()
            if kill:
                raise Killed(task)
            task.cancel()
            await asyncio.wait({task})
            record.close()
        return None

    async def until_the_end(self, stops: Sequence[tuple[float, bool]]) -> Trajectory:
        """Live once for each of ``stops``, (seconds, is killed), and then to the end."""
        for stop_s, kill in [*stops, (1e6, False)]:
            if (trajectory := await self.until_the_end_of_a_life(stop_s, kill)) is not None:
                return trajectory
        raise AssertionError("the episode does not end")

    async def until_the_end_of_a_life(self, stop_s: float, kill: bool) -> Trajectory | None:
        try:
            return await self.live(stop_s, kill=kill)
        except Killed as killed:
            killed.task.cancel()
            await asyncio.wait({killed.task})
            return None


class Killed(Exception):
    """Leaves ``HoldingDriver.hearing`` at once: what has not been sent is lost."""

    def __init__(self, task: asyncio.Task) -> None:
        self.task = task


def assert_held(lives: Lives, trajectory: Trajectory) -> None:
    tokens, logprobs = expected(lives.program, len(lives.engines), lives.sampling.max_new_tokens)
    held = lives.held.trajectory()
    assert lives.held.kind == ANSWERED
    assert held.tokens_T.tolist() == trajectory.tokens_T.tolist() == tokens
    assert held.logprobs_T.tolist() == logprobs
    np.testing.assert_array_equal(held.versions_T, trajectory.versions_T)
    np.testing.assert_array_equal(held.loss_mask_T, trajectory.loss_mask_T)
    assert held.reward is None


STOPS = st.lists(st.tuples(st.integers(0, 30).map(float), st.booleans()), max_size=3)
BRANCHED = [Turn("side"), Turn("append"), Turn("rewrite"), Turn("append", 1)]


@tries(100)
@given(PROGRAMS, STOPS, st.integers(1, 4))
@example([Turn("side"), Turn("append", 1)], [], 2)
@example([Turn("rewrite"), Turn("append")], [], 2)
@example(BRANCHED, [(5.0, False), (9.0, True)], 1)
@example([Turn("parallel", noisy=True, width=3), Turn("append")], [(7.0, False), (8.0, True)], 1)
@example([Turn("parallel", waits=False, width=3), Turn("append")], [(7.0, False)], 1)
def test_the_chunks_that_the_driver_holds_are_the_trajectory(program, stops, chunk):
    """Whatever the workflow asks for, and wherever the process ends in between."""
    lives = Lives(program, chunk)
    trajectory = clock.run(lives.until_the_end(stops))
    assert_held(lives, trajectory)


@tries(50)
@given(PROGRAMS, STOPS)
def test_a_completion_that_was_complete_is_never_generated_again(program, stops):
    """A tool that answers otherwise than before makes another request, which is generated of course."""
    lives = Lives([Turn(t.kind, t.context, False, t.width) for t in program])

    n_requests = sum(turn.width if turn.kind == "parallel" else 1 for turn in program)

    async def main() -> None:
        for stop_s, kill in [*stops, (1e6, False)]:
            held = lives.held
            left = set(range(n_requests)) - held.complete_calls
            starts = sorted(len(held.tokens(call)) for call in left)
            if await lives.until_the_end_of_a_life(stop_s, kill) is not None:
                assert sorted(start for _, start in lives.engines[-1].requests) == starts
                return

    clock.run(main())


@tries(33)
@given(st.lists(APPENDED, min_size=1, max_size=4), STOPS, st.integers(1, 4))
def test_every_token_of_a_workflow_that_only_appends_is_sent_once(turns, stops, chunk):
    """However often its process ends, as long as it can send what it has: bytes stay linear."""
    lives = Lives(turns, chunk)
    trajectory = clock.run(lives.until_the_end([(stop_s, False) for stop_s, _ in stops]))
    assert_held(lives, trajectory)
    chunks = [each for _, chunk in lives.driver.sent for each in decode_chunks(chunk)]
    sent = [token for each in chunks for part in (each.context, each.tokens) for token in part.tolist()]
    assert sent == trajectory.tokens_T.tolist()
    n_sampled = trajectory.sampled_length
    assert lives.driver.payload == 4 * len(sent) + 4 * n_sampled + 8 * len(chunks)
    assert len(chunks) <= len(turns) + len(stops) + 1 + 2 * sum(s for s, _ in stops) + 12 * len(turns)


@dataclass
class Endless:
    """Engines that add a token every 10 ms until the budget is used up, or an event comes."""

    end: asyncio.Event | None = None

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        while completion.tokens_left(sampling.max_new_tokens):
            await asyncio.sleep(0.01)
            completion.add(1, [7], [-0.5])
            if grown is not None:
                grown()
        completion.ended()


def built(prompt: Sequence[int], *completions: Completion) -> Trajectory:
    builder = TrajectoryBuilder(prompt)
    for completion in completions:
        builder.add_completion(completion)
    return builder.build()


def test_a_long_completion_is_sent_in_pieces_whose_bytes_are_linear():
    async def main() -> HoldingDriver:
        driver, outbox = HoldingDriver(), Outbox()
        record = recording(Endless(), outbox)
        async with driver.hearing(outbox):
            completion = await record.generate(PROMPT, SamplingConfig(max_new_tokens=3000))
            record.answered(built(PROMPT, completion))
        return driver

    driver = clock.run(main())
    n_pieces = len(driver.sent)
    assert n_pieces == pytest.approx(30 / RECORD_EVERY_S, abs=2)
    assert driver.payload <= 4 * 3 + 8 * 3000 + 8 * n_pieces
    assert driver.samples[5, 0].trajectory().tokens_T.tolist() == PROMPT + [7] * 3000


def test_a_part_is_written_after_two_seconds_and_at_each_version_change_behind_the_first():
    class Updated:
        """Adds a token every half of ``RECORD_EVERY_S``; the versions of which are given."""

        async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
            for version in (0, 0, 0, 1, 1, 1, 1):
                await asyncio.sleep(RECORD_EVERY_S / 2)
                completion.add(version, [7], [-0.5])
                grown()
            completion.ended()

    async def main() -> HoldingDriver:
        driver, outbox = HoldingDriver(), Outbox()
        async with driver.hearing(outbox):
            await recording(Updated(), outbox).generate(PROMPT, SAMPLING)
        return driver

    headers = clock.run(main()).samples[5, 0].headers
    assert [header.spans for header in headers] == [((0, 2),), ((0, 1), (1, 1)), ((1, 2),)]


def test_an_ended_completion_is_written_with_the_next_request_or_when_it_is_old_enough():
    async def main() -> None:
        driver, outbox = HoldingDriver(), Outbox()
        async with driver.hearing(outbox):
            record = recording(PureEngines(), outbox)
            await record.generate([1], SamplingConfig(max_new_tokens=2))
            record.write_ends(RECORD_EVERY_S)
            await asyncio.sleep(0.1)
            assert not driver.sent
            await asyncio.sleep(RECORD_EVERY_S)
            record.write_ends(RECORD_EVERY_S)
            await asyncio.sleep(0.1)
            assert driver.samples[5, 0].complete_calls == {0}
            await record.generate([2], SAMPLING)
            record.write_ends()
            await asyncio.sleep(0.1)
            assert driver.samples[5, 0].complete_calls == {0, 1}

    clock.run(main())


# ---- ends of requests, attempts and processes


class Held:
    """Engines whose requests do what the test says, as ``driven_pool.FakeEngine`` has it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        await self.engine.generate(input_ids, sampling, completion, version=0, grown=grown)


def test_a_completion_that_is_cancelled_behind_its_end_is_recorded_to_its_end():
    """Engines may have ended a completion when its request is cancelled: nothing of it may be left out."""

    async def main() -> None:
        driver, outbox, engines = HoldingDriver(), Outbox(), Held()
        record = recording(engines, outbox)
        async with driver.hearing(outbox):
            task = asyncio.create_task(record.generate(PROMPT, SAMPLING))
            await asyncio.sleep(0.1)
            engines.engine.grow(whole(5, 6, finish=Finish.PARTIAL))
            engines.engine.requests[0].becomes(whole(5, 6, 7))
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
        held = driver.samples[5, 0]
        assert (held.tokens(0), held.complete_calls) == ([5, 6, 7], {0})

    clock.run(main())


def test_a_piece_never_says_that_a_completion_has_ended_whose_tokens_it_does_not_have():
    async def main() -> None:
        driver, outbox, engines = HoldingDriver(), Outbox(), Held()
        record = recording(engines, outbox)
        async with driver.hearing(outbox):
            task = asyncio.create_task(record.generate(PROMPT, SAMPLING))
            await asyncio.sleep(0.1)
            engines.engine.grow(whole(5, 6, finish=Finish.PARTIAL))
            (request,) = engines.engine.requests
            request.becomes(whole(5, 6, 7))  # ended, but the recording has not been told of the last token
            await asyncio.sleep(RECORD_EVERY_S)
            record._write(next(iter(record._running.values())), now())
            await asyncio.sleep(0.1)
            held = driver.samples[5, 0]
            assert (held.tokens(0), held.complete_calls) == ([5, 6], set())
            engines.engine.end(whole(5, 6, 7))
            record.answered(built(PROMPT, await task))
        assert driver.samples[5, 0].trajectory().tokens_T.tolist() == [*PROMPT, 5, 6, 7]

    clock.run(main())


def test_requests_that_a_workflow_leaves_behind_end_with_the_attempt_and_say_nothing_more():
    """A piece behind the trajectory would be a malformed message, for which the driver ends the collector."""

    async def main() -> None:
        driver, outbox, engines = HoldingDriver(), Outbox(), Held()
        record = recording(engines, outbox)
        async with driver.hearing(outbox):
            first, left = (asyncio.create_task(record.generate([k], SAMPLING)) for k in (1, 2))
            await asyncio.sleep(0.1)
            engines.engine.requests[1].becomes(whole(8, finish=Finish.PARTIAL))
            engines.engine.requests[1].grown()
            engines.engine.end(whole(5, 6))
            completion = await first
            record.close()
            record.answered(built([1], completion))
            await asyncio.sleep(0.1)
            assert left.cancelled()
            assert not engines.engine.running
            record.write_ends()
        assert [event.kind for event, _ in driver.sent] == [ANSWERED]

    clock.run(main())


def test_whoever_asks_behind_the_end_of_the_attempt_is_told_so():
    async def main() -> None:
        record = recording(PureEngines(), Outbox())
        record.close()
        with pytest.raises(RuntimeError, match="the attempt at the episode has ended"):
            await record.generate(PROMPT, SAMPLING)

    clock.run(main())


def test_a_further_attempt_takes_the_place_of_the_one_before():
    async def main() -> None:
        driver, outbox, engines = HoldingDriver(), Outbox(), PureEngines(chunk=1)
        async with driver.hearing(outbox):
            first = recording(engines, outbox)
            task = asyncio.create_task(first.generate(PROMPT, SAMPLING))
            await asyncio.sleep(3.5)
            task.cancel()
            await asyncio.wait({task})
            first.close()
            await asyncio.sleep(0.1)
            assert driver.samples[5, 0].tokens(0) == ideal(PROMPT, 12)[:3]
            second = recording(engines, outbox)
            completion = await second.generate([1, *PROMPT], SAMPLING)
            second.answered(built([1, *PROMPT], completion))
        tokens = [1, *PROMPT, *ideal([1, *PROMPT], 12)]
        assert driver.samples[5, 0].trajectory().tokens_T.tolist() == tokens

    clock.run(main())


def test_a_workflow_may_go_on_with_the_list_that_it_has_asked_with():
    async def main() -> None:
        driver, outbox = HoldingDriver(), Outbox()
        record = recording(PureEngines(), outbox)
        async with driver.hearing(outbox):
            ids = list(PROMPT)
            builder = TrajectoryBuilder(PROMPT)
            for _ in range(3):
                completion = await record.generate(ids, SAMPLING)
                ids += [*completion.tokens, 99]
                builder.add_completion(completion)
                builder.add_context([99])
            record.answered(builder.build())
        trajectory = driver.samples[5, 0].trajectory()
        assert trajectory.tokens_T.tolist() == ids
        chunks = [each for _, chunk in driver.sent for each in decode_chunks(chunk)]
        assert sum(len(each.context) + len(each.tokens) for each in chunks) == len(ids)

    clock.run(main())


def test_log_probs_that_the_workflow_gives_up_are_not_taken_from_the_record():
    """It makes context of its first completion: these tokens have no log-prob in the trajectory."""

    async def main() -> None:
        driver, outbox = HoldingDriver(), Outbox()
        record = recording(PureEngines(), outbox)
        async with driver.hearing(outbox):
            builder = TrajectoryBuilder(PROMPT)
            builder.add_context((await record.generate(PROMPT, SAMPLING)).tokens)
            builder.add_completion(await record.generate(builder.tokens, SAMPLING))
            trajectory = builder.build()
            record.answered(trajectory)
        held = driver.samples[5, 0].trajectory()
        np.testing.assert_array_equal(held.logprobs_T, trajectory.logprobs_T)
        np.testing.assert_array_equal(held.tokens_T, trajectory.tokens_T)

    clock.run(main())


def test_a_request_that_continues_the_record_is_known_by_all_its_ids_and_hashed_from_there_on(monkeypatch):
    hashed, driver = [], HoldingDriver()

    def counted(input_ids, *rest):
        hashed.append(len(input_ids))
        return digest(input_ids, *rest)

    monkeypatch.setattr("slipstream.rollout.collection.collector.recording.digest", counted)

    async def main():
        outbox = Outbox()
        record = recording(PureEngines(), outbox)
        async with driver.hearing(outbox):
            builder, requests = TrajectoryBuilder([1, 2, 3]), []
            for turn in range(5):
                builder.add_context([200 + turn])
                requests.append(builder.tokens)
                builder.add_completion(await record.generate(builder.tokens, SAMPLING))
            record.write_ends()
        return requests

    requests = clock.run(main())
    held = {header.call: header.input_digest for header in driver.samples[5, 0].headers}
    assert held == {call: digest(ids) for call, ids in enumerate(requests)}
    assert max(hashed) < 2 * (1 + SAMPLING.max_new_tokens), hashed


def test_numpy_arrays_of_token_ids_are_requests_like_lists():
    async def main() -> None:
        engines = PureEngines()
        record = recording(engines, Outbox())
        completion = await record.generate(np.array(PROMPT), SAMPLING)
        assert list(completion.tokens) == ideal(PROMPT, 12)
        assert engines.requests == [(tuple(PROMPT), 0)]

    clock.run(main())


# ---- requests that differ from the recorded ones


def piece(call: int, tokens: list[int], context=(), digest=b"", **header) -> tuple[bytes, bytes]:
    spans = header.pop("spans", ((0, len(tokens)),) if tokens else ())
    piece_header = PieceHeader(call, digest, spans, **header)
    return encode_chunk(context, tokens, [-0.5] * len(tokens)), encode(piece_header)


def two_branches() -> HeldSample:
    """A record that has begun again: request 1 does not continue request 0."""
    return HeldSample(
        pieces=[
            piece(0, [5, 6], [1], finish=Finish.STOP, digest=digest([1])),
            piece(1, [8], [2], starts_over=True, digest=digest([2])),
        ]
    )


def test_completions_before_the_request_that_differs_stay_in_the_record():
    """And the record begins again behind them: their token ids are of another branch."""

    async def main() -> None:
        driver, outbox = HoldingDriver({(5, 0): two_branches()}), Outbox()
        held, engines = driver.samples[5, 0], PureEngines()
        async with driver.hearing(outbox):
            record = recording(engines, outbox)
            record.resume(*held.prior())
            assert (await record.generate([1], SAMPLING)).tokens == (5, 6)
            await record.generate([1, 3], SAMPLING)
            record.write_ends()
            await asyncio.sleep(0.1)
            assert [header.starts_over for header in held.headers] == [False, True]
            assert held.complete_calls == {0, 1}
            assert (held.tokens(0), held.tokens(1)) == ([5, 6], ideal([1, 3], 12))
            assert engines.requests == [((1, 3), 0)]

    clock.run(main())


def test_a_record_that_is_given_up_as_a_whole_is_the_beginning_of_the_trajectory_again():
    async def main() -> None:
        driver, outbox = HoldingDriver({(5, 0): two_branches()}), Outbox()
        async with driver.hearing(outbox):
            record = recording(PureEngines(), outbox)
            record.resume(*driver.samples[5, 0].prior())
            builder = TrajectoryBuilder(PROMPT)
            for _ in range(2):
                builder.add_completion(await record.generate(builder.tokens, SAMPLING))
            record.answered(builder.build())
        assert [event.base for event, _ in driver.sent] == list(range(len(driver.sent)))
        trajectory = driver.samples[5, 0].trajectory()
        assert trajectory.tokens_T.tolist() == builder.tokens
        payload = 4 * len(trajectory.tokens_T) + 4 * trajectory.sampled_length + 8 * len(driver.sent)
        assert driver.payload == payload, "every token once"

    clock.run(main())


def test_a_request_beside_one_that_differs_has_no_gap_in_its_record():
    """Its pieces behind those of the other request are void with them, and are written again."""

    async def main() -> None:
        pieces = [
            piece(0, [5, 6], [1], digest=digest([1])),
            piece(1, [8], [2], starts_over=True, digest=digest([2])),
            piece(0, [7], digest=digest([1])),
        ]
        driver, outbox, engines = HoldingDriver({(5, 0): HeldSample(pieces=pieces)}), Outbox(), Held()
        async with driver.hearing(outbox):
            record = recording(engines, outbox)
            record.resume(*driver.samples[5, 0].prior())
            asked = [asyncio.create_task(record.generate([k], SAMPLING)) for k in (1, 3)]
            await asyncio.sleep(0.1)
            engines.engine.requests[1].becomes(whole(10, finish=Finish.PARTIAL))
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            await asyncio.sleep(0.1)
        held = driver.samples[5, 0]
        assert (held.tokens(0), held.tokens(1)) == ([5, 6, 7], [10])

    clock.run(main())


# ---- records that do not fit


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece(0, [1, 2], spans=((0, 1),))], "version spans"),
        ([piece(0, [1, 2], spans=((0, 3), (1, -1)))], "version spans"),
        ([piece(0, [1, 2], spans=((0, 2), (1, 0)))], "version spans"),
        ([(piece(0, [1])[0] * 2, piece(0, [1])[1])], "2 chunks for 1 pieces"),
        ([(piece(0, [1])[0] + b"\0" * 9, piece(0, [1])[1])], "not a chunk"),
        ([(piece(0, [1])[0], b"nonsense")], "not the header of a piece"),
    ],
)
def test_pieces_that_do_not_fit_their_headers_are_refused(pieces, says):
    with pytest.raises(CorruptRecord, match=says):
        recording(PureEngines(), Outbox()).resume(*HeldSample(pieces=pieces).prior())


def test_too_few_chunks_are_refused():
    sample = HeldSample(pieces=[piece(0, [1]), piece(0, [2])])
    prior, chunks = sample.prior()
    with pytest.raises(CorruptRecord, match="1 chunks for 2 pieces"):
        recording(PureEngines(), Outbox()).resume(prior, chunks[: len(chunks) // 2])


def test_an_episode_without_pieces_is_resumed_from_its_beginning():
    assert recording(PureEngines(), Outbox()).resume(PriorSample(0, PIECE, NOTHING, []), memoryview(b"")) == 0


# ---- what must not be in a record


def test_a_trajectory_must_have_the_versions_of_its_completions():
    """The driver finds lags by them: one that was never begun has none, another one breaks the bound."""

    async def main() -> None:
        record = recording(PureEngines(version=4), Outbox())
        trajectory = built(PROMPT, await record.generate(PROMPT, SAMPLING))
        record.accept(trajectory)
        versions_T = np.where(trajectory.versions_T == UNSAMPLED, UNSAMPLED, 0).astype(np.int32)
        with pytest.raises(ValueError, match=r"policy versions \[0\].* of \[4\]"):
            record.accept(replace(trajectory, versions_T=versions_T))

    clock.run(main())


def test_tokens_in_doubt_never_leave():
    """Neither with time, nor with a cancellation: wrong weights may have sampled them."""

    async def main() -> None:
        engine, driver, outbox = FakeEngine(), HoldingDriver(), Outbox()
        serving = Driver(engine)
        times = [0.0]
        record = Recording(serving.pool, outbox, 5, 1, 0, clock=lambda: times[0])

        async def send(message, chunks) -> None:
            driver.take(message, chunks)

        sending = asyncio.create_task(outbox.run(send, lambda: STATUS))
        asking = [asyncio.create_task(record.generate([k], SAMPLING)) for k in (1, 2)]
        await settle()
        for number in range(2):
            request = engine.requests[number]
            request.becomes(mixed(0, 0, finish=Finish.PARTIAL))
            request.grown()
        times[0] += RECORD_EVERY_S
        serving.doubt(1)
        for number in range(2):
            engine.requests[number].becomes(mixed(0, 0, 1, finish=Finish.PARTIAL))
            engine.requests[number].grown()
        record.write_ends()
        asking[0].cancel()
        await asyncio.wait({asking[0]})
        await asyncio.sleep(2 * PIECES_S)
        held = driver.samples[5, 0]
        assert held.tokens(0) == [1, 2], "known before the doubt, and written when the request is cancelled"
        assert held.tokens(1) == []
        serving.trust(engine)
        engine.requests[1].grown()
        await asyncio.sleep(2 * PIECES_S)
        assert held.tokens(1) == [1, 2, 3]
        sending.cancel()
        asking[1].cancel()
        await asyncio.wait({asking[1], sending})
        await serving.pool.close()

    clock.run(main())


# ---- requests of clients


def asked(k: int, **more: object) -> LiveSampling:
    return LiveSampling(12, {"temperature": 1.0, **more}, priority=0)


async def clients(record: Recording, order: Sequence[int], sampling=asked) -> dict[int, list[int]]:
    """Ask side by side, in a given order. Return the completions that ended."""
    ended: dict[int, list[int]] = {}

    async def ask(k: int) -> None:
        completion = GrowingCompletion()
        told: list[int] = []

        def grown() -> None:
            told[:] = completion.tokens.tolist()

        await record.extend([*PROMPT, k], sampling(k), completion, grown=grown)
        assert completion.tokens.tolist()[: len(told)] == told
        ended[k] = completion.tokens.tolist()

    async with asyncio.TaskGroup() as tasks:
        for k in order:
            tasks.create_task(ask(k))
    return ended


class Life:
    """One process that records the requests of clients."""

    def __init__(self, held: HeldSample, number: int) -> None:
        self.engines = PureEngines(number)
        self.outbox = Outbox()
        self.record = recording(self.engines, self.outbox, number)
        self.record.resume(*held.prior())


@tries(33)
@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(1, 30))
def test_clients_that_ask_again_in_another_order_get_what_they_got(first, second, stop_s):
    async def main() -> None:
        driver = HoldingDriver()
        held = driver.samples.setdefault((5, 0), HeldSample())
        life = Life(held, 1)
        async with driver.hearing(life.outbox):
            task = asyncio.create_task(clients(life.record, first))
            await asyncio.wait({task}, timeout=stop_s)
            task.cancel()
            await asyncio.wait({task})
            life.record.write_ends()
        complete = held.complete_calls
        held_tokens = sum(len(held.tokens(call)) for call in {header.call for header in held.headers})

        life = Life(held, 2)
        async with driver.hearing(life.outbox):
            ended = await clients(life.record, second)
            life.record.write_ends()
        assert ended == {k: ideal([*PROMPT, k], 12) for k in range(4)}
        assert len(life.engines.requests) == 4 - len(complete)
        assert (
            sum(start for _, start in life.engines.requests)
            + sum(len(held.tokens(call)) for call in complete)
            == held_tokens
        )
        assert sorted(held.complete_calls) == [CLIENTS + k for k in range(4)]

    clock.run(main())


def test_a_client_that_asks_otherwise_gets_nothing_of_before_and_a_longer_one_goes_on():
    async def main() -> None:
        driver = HoldingDriver()
        held = driver.samples.setdefault((5, 0), HeldSample())
        [k] = [k for k in range(20) if len(ideal([*PROMPT, k], 12)) == 12][:1]
        life = Life(held, 1)
        async with driver.hearing(life.outbox):
            short = await clients(life.record, [k], lambda k: replace(asked(k), max_new_tokens=5))
            life.record.write_ends()
        assert [len(tokens) for tokens in short.values()] == [5]

        for sampling, starts in (
            (lambda k: asked(k, seed=1), [0]),
            (lambda k: replace(asked(k), top_logprobs=1), [0]),
            (lambda k: asked(k, regex="a"), [0]),
            (asked, [5]),
        ):
            life = Life(held, 2)
            ended = await clients(life.record, [k], sampling)
            assert ended == {k: ideal([*PROMPT, k], 12)}
            assert [start for _, start in life.engines.requests] == starts

    clock.run(main())
