"""Growing completions: however one arrives and is cut, it is the same, and costs work for its length."""

import asyncio
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import Aborted
from slipstream.rollout.engine.completion import CompletionStream
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.routing import Routing, ServingEngine
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span
from tests.unit.test_engine_completion import STOP, attested, chunk


def test_a_request_is_due_until_everything_that_is_wanted_has_come():
    completion = GrowingCompletion()
    assert completion.is_due(1) and not completion.is_due(0)
    completion.wants_prompt = True
    assert completion.is_due(0)
    completion.ended()
    assert not completion.is_due(1)


tokens_with_versions = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3)), max_size=40)


def logprob(token: int) -> float:
    return -token / 8  # exact as a float32


def grown(tokens: list[tuple[int, int]], sizes: list[int] = ()) -> GrowingCompletion:
    """A completion of (token, version), which arrives in parts of the given sizes and then one by one."""
    completion, start = GrowingCompletion(), 0
    for size in [*sizes, *([1] * len(tokens))]:
        part = tokens[start : start + size]
        start += size
        for version in dict.fromkeys(version for _, version in part):
            if {v for _, v in part} == {version}:
                ids = [token for token, _ in part]
                completion.add(version, ids, [logprob(token) for token in ids])
                break
        else:
            for token, version in part:
                completion.add(version, [token], [logprob(token)])
    return completion


def versions(completion: GrowingCompletion) -> list[int]:
    return [version for version, n in completion.spans() for _ in range(n)]


def assert_is(completion: GrowingCompletion, tokens: list[tuple[int, int]]) -> None:
    assert completion.tokens.tolist() == [token for token, _ in tokens]
    assert completion.logprobs.tolist() == [logprob(token) for token, _ in tokens]
    assert versions(completion) == [version for _, version in tokens]
    ends = [end for _, end in completion.runs]
    assert ends == sorted(set(ends)), "no run is empty"
    assert all(a[0] != b[0] for a, b in zip(completion.runs, completion.runs[1:], strict=False))


@given(tokens_with_versions, st.lists(st.integers(0, 9), max_size=8))
def test_in_whatever_parts_tokens_arrive_the_completion_is_the_same(tokens, sizes):
    assert_is(grown(tokens, sizes), tokens)


@given(tokens_with_versions, st.integers(0, 50))
def test_a_cut_keeps_a_prefix_that_may_go_on(tokens, n):
    completion = grown(tokens)
    completion.finish = Finish.STOP
    completion.cut(n)
    assert_is(completion, tokens[:n])
    assert completion.finish is Finish.PARTIAL
    completion.add(7, [5], [logprob(5)])
    assert_is(completion, [*tokens[:n], (5, 7)])


@given(tokens_with_versions, st.data())
def test_a_reader_who_remembers_how_far_it_has_read_misses_nothing(tokens, data):
    completion, read, seen = GrowingCompletion(), 0, []
    for token, version in tokens:
        completion.add(version, [token], [logprob(token)])
        if data.draw(st.booleans()):
            spans = completion.spans(read)
            assert sum(n for _, n in spans) == len(completion.tokens) - read
            seen += [version for version, n in spans for _ in range(n)]
            read = len(completion.tokens)
    assert seen == [version for _, version in tokens[:read]]
    start, stop = sorted(data.draw(st.integers(0, len(tokens))) for _ in range(2))
    between = [version for version, n in completion.spans(start, stop) for _ in range(n)]
    assert between == [version for _, version in tokens[start:stop]]


@given(tokens_with_versions, st.integers(0, 40), st.data())
def test_exact_spans_replace_the_lower_bounds_behind_their_start_and_nothing_before(tokens, start, data):
    start = min(start, len(tokens))
    exact = [data.draw(st.integers(3, 5)) for _ in tokens[start:]]
    completion = grown(tokens)
    completion.retag(start, [(version, 1) for version in exact])
    tail = [(token, version) for (token, _), version in zip(tokens[start:], exact, strict=True)]
    assert_is(completion, [*tokens[:start], *tail])


@pytest.mark.parametrize("spans", [[(5, 1)], [(5, 3)], [], [(5, 3), (6, -1)]])
def test_spans_of_other_tokens_are_refused_and_change_nothing(spans):
    completion = grown([(1, 0), (2, 0), (3, 1)])
    with pytest.raises(ValueError, match="do not tile 2 tokens"):
        completion.retag(1, spans)
    assert_is(completion, [(1, 0), (2, 0), (3, 1)])


@given(tokens_with_versions, st.integers(0, 4), st.integers(0, 40))
def test_the_first_token_of_a_version_or_a_later_one(tokens, version, start):
    indices = (i for i, (_, v) in enumerate(tokens) if i >= start and v >= version)
    assert grown(tokens).first_of(version, start) == next(indices, len(tokens))


@given(tokens_with_versions, st.sampled_from(Finish), st.integers(0, 5))
def test_a_copy_is_plain_data(tokens, finish, retractions):
    completion = grown(tokens)
    completion.finish, completion.retractions = finish, retractions
    copy = completion.completion()
    assert copy.tokens == tuple(token for token, _ in tokens)
    assert copy.logprobs == tuple(logprob(token) for token, _ in tokens)
    assert copy.versions().tolist() == [version for _, version in tokens]
    assert (copy.finish, copy.retractions) == (finish, retractions)


def test_as_many_log_probs_as_tokens():
    completion = GrowingCompletion()
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        completion.add(0, [1, 2], [-1.0])
    assert completion.completion() == Completion((), (), (), Finish.PARTIAL)


@pytest.mark.parametrize(
    ("length", "finish", "left"),
    [
        (0, Finish.PARTIAL, 10),
        (4, Finish.PARTIAL, 6),
        (10, Finish.PARTIAL, 0),
        (12, Finish.PARTIAL, 0),
        (4, Finish.STOP, 0),
        (4, Finish.LENGTH, 0),
    ],
)
def test_what_is_left_of_the_budget(length, finish, left):
    completion = grown([(7, 0)] * length)
    completion.finish = finish
    assert completion.tokens_left(10) == left


def test_a_completion_that_was_cut_off_at_its_budget_has_ended_by_its_length():
    completion = grown([(7, 0)])
    completion.ended()
    assert completion.completion() == Completion((7,), (-0.875,), (Span(0, 0, 1),), Finish.LENGTH)
    completion.finish = Finish.STOP
    completion.ended()
    assert completion.finish is Finish.STOP


# ---- work


class Work:
    """Number of elements that were read or copied."""

    def __init__(self) -> None:
        self.elements = 0


class CountedArray(array):
    """Counts the elements that are taken out of it."""

    work: Work

    def __getitem__(self, index):
        result = super().__getitem__(index)
        self.work.elements += len(result) if isinstance(index, slice) else 1
        return result

    def __iter__(self) -> Iterator:
        for element in super().__iter__():
            self.work.elements += 1
            yield element

    def tolist(self) -> list:
        self.work.elements += len(self)
        return super().tolist()

    def tobytes(self) -> bytes:
        self.work.elements += len(self)
        return super().tobytes()


class CountedList(list):
    """Counts the elements that are taken out of it."""

    work: Work

    def __getitem__(self, index):
        result = super().__getitem__(index)
        self.work.elements += len(result) if isinstance(index, slice) else 1
        return result

    def __iter__(self) -> Iterator:
        for element in super().__iter__():
            self.work.elements += 1
            yield element


def counted(kind: type, work: Work, *arguments):
    result = kind(*arguments)
    result.work = work
    return result


def counted_chunk(work: Work, total: int, new: int, *more, **meta) -> dict:
    plain = chunk(total, new, 0, *more, **meta)
    plain["output_ids"] = counted(CountedList, work, plain["output_ids"])
    logprobs = plain["meta_info"]["output_token_logprobs"]
    plain["meta_info"]["output_token_logprobs"] = counted(CountedList, work, logprobs)
    return plain


class ChunkingEngine:
    """Answers every request with chunks of 16 tokens; aborts a request for the first half of it."""

    def __init__(self, address: EngineAddress, work: Work) -> None:
        self._work = work

    async def generate(self, input_ids, sampling, completion, *, greedy, cache_key, version, grown) -> None:
        stream = CompletionStream(completion, version, 1 << 30)
        left = completion.tokens_left(sampling.max_new_tokens)
        continued = len(completion.tokens) > 0
        for total in range(16, left, 16):
            if not continued and total > left / 2:
                raise Aborted("stop")
            stream.add(counted_chunk(self._work, total, 16))
            grown()
        stream.add(counted_chunk(self._work, left, 16, STOP, weight_versions=attested((0, 0, left))))

    async def close(self) -> None:
        """Nothing is open."""


def work_for(length: int) -> float:
    """Return how often each token is handled until a completion of ``length`` has passed the pool."""
    work = Work()

    async def main() -> None:
        address = EngineAddress("engine", "http://engine", 1, 1 << 30, 1 << 30, timeout_s=60)
        pool = EnginePool(
            wait_timeout_s=60,
            isolate_versions=False,
            connect=lambda address: ChunkingEngine(address, work),
        )
        pool.follow(Routing(1, 0, False, 1, (ServingEngine(address, 1),)))
        completion, written = GrowingCompletion(), 0
        completion.tokens = counted(CountedArray, work, "i")
        completion.logprobs = counted(CountedArray, work, "f")

        def write() -> None:
            nonlocal written
            new = completion.tokens[written:]
            assert sum(n for _, n in completion.spans(written)) == len(new)
            written += len(new)

        await pool.generate([1], SamplingConfig(max_new_tokens=length), completion, grown=write)
        assert len(completion.tokens) == length
        assert written >= length - 16
        completion.completion()
        await pool.close()

    asyncio.run(main())
    return work.elements / length


def test_the_work_for_a_token_does_not_depend_on_the_length_of_its_completion():
    """With a copy at every chunk, each token of the longer one would cost 64 times as much."""
    short, long = work_for(1 << 8), work_for(1 << 14)
    assert long <= short * 1.1
    assert long < 20
