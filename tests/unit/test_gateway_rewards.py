"""Rewards of clients: bodies that are refused by name, which turns get them, and givings that count once."""

import json

import pytest

from slipstream.rollout.gateway.conversations import (
    AmbiguousTurn,
    ClientReward,
    GivenBefore,
    TooManySessions,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.rewarding import (
    read_opening,
    read_reward,
    read_session_reward,
    reply_of,
)
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.tokens.turn_entries import UserReward
from tests.unit.talking import Gateway, assistant, tool, user, written_call

ODD = "yes<|end|>"

WRONG = [
    ('{"value": NaN, "session": "s"}', ["value: expected a finite number", "found NaN"]),
    ('{"value": Infinity, "session": "s"}', ["value: expected a finite", "found Infinity"]),
    ('{"value": -Infinity, "session": "s"}', ["found -Infinity"]),
    ('{"value": 1e999, "session": "s"}', ["found Infinity"]),
    ('{"value": 1e39, "session": "s"}', ["value: expected a finite number of float32", "1e+39"]),
    ('{"value": -3.5e38, "session": "s"}', ["of float32"]),
    (f'{{"value": 1{"0" * 400}, "session": "s"}}', ["of float32"]),
    ('{"value": true, "session": "s"}', ["value", "found true"]),
    ('{"value": false, "session": "s"}', ["value", "found false"]),
    ('{"value": "1", "session": "s"}', ["value", 'found "1"']),
    ('{"value": null, "session": "s"}', ["value", "found null"]),
    ('{"value": [1], "session": "s"}', ["value", "found [1]"]),
    ('{"value": {"x": 1}, "session": "s"}', ["value", 'found {"x": 1}']),
    ('{"session": "s"}', ["`value` is missing"]),
    ('{"value": 1}', ["exactly one of response_id, call_id, session, found none"]),
    ("{}", ["`value` is missing", "exactly one of"]),
    ('{"value": 1, "session": "s", "call_id": "c"}', ["found call_id and session"]),
    (
        '{"value": 1, "session": "s", "call_id": "c", "response_id": "r"}',
        ["response_id and call_id and session"],
    ),
    ('{"value": 1, "responseid": "r"}', ['no field "responseid"', "did you mean `response_id`?"]),
    ('{"value": 1, "respones_id": "r"}', ["did you mean `response_id`?", "found none"]),
    ('{"value": 1, "session": "s", "trun": 3}', ["did you mean `turn`?"]),
    ('{"value": 1, "session": "s", "Turn": 3}', ["did you mean `turn`?"]),
    ('{"reward": 1, "session": "s"}', ['no field "reward"', "the fields are value,", "`value` is missing"]),
    ('{"value": 1, "session_id": "s"}', ["did you mean `session`?"]),
    ('{"value": 1, "session": "s", "gamma": 0.9}', ['no field "gamma"']),
    ('{"value": 1, "session": "s", "": 1}', ['no field ""']),
    ('{"value": 1, "session": "s", "turn": -1}', ["turn: expected the place of a turn", "found -1"]),
    ('{"value": 1, "session": "s", "turn": 1.0}', ["turn", "found 1.0"]),
    ('{"value": 1, "session": "s", "turn": true}', ["turn", "found true"]),
    ('{"value": 1, "session": "s", "turn": "0"}', ["turn", 'found "0"']),
    ('{"value": 1, "session": "s", "turn": null}', ["turn", "found null"]),
    ('{"value": 1, "session": "s", "turn": 1e3}', ["turn", "found 1000.0"]),
    ('{"value": 1, "call_id": "c", "turn": 1}', ["`turn` is of no use without `session`"]),
    ('{"value": 1, "session": "s", "choice": 0}', ["`choice` is of no use without `response_id`"]),
    ('{"value": 1, "response_id": "r", "choice": -1}', ["choice: expected the place of an answer"]),
    ('{"value": 1, "response_id": "r", "discount": 0.5}', ["`discount` is of no use without `session`"]),
    ('{"value": 1, "session": "s", "turn": 0, "discount": 1}', ["leave `turn` out"]),
    ('{"value": 1, "session": "s", "discount": 1.5}', ["discount: expected a number from 0 to 1"]),
    ('{"value": 1, "session": "s", "discount": -0.1}', ["discount"]),
    ('{"value": 1, "session": "s", "discount": NaN}', ["discount", "found NaN"]),
    ('{"value": 1, "session": ""}', ["session: expected the name of a session"]),
    ('{"value": 1, "session": "  "}', ["session: expected"]),
    ('{"value": 1, "session": "a\\nb"}', ["session: expected"]),
    ('{"value": 1, "session": 7}', ["session: expected", "found 7"]),
    ('{"value": 1, "response_id": ""}', ["response_id: expected the id of an answer"]),
    ('{"value": 1, "response_id": 5}', ["response_id", "found 5"]),
    ('{"value": 1, "call_id": ["c"]}', ["call_id: expected the id of a tool call"]),
    ('{"value": 1, "session": "s", "name": ""}', ["name: expected 1 to 64 letters"]),
    ('{"value": 1, "session": "s", "name": "a b"}', ["name", 'found "a b"']),
    (f'{{"value": 1, "session": "s", "name": "{"n" * 65}"}}', ["name"]),
    ('{"value": 1, "session": "s", "key": ""}', ["key: expected a text"]),
    ('{"value": 1, "session": "s", "key": 1}', ["key", "found 1"]),
    ('{"value": 1, "value": 2, "session": "s"}', ['"value" is given twice']),
    ("[1]", ["expected a JSON object"]),
    ("1", ["expected a JSON object"]),
    ("", ["the body is not JSON"]),
    ("{", ["the body is not JSON"]),
    ("[" * 100_000, ["the body is not JSON"]),
    (
        '{"valu": NaN, "turn": -1, "session": 3, "discount": 7}',
        [
            'no field "valu"',
            "turn: expected",
            "session: expected",
            "discount: expected",
            "`value` is missing",
        ],
    ),
]


@pytest.mark.parametrize(("body", "told"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_body_is_refused_with_everything_that_is_wrong(body, told):
    with pytest.raises(Refusal) as refused:
        read_reward(body.encode(), None)
    assert refused.value.status == 400
    for text in told:
        assert text in refused.value.message


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"reward": 1, "response_id": "r"}, 'no field "response_id"'),
        ({"reward": 1, "value": 1}, 'no field "value"'),
        ({"value": 1}, "`reward` is missing"),
        ({"reward": None}, "reward: expected a finite number"),
        ({"reward": 1, "turn": "newest"}, "turn: expected"),
    ],
)
def test_the_reward_of_a_session_in_the_path_never_goes_to_another_turn_than_is_meant(body, told):
    with pytest.raises(Refusal) as refused:
        read_session_reward(json.dumps(body).encode(), "s", None)
    assert told in refused.value.message


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_an_answer_is_named_by_its_id_in_the_words_of_every_protocol(prefix):
    body = {"value": 0.5, "response_id": f"{prefix}abc", "name": "tests", "choice": 1}
    expected = ClientReward(value=0.5, request="abc", choice=1, name="tests", once="k")
    assert read_reward(json.dumps(body).encode(), "k") == expected
    assert read_reward(json.dumps(body | {"key": "k"}).encode(), "other") == expected


@pytest.fixture
def gateway():
    return Gateway()


def give(gateway, key="key", **reward):
    given = gateway.sessions.reward(User(key), ClientReward(**{"value": 1.0} | reward))
    gateway.append(given.entries)
    return given


def rewards(gateway) -> list[tuple[int, float]]:
    return [(item.turn, item.reward) for item in gateway.journal if isinstance(item, UserReward)]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_answer_is_rewarded_by_its_id_and_by_the_ids_of_its_calls(gateway, restarts):
    call = {"name": "f", "arguments": {}}
    first = gateway.talk([user("hi")], f"{written_call(call)}<|end|>", session="s", request="r1")
    history = [user("hi"), assistant("", tool_calls=[{"id": "call_0", "function": call}]), tool("1")]
    second = gateway.talk(history, ODD, session="s", request="r2")
    if restarts:
        gateway.restart()
    give(gateway, request="r2", value=0.25)
    give(gateway, call="call_0", value=0.5)
    assert rewards(gateway) == [(second, 0.25), (first, 0.5)]
    for wrong in ({"request": "r3"}, {"call": "call_9"}, {"request": "r2", "choice": 1}):
        with pytest.raises(UnknownTurn):
            give(gateway, **wrong)
    with pytest.raises(UnknownTurn):
        give(gateway, key="other", request="r2")


def test_an_answer_among_several_and_a_call_id_of_several_turns_must_be_told_apart(gateway):
    begun = gateway.begin([user("hi")], session="s", request="r", choices=2)
    calls = f"{written_call({'name': 'f', 'arguments': {}})}<|end|>"
    numbers = [gateway.end(begun, calls, choice=choice) for choice in (0, 1)]
    with pytest.raises(AmbiguousTurn, match=r"give `choice`, one of \[0, 1\]"):
        give(gateway, request="r")
    with pytest.raises(AmbiguousTurn, match="give `session` and `turn`"):
        give(gateway, call="call_0")
    give(gateway, request="r", choice=1)
    assert rewards(gateway) == [(numbers[1], 1.0)]


@pytest.mark.parametrize(
    ("discount", "shares"),
    [(None, [0.5, 0.5, 0.5]), (1.0, [0.5, 0.5, 0.5]), (0.5, [0.125, 0.25, 0.5]), (0.0, [0.5])],
)
def test_the_main_turns_of_a_session_share_its_reward(gateway, discount, shares):
    numbers = [gateway.talk([user(text)], ODD, session="s") for text in "abc"]
    gateway.talk([user("title")], ODD, session="s", sampling={"temperature": 0.0})
    give(gateway, session="s", is_whole=True, value=0.5, discount=discount)
    assert rewards(gateway) == list(zip(numbers[-len(shares) :], shares, strict=True))


def test_the_recipe_says_how_turns_share_a_reward_that_names_no_discount(gateway):
    gateway.sessions._credit = 0.0
    numbers = [gateway.talk([user(text)], ODD, session="s") for text in "abc"]
    give(gateway, session="s", is_whole=True)
    assert rewards(gateway) == [(numbers[-1], 1.0)]


def test_a_session_without_a_main_turn_has_no_reward_to_share(gateway):
    gateway.talk([user("title")], ODD, session="s", sampling={"temperature": 0.0})
    with pytest.raises(UnknownTurn, match="no main turn"):
        give(gateway, session="s", is_whole=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_giving_with_a_key_counts_once(gateway, restarts):
    gateway.talk([user("a")], ODD, session="s")
    gateway.talk([user("b")], ODD, session="s")
    first = give(gateway, session="s", is_whole=True, once="k")
    before = rewards(gateway)
    if restarts:
        gateway.restart()
    again = give(gateway, session="s", is_whole=True, once="k")
    assert not again.entries and rewards(gateway) == before and len(before) == 2
    assert [(turn.turn, turn.value) for turn in again.turns] == [(t.turn, t.value) for t in first.turns]
    with pytest.raises(GivenBefore, match="'k' was used for another reward"):
        give(gateway, session="s", is_whole=True, value=0.0, once="k")
    give(gateway, session="s", is_whole=True, once="l")
    assert len(rewards(gateway)) == 4
    gateway.talk([user("a")], ODD, session="s", user=User("other"))
    assert give(gateway, key="other", session="s", is_whole=True, once="k").entries, "keys are a user's own"


def test_nothing_of_rewards_is_left_of_a_session_that_is_forgotten(gateway):
    gateway.talk([user("a")], ODD, session="s", request="r")
    give(gateway, session="s", once="k")
    gateway.append(gateway.sessions.forget("s", "key"))
    assert not gateway.sessions._table._with_id and not gateway.sessions._table._given
    with pytest.raises(UnknownTurn):
        give(gateway, request="r")


@pytest.mark.parametrize(
    ("outcomes", "status", "word"),
    [
        (["counted", "counted"], 200, "counted"),
        (["trained", "counted"], 200, "counted"),
        (["", "trained"], 202, "recorded"),
        (["trained", "expired"], 409, "turn 0: it was trained already; turn 1: it has expired"),
        (["ended", "training"], 409, "turn 0: it has ended; turn 1: the training step"),
    ],
)
def test_a_client_is_told_what_has_become_of_its_reward(gateway, outcomes, status, word):
    for text in "ab":
        gateway.talk([user(text)], ODD, session="s")
    given = give(gateway, session="s", is_whole=True)
    for turn, outcome in zip(given.turns, outcomes, strict=True):
        turn.outcome = outcome
    told, content = reply_of(given)
    assert told == status and word in json.dumps(content)


# ---- sessions that clients open, and groups of them


def opened(gateway, count=1, *, key="key", is_group=False, once="") -> list[str]:
    names, entries = gateway.sessions.open_sessions(
        User(key), count, {"task": "sums"}, is_group=is_group, once=once, now_s=gateway.now
    )
    gateway.append(entries)
    return names


@pytest.mark.parametrize("restarts", [False, True])
def test_turns_of_a_session_that_its_client_has_opened_say_so(gateway, restarts):
    [name] = opened(gateway)
    if restarts:
        gateway.restart()
    own = gateway.talk([user("a")], ODD, session=name)
    other = gateway.talk([user("a")], ODD, session="other")
    assert (gateway.turn(own).is_rewarded, gateway.turn(other).is_rewarded) == (True, False)
    assert next(gateway.sessions.listed(User("key"), name)).tags == {"task": "sums"}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_group", [False, True])
def test_an_opening_that_is_sent_again_opens_nothing(gateway, is_group, restarts):
    names = opened(gateway, 3, is_group=is_group, once="k")
    if restarts:
        gateway.restart()
    entries = len(gateway.journal)
    assert opened(gateway, 3, is_group=is_group, once="k") == names
    assert (gateway.sessions.sessions, len(gateway.journal)) == (3, entries)
    for count, grouped in ((2, is_group), (3, not is_group)):
        with pytest.raises(GivenBefore, match="'k' was used to open other sessions"):
            opened(gateway, count, is_group=grouped, once="k")
    assert not {*names} & {*opened(gateway, 3, key="other", once="k"), *opened(gateway, 3)}


def test_an_opening_is_remembered_as_long_as_one_of_its_sessions(gateway):
    names = opened(gateway, 2, once="k")
    gateway.append(gateway.sessions.forget(names[0], "key"))
    assert opened(gateway, 2, once="k") == names
    gateway.append(gateway.sessions.forget(names[1], "key"))
    assert not gateway.sessions._table._openings
    assert opened(gateway, 2, once="k") != names


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_is_compared_once_each_of_its_sessions_has_a_reward(gateway, restarts):
    names = opened(gateway, 3, is_group=True)
    turns = [gateway.talk([user(name)], ODD, session=name) for name in names]
    turns.append(gateway.talk([user("more")], ODD, session=names[0]))
    values = [1.0, 0.0, 0.5]
    for left, (name, value) in enumerate(zip(names[:2], values, strict=False)):
        given = give(gateway, session=name, is_whole=True, value=value, discount=0.5)
        assert given.waits_for == 2 - left and not rewards(gateway)
        assert reply_of(given)[1]["status"] == "held"
    if restarts:
        gateway.restart()
    last = give(gateway, session=names[2], is_whole=True, value=values[2])
    assert [turn.session for turn in last.turns] == [names[0], names[0], names[1], names[2]]
    assert dict(rewards(gateway)) == dict(zip(turns, [0.5, 0.0, 0.5, 1.0], strict=True))
    compared = {item.turn: item.group for item in gateway.journal if isinstance(item, UserReward)}
    assert compared[turns[0]] == pytest.approx((0.25, 0.5, 3)), "it shares the mean as it shares the reward"
    assert compared[turns[1]] == compared[turns[3]] == pytest.approx((0.5, 0.5, 3))
    if restarts:
        gateway.restart()
    with pytest.raises(GivenBefore, match="has its rewards"):
        give(gateway, session=names[0], is_whole=True)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_held_reward_that_is_sent_again_tells_what_has_become_of_it_since(gateway, restarts):
    names = opened(gateway, 3, is_group=True)
    for name in names:
        gateway.talk([user(name)], ODD, session=name)

    def given(place: int):
        reward = {"session": names[place], "is_whole": True, "value": float(place), "once": f"k{place}"}
        return give(gateway, **reward)

    assert [given(place).waits_for for place in (0, 0, 1)] == [2, 2, 1]
    if restarts:
        gateway.restart()
    assert given(0).waits_for == 1, "another one has its reward"
    last = given(2)
    last.turns[0].outcome = "counted"
    if restarts:
        gateway.restart()
    for place in (0, 1):
        again = given(place)
        assert not again.entries and not again.waits_for
        assert [(turn.session, turn.value) for turn in again.turns] == [(names[place], float(place))]
        assert reply_of(again)[1]["status"] == ("counted" if not place and not restarts else "recorded")


@pytest.mark.parametrize(("fits", "running"), [(2, 0), (4, 2)])
def test_of_a_group_that_does_not_fit_no_session_stays(fits, running):
    """It would push its own first sessions out, and could never be compared."""
    gateway = Gateway(SessionLimits(1000, 1 << 30, 1800.0, per_key=fits))
    for number in range(running):
        gateway.begin([user(str(number))], session=f"runs {number}")
    with pytest.raises(TooManySessions, match="3 sessions do not fit"):
        opened(gateway, 3, is_group=True)
    assert gateway.sessions.sessions == running
    assert not gateway.sessions._table._groups
    assert len(opened(gateway, fits - running, is_group=True)) == fits - running


def test_a_turn_of_a_session_in_a_group_has_no_reward_of_its_own(gateway):
    name = opened(gateway, 2, is_group=True)[0]
    gateway.talk([user("a")], ODD, session=name, request="r")
    for place in ({"session": name, "turn": 0}, {"request": "r"}, {"session": name}):
        with pytest.raises(ValueError, match="compared as wholes"):
            give(gateway, **place)


def test_a_reward_that_is_given_again_before_its_group_is_complete_takes_the_place_of_the_first(gateway):
    names = opened(gateway, 2, is_group=True)
    for name in names:
        gateway.talk([user(name)], ODD, session=name)
    give(gateway, session=names[0], is_whole=True, value=0.0)
    give(gateway, session=names[0], is_whole=True, value=1.0)
    assert [turn.value for turn in give(gateway, session=names[1], is_whole=True, value=0.5).turns] == [
        1.0,
        0.5,
    ]


def test_a_list_shows_versions_ids_and_rewards_of_the_users_own_turns(gateway):
    [name] = opened(gateway)
    call = written_call({"name": "f", "arguments": {}})
    gateway.talk([user("a")], f"{call}<|end|>", session=name, request="r")
    opened(gateway, key="other")
    give(gateway, session=name, turn=0, value=0.5, name="tests")
    [session] = gateway.sessions.listed(User("key"))
    [turn] = session.turns
    assert (turn.request, turn.versions, turn.calls, turn.rewards) == ("r", (3,), ("call_0",), {"tests": 0.5})
    with pytest.raises(UnknownTurn):
        gateway.sessions.listed(User("other"), name)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"count": 0}', "count: expected a whole number from 1 to 1024, found 0"),
        ('{"count": true}', "found true"),
        ('{"group": 1}', "group: expected true or false"),
        ('{"group": true}', "expected 2 or more for a group"),
        ('{"tags": {"a": null}}', "tags: expected an object"),
        ('{"tags": {"a": NaN}}', "tags: expected an object"),
        ('{"tags": {"a": "\\ud800"}}', "tags: expected an object"),
        ('{"tags": {"\\udfff": 1}}', "tags: expected an object"),
        ('{"tags": {"a": {"b": 1}}}', "tags: expected an object"),
        ('{"count": 2, "key": "\\ud800"}', "key: expected a text"),
        ('{"count": 1e3}', "found 1000.0"),
        ('{"tag": {}}', "did you mean `tags`?"),
        ('{"n": 3, "tags": []}', 'no field "n"'),
    ],
)
def test_sessions_are_not_opened_by_a_wrong_body(body, told):
    with pytest.raises(Refusal) as refused:
        read_opening(body.encode(), None)
    assert told in refused.value.message
