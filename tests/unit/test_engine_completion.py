"""Reading SGLang's completions: whole, chunk by chunk, aborted and malformed ones."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.engine.completion import (
    Aborted,
    CompletionStream,
    parse_prompt_logprobs,
)
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span

VOCAB = 10_000

REPLY = {
    "text": "not used",
    "output_ids": [11, 12, 13],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 13},
        "prompt_tokens": 2,
        "weight_version": "4",
        "weight_versions": [
            {"version": "3", "start": 0, "end": 2},
            {"version": "4", "start": 2, "end": 3},
        ],
        "num_retractions": 1,
        "completion_tokens": 3,
        "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None], [-2.5, 13, None]],
    },
}
COMPLETION = Completion(
    (11, 12, 13), (-0.5, -1.5, -2.5), (Span(3, 0, 2), Span(4, 2, 3)), Finish.STOP, 1, matched=13
)


def reply(**meta) -> dict:
    changed = copy.deepcopy(REPLY)
    changed["meta_info"] |= meta
    return changed


def chunk(total: int, new: int, version: int, reason=None, repeats=False, **meta) -> dict:
    """Token i is 100 + i, with the log-prob -i. ``repeats``: the chunk holds all tokens so far."""
    held = range(0 if repeats else total - new, total)
    return {
        "output_ids": [100 + i for i in held],
        "meta_info": {
            "finish_reason": reason,
            "weight_version": str(version),
            "completion_tokens": total,
            "num_retractions": 0,
            "output_token_logprobs": [[-float(i), 100 + i, None] for i in held],
            **meta,
        },
    }


def attested(*spans: tuple[int, int, int]) -> list[dict]:
    return [{"version": str(v), "start": a, "end": b} for v, a, b in spans]


STOP = {"type": "stop", "matched": 2}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


# ---- completions in one piece


def stream_of(
    version: int = 0, completion: GrowingCompletion | None = None
) -> tuple[CompletionStream, GrowingCompletion]:
    completion = completion or GrowingCompletion()
    return CompletionStream(completion, version, VOCAB), completion


def parse_completion(reply: object) -> Completion:
    stream, completion = stream_of()
    if not stream.add(reply):
        raise ValueError("the completion has not ended")
    return completion.completion()


def test_a_whole_completion_is_read():
    assert parse_completion(REPLY) == COMPLETION


SCORED = {
    "prompt_tokens": 3,
    "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
    "input_top_logprobs": [None, [[-0.5, 9, None]], [[-0.25, 8, None]]],
}


def test_the_log_probs_of_a_prompt_are_read_where_they_are_wanted():
    for wanted in (True, False):
        stream, completion = stream_of()
        completion.wants_prompt = wanted
        stream.add(chunk(1, 1, 3, **SCORED))
        stream.add(chunk(2, 1, 3, **SCORED))  # every chunk repeats them
        assert not completion.wants_prompt
        assert completion.prompt_logprobs == [None, -1.0, -2.0][: 3 * wanted]
        assert completion.prompt_alternatives == [(), ((-0.5, 9),), ((-0.25, 8),)][: 3 * wanted]


@pytest.mark.parametrize(
    "changed",
    [
        {"input_token_logprobs": []},
        {"input_token_logprobs": [[None, 5, None]]},
        {"input_token_logprobs": [[None, 5, None], [None, 6, None], [-2.0, 7, None]]},
        {"input_token_logprobs": [[None, 5, None], [float("nan"), 6, None], [-2.0, 7, None]]},
        {"input_token_logprobs": [[None, 5, None], [0.5, 6, None], [-2.0, 7, None]]},
    ],
)
def test_a_prompt_without_all_of_its_log_probs_is_malformed(changed):
    stream, completion = stream_of()
    completion.wants_prompt = True
    with pytest.raises(ValueError, match=r"of the prompt are missing|prompt tokens"):
        stream.add(chunk(1, 1, 3, STOP, weight_versions=attested((3, 0, 1)), **SCORED | changed))
    assert not completion.tokens and completion.wants_prompt


def test_a_missing_retraction_count_is_zero():
    for value in (None, 0):
        assert parse_completion(reply(num_retractions=value)).retractions == 0
    without = copy.deepcopy(REPLY)
    del without["meta_info"]["num_retractions"]
    assert parse_completion(without).retractions == 0


def test_a_completion_without_tokens_is_read():
    empty = reply(
        output_token_logprobs=[],
        completion_tokens=0,
        finish_reason={"type": "length", "length": 0},
        weight_versions=attested((2, 0, 0)),
    ) | {"output_ids": []}
    assert parse_completion(empty) == Completion((), (), (), Finish.LENGTH, retractions=1)


def without(*path: str) -> dict:
    changed = copy.deepcopy(REPLY)
    part = changed
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return changed


MALFORMED = [
    pytest.param(None, id="null"),
    pytest.param("", id="text"),
    pytest.param([REPLY], id="a list"),
    pytest.param({}, id="empty"),
    pytest.param({"error": "no"}, id="an error without a message"),
    pytest.param(without("meta_info"), id="no meta_info"),
    pytest.param(without("output_ids"), id="no output_ids"),
    pytest.param(without("meta_info", "finish_reason"), id="no finish_reason"),
    pytest.param(without("meta_info", "weight_versions"), id="no weight_versions"),
    pytest.param(without("meta_info", "output_token_logprobs"), id="no log-probs"),
    pytest.param(without("meta_info", "completion_tokens"), id="no count"),
    pytest.param(reply(finish_reason=None), id="not finished"),
    pytest.param(reply(finish_reason={"type": "tired"}), id="unknown finish"),
    pytest.param(reply(finish_reason={"type": "partial"}), id="a finish that is none"),
    pytest.param(reply(weight_versions=None), id="null versions"),
    pytest.param(reply(weight_versions=[{"version": "x", "start": 0, "end": 3}]), id="no number"),
    pytest.param(reply(weight_versions=attested((3, 0, 2))), id="spans too short"),
    pytest.param(reply(weight_versions=attested((3, 0, 9))), id="spans too long"),
    pytest.param(reply(weight_versions=[]), id="no spans"),
    pytest.param(reply(weight_versions=attested((3, 0, 2), (4, 1, 3))), id="spans that overlap"),
    pytest.param(reply(weight_versions=attested((3, 0, 1), (4, 2, 3))), id="spans with a gap"),
    pytest.param(reply(weight_versions=attested((3, 0, 4), (4, 4, 3))), id="a span of negative length"),
    pytest.param(reply(output_token_logprobs=[[-0.5, 11, None]]), id="too few log-probs"),
    pytest.param(reply(completion_tokens=-1), id="a negative count"),
    pytest.param(reply(completion_tokens=2), id="another count"),
    pytest.param(
        reply(output_token_logprobs=[[-0.5, 11, None], [None, 12, None], [-2.5, 13, None]]),
        id="null log-prob (NaN)",
    ),
    pytest.param(
        reply(output_token_logprobs=[[-0.5, 11, None], [-1.5, 99, None], [-2.5, 13, None]]),
        id="other tokens",
    ),
    pytest.param(reply(output_token_logprobs=[[], [], []]), id="empty log-probs"),
]


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_reply_is_a_value_error_and_never_a_completion(malformed):
    with pytest.raises(ValueError, match=r"\w"):
        parse_completion(malformed)


NAN, INF = float("nan"), float("inf")
REFUSED = [
    pytest.param(NAN, 101, "token 1 of the completion has the log-prob nan", id="NaN"),
    pytest.param(-INF, 101, "token 1 of the completion has the log-prob -inf", id="minus infinity"),
    pytest.param(INF, 101, "token 1 of the completion has the log-prob inf", id="infinity"),
    pytest.param(-1e39, 101, r"the log-prob -1e\+39", id="infinite as a float32"),
    pytest.param(
        0.002, 101, "the log-prob 0.002, expected a finite number that is not positive", id="positive"
    ),
    pytest.param(-1.0, -1, "token 1 of the completion has the id -1, which is outside", id="negative id"),
    pytest.param(-1.0, VOCAB, "the id 10000, which is outside the vocabulary of 10000", id="id too large"),
    pytest.param(-1.0, 1 << 40, "outside the vocabulary", id="id of 40 bits"),
    pytest.param(-1.0, INF, "not a reply of /generate", id="infinite id"),
]


@pytest.mark.parametrize(("logprob", "token", "message"), REFUSED)
@pytest.mark.parametrize("reason", [None, STOP, ABORT], ids=["partial", "last", "aborted"])
def test_a_value_that_cannot_be_trained_is_refused_by_name_and_nothing_of_its_chunk_is_kept(
    logprob, token, message, reason
):
    stream, completion = stream_of(2)
    stream.add(chunk(1, 1, 3))
    before = completion.completion()
    bad = chunk(3, 2, 3, reason, weight_versions=attested((3, 0, 3)))
    bad["meta_info"]["output_token_logprobs"][0] = [logprob, token, None]
    bad["output_ids"][0] = token
    with pytest.raises(ValueError, match=message):
        stream.add(bad)
    assert completion.completion() == before


def test_a_log_prob_that_rounding_has_made_positive_is_taken():
    certain = reply(output_token_logprobs=[[1e-4, 11, None], [-0.0, 12, None], [0, 13, None]])
    assert parse_completion(certain).logprobs == pytest.approx((1e-4, 0, 0))


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_chunk_changes_nothing(malformed):
    stream, completion = stream_of(2)
    stream.add(chunk(1, 1, 3))
    before = completion.completion()
    with pytest.raises(ValueError, match=r"\w"):
        stream.add(malformed)
    assert completion.completion() == before


@pytest.mark.parametrize(
    "logprobs", [None, [], [[None, 1]], [[None, 1], [None, 2], [-1.0, 3]], [[None, 1], [-1.0, 2]]]
)
def test_prompt_log_probs_must_be_complete(logprobs):
    with pytest.raises(ValueError, match=r"\w"):
        parse_prompt_logprobs(reply(input_token_logprobs=logprobs), 3)


# ---- completions in chunks


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_chunks_make_the_whole_completion_whether_they_repeat_what_came_before_or_not(sizes, repeats):
    (stream, completion), total = stream_of(), 0
    for number, size in enumerate(sizes):
        total += size
        last = number == len(sizes) - 1
        meta = {"weight_versions": attested((5, 0, total))} if last else {}
        assert stream.add(chunk(total, size, 5, STOP if last else None, repeats, **meta)) == last
        if not last:
            assert completion.tokens.tolist() == list(range(100, 100 + total))
            assert completion.finish is Finish.PARTIAL
    tokens = tuple(range(100, 100 + total))
    assert completion.completion() == Completion(
        tokens, tuple(-float(i) for i in range(total)), (Span(5, 0, total),), Finish.STOP, matched=2
    )


def test_the_tokens_of_a_chunk_get_the_version_that_was_reported_with_the_chunk_before():
    stream, completion = stream_of(2)
    for total, new, reported in ((1, 1, 3), (3, 2, 3), (5, 2, 5), (7, 2, 5)):
        assert not stream.add(chunk(total, new, reported))
    assert completion.runs == [(2, 1), (3, 5), (5, 7)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=12),
    st.data(),
)
def test_no_token_of_a_partial_completion_is_said_to_be_newer_than_it_is(tokens_then_updates, data):
    """Chunks are cut anywhere in a history of tokens and updates, and say the version of that moment."""
    history: list[int] = []
    version = data.draw(st.integers(0, 3))
    stream, completion = stream_of(version)
    for tokens, updates in tokens_then_updates:
        before = len(history)
        for _ in range(tokens):
            history.append(version)
            version += data.draw(st.sampled_from([0, 0, 0, 1]))
        stream.add(chunk(len(history), len(history) - before, version))
        version += updates
        stamped = completion.completion().versions()
        assert len(stamped) == len(history)
        assert all(stamp <= true for stamp, true in zip(stamped, history, strict=True))


def test_no_token_so_far_is_newer_than_the_version_that_is_reported_with_it():
    stream, completion = stream_of(version=3)
    assert completion.newest is None
    for total, version in ((1, 3), (3, 3), (4, 5)):
        stream.add(chunk(total, 1 if total != 3 else 2, version))
        assert completion.newest == version


def test_the_last_chunks_own_versions_replace_all_of_them():
    stream, completion = stream_of()
    stream.add(chunk(2, 2, 1))
    assert stream.add(chunk(4, 2, 3, STOP, weight_versions=attested((1, 0, 3), (3, 3, 4))))
    assert completion.runs == [(1, 3), (3, 4)]


def test_a_reply_continues_what_is_there_and_leaves_it_as_it_was():
    completion = GrowingCompletion()
    completion.add(7, [1, 2], [-1.0, -2.0])
    completion.retractions = 4
    stream, _ = stream_of(8, completion)
    stream.add(chunk(1, 1, 9, num_retractions=1))
    assert completion.runs == [(7, 2), (8, 3)]
    assert stream.add(chunk(3, 2, 9, STOP, weight_versions=attested((9, 0, 3)), num_retractions=2))
    assert completion.completion() == Completion(
        (1, 2, 100, 101, 102),
        (-1.0, -2.0, 0.0, -1.0, -2.0),
        (Span(7, 0, 2), Span(9, 2, 5)),
        Finish.STOP,
        retractions=6,
        matched=2,
    )


def test_a_chunk_that_contradicts_those_before_is_an_error():
    for total in (1, 9):
        stream, _ = stream_of()
        stream.add(chunk(2, 2, 0))
        with pytest.raises(ValueError, match="2 tokens and log-probs of 1"):
            stream.add(chunk(total, 1, 0))


# ---- aborted and refused completions


def aborted(*chunks: dict, version: int = 0, attested: bool = True) -> Completion:
    """Return what is kept of a completion that ends with an abort."""
    stream, completion = stream_of(version)
    for part in chunks[:-1]:
        stream.add(part)
    with pytest.raises(Aborted, match="generation was aborted: ") as caught:
        stream.add(chunks[-1])
    assert caught.value.attested == attested
    return completion.completion()


def test_an_aborted_completion_keeps_its_tokens_and_the_versions_that_the_server_attests():
    partial = aborted(chunk(2, 2, 1), chunk(5, 3, 3, ABORT, weight_versions=attested((1, 0, 3), (3, 3, 5))))
    assert partial.tokens == (100, 101, 102, 103)
    assert partial.spans == (Span(1, 0, 3), Span(3, 3, 4))
    assert partial.finish is Finish.PARTIAL


def test_the_last_token_before_an_abort_may_be_the_end_and_is_dropped_whichever_it_is():
    partial = aborted(chunk(1, 1, 0), chunk(2, 1, 0, ABORT, weight_versions=attested((0, 0, 2))))
    assert partial.tokens == (100,)
    assert aborted(chunk(1, 1, 0, ABORT, weight_versions=attested((0, 0, 1)))).tokens == ()


def test_a_completion_that_is_aborted_in_the_queue_keeps_all_that_was_handed_out():
    """SGLang then sends the last token once more, with the log-probs of the whole completion."""
    last = chunk(3, 1, 2, ABORT, weight_versions=attested((1, 0, 2), (2, 2, 3)))
    last["meta_info"]["output_token_logprobs"] = [[-float(i), 100 + i, None] for i in range(3)]
    del last["meta_info"]["num_retractions"]
    partial = aborted(chunk(1, 1, 1), chunk(3, 2, 1, num_retractions=2), last)
    assert partial.tokens == (100, 101, 102)
    assert partial.spans == (Span(1, 0, 2), Span(2, 2, 3))
    assert partial.retractions == 2


def test_a_completion_that_is_aborted_without_its_versions_keeps_the_lower_bounds():
    partial = aborted(chunk(2, 2, 1), chunk(4, 2, 1, ABORT), version=0, attested=False)
    assert partial.spans == (Span(0, 0, 2), Span(1, 2, 3))


def test_a_completion_that_is_aborted_before_its_first_token_stays_as_it_was():
    nothing = chunk(0, 0, 0, ABORT, weight_versions=attested((0, 0, 0)))
    assert aborted(nothing) == Completion((), (), (), Finish.PARTIAL)


def test_an_abort_takes_nothing_of_what_was_there_before():
    completion = GrowingCompletion()
    completion.add(7, [1, 2], [-1.0, -2.0])
    stream, _ = stream_of(8, completion)
    with pytest.raises(Aborted):
        stream.add(chunk(1, 1, 8, ABORT, weight_versions=attested((8, 0, 1))))
    assert completion.completion() == Completion((1, 2), (-1.0, -2.0), (Span(7, 0, 2),), Finish.PARTIAL)


@pytest.mark.parametrize(
    "refusal",
    [
        {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}},
        chunk(0, 0, 0, {"type": "abort", "message": "too long", "status_code": 400}),
    ],
)
def test_a_refusal_in_the_stream_is_no_abort(refusal):
    with pytest.raises(ValueError, match="too long"):
        stream_of()[0].add(refusal)


# ---- what users ask for beyond tokens and log-probs


@pytest.mark.parametrize(
    ("reason", "matched"),
    [
        ({"type": "stop", "matched": 13}, 13),
        ({"type": "stop", "matched": "\n\n"}, "\n\n"),
        ({"type": "stop", "matched": [12, 13]}, 13),
        ({"type": "length", "length": 3}, None),
    ],
)
def test_what_has_ended_a_completion_is_kept_with_it_until_it_is_cut(reason, matched):
    completion = GrowingCompletion()
    assert CompletionStream(completion, 3, VOCAB).add(reply(finish_reason=reason))
    assert completion.matched == matched
    completion.cut(2)
    assert completion.matched is None


@pytest.mark.parametrize("repeats", [False, True])
def test_alternatives_come_with_their_tokens_and_go_with_them(repeats):
    def with_alternatives(total: int, new: int, reason=None, **more) -> dict:
        held = range(0 if repeats else total - new, total)
        top = [[[-0.1 * i, 7, None], [-3.0, 8, None]] for i in held]
        return chunk(total, new, 3, reason, repeats, output_top_logprobs=top, cached_tokens=5, **more)

    completion = GrowingCompletion()
    stream = CompletionStream(completion, 3, VOCAB)
    stream.add(with_alternatives(2, 2))
    stream.add(with_alternatives(3, 1, STOP, weight_versions=attested((3, 0, 3))))
    assert completion.alternatives == [((-0.1 * i, 7), (-3.0, 8)) for i in range(3)]
    assert completion.cached_tokens == 5
    completion.cut(1)
    assert len(completion.alternatives) == 1


def test_fewer_alternatives_than_tokens_are_malformed_and_change_nothing():
    completion = GrowingCompletion()
    stream = CompletionStream(completion, 3, VOCAB)
    with pytest.raises(ValueError, match="alternatives to 1 tokens, expected 2"):
        stream.add(chunk(2, 2, 3, output_top_logprobs=[[[-0.1, 7, None]]]))
    assert len(completion.tokens) == 0


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_is_not_refused():
    """SGLang gives neither tokens nor log-probs then, and a status as for a grammar that is wrong."""
    meta = {"finish_reason": {"type": "abort", "message": "Aborted by AbortReq.", "status_code": 400}}
    completion = GrowingCompletion()
    with pytest.raises(Aborted, match="Aborted by AbortReq"):
        CompletionStream(completion, 0, 100).add({"output_ids": [], "meta_info": meta})
    assert not len(completion.tokens)
