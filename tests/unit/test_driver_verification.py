"""Which engines are believed, and what happens to the weights that are served meanwhile."""

import asyncio
import math

import pytest

from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.weights.served_weights import ServedWeights, TrainedWeights
from slipstream.backend.driver.weights.verification import Verifier, WeightsMismatch, probe_text
from slipstream.backend.simulate import clock
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema.weights import VerifyAlways, VerifyEveryN
from slipstream.rollout.engine.client import EngineAddress, EngineError, EngineLost
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit import doubles
from tests.unit.doubles import Collector, Policy
from tests.unit.test_driver_trainer_loss import engine

EXPECTED = [-1.0, -2.0, -3.0]


class World:
    """Engines by name: the log-probs and the checksum that each would answer, or what it raises."""

    def __init__(self) -> None:
        self.logprobs: dict[str, object] = {}
        self.checksums: dict[str, object] = {}
        self.asked: list[tuple[str, int]] = []
        self.unwell: set[str] = set()
        self.takes_s = 0.0

    def connect(self, address: EngineAddress) -> "Client":
        return Client(self, address)

    def verifier(self, verify=None, timeout_s: float = 5.0) -> Verifier:
        return Verifier(
            verify or VerifyAlways(),
            [1, 2, 3, 4],
            "float32",
            answer_timeout_s=0.05,
            timeout_s=timeout_s,
            connect=self.connect,
        )


class Client:
    def __init__(self, world: World, address: EngineAddress) -> None:
        self.address, self.name, self._world = address, address.name, world

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def prompt_logprobs(self, ids, *, version):
        self._world.asked.append((self.name, version))
        return await self._answer(self._world.logprobs.get(self.name, EXPECTED))

    async def healthy(self):
        return self.name not in self._world.unwell

    async def checksum(self):
        return await self._answer(self._world.checksums.get(self.name, "same"))

    async def _answer(self, answer):
        await asyncio.sleep(60 if answer == "silence" else self._world.takes_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


def wrong(verifier: Verifier, *names: str, version: int = 3) -> dict[str, str]:
    return clock.run(verifier.wrong(version, EXPECTED, [engine(name) for name in names]))


def test_engines_that_compute_what_the_trainer_does_are_right():
    world = World()
    world.logprobs["a"] = [-1.0005, -2.0, -3.001]
    assert wrong(world.verifier(), "a", "b") == {}
    assert world.asked == [("a", 3), ("b", 3)]


@pytest.mark.parametrize("found", [[-1.0, -2.0, -3.01], [-1.0, math.nan, -3.0], [-1.0, -math.inf, -3.0]])
def test_an_engine_that_computes_something_else_is_wrong_and_the_reason_has_both_numbers(found):
    world = World()
    world.logprobs["a"] = found
    reasons = wrong(world.verifier(), "a", "b")
    assert reasons.keys() == {"a"}
    assert "does not hold version 3" in reasons["a"]
    assert "weights.verify.tolerance allows 0.001" in reasons["a"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("silence", "no answer about version 3 in 0.2 s"),
        (EngineLost("gone"), "no answer about version 3: gone"),
        (EngineError("log-probs of version 2, expected 3"), "expected 3"),
        (Aborted("generation was aborted"), "generation was aborted"),
    ],
)
def test_an_engine_that_does_not_answer_is_not_believed_and_holds_up_no_other(answer, reason):
    world = World()
    world.logprobs["a"] = answer
    reasons = wrong(world.verifier(timeout_s=0.2), "a", "b")
    assert reasons.keys() == {"a"}
    assert reason in reasons["a"]


def test_a_busy_engine_may_take_its_time_and_one_that_is_not_well_may_not():
    world = World()
    world.takes_s = 0.2
    assert wrong(world.verifier(), "a") == {}
    world.unwell.add("b")
    assert wrong(world.verifier(), "a", "b") == {"b": "no answer about version 3: b has gone silent"}


def test_of_engines_with_different_checksums_the_fewer_are_wrong():
    world = World()
    world.checksums["b"] = "other"
    assert wrong(world.verifier(), "a", "b", "c").keys() == {"b"}


def test_where_checksums_are_at_odds_without_a_majority_none_is_believed():
    world = World()
    world.checksums["b"] = "other"
    assert wrong(world.verifier(), "a", "b").keys() == {"a", "b"}


def test_a_late_engine_must_have_the_checksum_that_the_others_had():
    world = World()
    verifier = world.verifier()
    assert wrong(verifier, "a", "b") == {}
    world.checksums["late"] = "other"
    assert wrong(verifier, "late").keys() == {"late"}
    assert wrong(verifier, "late", version=4) == {}, "of another version there is nothing to compare with"


def test_an_engine_without_checksums_is_judged_by_what_it_computes():
    world = World()
    world.checksums |= {"a": EngineError("Torch not compiled with CUDA enabled"), "b": "x"}
    verifier = world.verifier()
    assert wrong(verifier, "a") == {}
    assert wrong(verifier, "b", "a") == {}


def test_every_n_verifies_every_nth_version():
    verifier = World().verifier(VerifyEveryN(n=3))
    assert [version for version in range(10) if verifier.due(version)] == [0, 3, 6, 9]
    assert all(World().verifier().due(version) for version in range(10))


class Tokenizer:
    def apply_chat_template(self, conversation, *, add_generation_prompt, return_dict):
        return [len(word) for word in conversation[0]["content"].split()]


def test_the_text_is_that_of_the_prompts_as_often_as_it_takes():
    prompts = [Prompt(0, "a bb ccc"), Prompt(1, "dddd")]
    assert probe_text(prompts, Tokenizer(), 6) == [1, 2, 3, 4, 1, 2]
    assert probe_text(prompts, Tokenizer(), 2) == [1, 2]


# ---- the weights that are served


class Trainer:
    def __init__(self) -> None:
        self.published: list[tuple[int, list[str]]] = []
        self.reports: list[dict] = []
        self.unservable: str | None = None

    async def train(self, batch):
        return {}

    async def publish(self, version, engines):
        names = [address.name for address in engines]
        self.published.append((version, names))
        trouble = self.reports.pop(0) if self.reports else {}
        if "no_room" in trouble:
            return PublishReport(version, no_room=trouble["no_room"])
        out = {name for where in trouble.values() for name in where}
        return PublishReport(
            version, [name for name in names if name not in out], unservable=self.unservable, **trouble
        )

    async def logprobs(self, ids):
        return EXPECTED


async def advance(weights: ServedWeights) -> TrainedWeights:
    """Train a step and publish the next version."""
    return await doubles.advance(weights, weights._batches.core.version + 1)


async def serving(
    world: World, *names: str, starts_served: bool = True
) -> tuple[ServedWeights, EngineRoster, Trainer]:
    trainer, policy = Trainer(), Policy()
    roster = EngineRoster(lambda: policy.version, limit=4)
    for name in names:
        roster.add(world.connect(engine(name)))
    weights = ServedWeights(
        trainer, roster, Separate(), policy, verifier=world.verifier(), starts_served=starts_served
    )
    return weights, roster, trainer


def test_engines_are_in_doubt_from_before_the_update_until_the_verdict():
    async def main():
        world = World()
        weights, roster, _ = await serving(world, "a", "b")
        world.logprobs["b"] = [0.0, 0.0, 0.0]
        await advance(weights)
        assert [roster.doubted(client) for client in roster.clients] == [1, 1]
        await weights.settled()
        assert [(client.name, roster.doubted(client)) for client in roster.clients] == [("a", None)]
        client, reason = roster.lost.get_nowait()
        assert client.name == "b"
        assert "does not hold version 1" in reason

    clock.run(main())


def test_a_version_without_room_is_tried_again_until_there_is_and_told_once(monkeypatch):
    monkeypatch.setattr("slipstream.backend.driver.weights.served_weights.ROOM_RETRY_S", 0.01)

    async def main():
        world, notes, owner = World(), list[str](), Policy()
        trainer, roster = Trainer(), EngineRoster(lambda: owner.version, limit=4)
        roster.add(world.connect(engine("a")))
        trainer.reports = [{"no_room": "make room in /versions"}] * 3
        weights = ServedWeights(trainer, roster, Separate(), owner, note=notes.append)
        advancing = asyncio.create_task(advance(weights))
        while len(trainer.published) < 3:
            assert owner.version == 0, "the engines go on with what they serve"
            await asyncio.sleep(0.001)
        step = await advancing
        assert (owner.version, step.report.updated) == (1, ["a"])
        assert trainer.published == [(1, ["a"])] * 4
        assert notes == ["version 1 waits for room, and the engines go on without it: make room in /versions"]
        assert [client.name for client in roster.clients] == ["a"]

    clock.run(main())


def test_no_weights_are_published_before_every_collector_holds_back_what_they_sample():
    """Else a slow collector would write down tokens of weights that nobody has verified."""

    async def main():
        world = World()
        weights, roster, trainer = await serving(world, "a")
        prompt, slow = Collector(roster, "prompt"), Collector(roster, "slow")
        await asyncio.sleep(0)
        slow.hears = False
        advancing = asyncio.create_task(advance(weights))
        await asyncio.sleep(0.05)
        assert [engine.doubted for engine in prompt.records[-1].engines] == [1]
        assert trainer.published == []
        slow.hear()
        await advancing
        assert [version for version, _ in trainer.published] == [1]
        await weights.settled()
        await asyncio.sleep(0.01)
        for collector in (prompt, slow):
            assert collector.pool.version == 1
            assert [engine.doubted for engine in collector.records[-1].engines] == [None]
            await collector.pool.close()

    clock.run(main())


def test_a_transport_that_no_engine_can_get_weights_by_ends_the_run():
    """Engines that start again would be told the same."""

    async def main():
        weights, _, trainer = await serving(World(), "a")
        trainer.unservable = "nothing fills lm_head.weight"
        with pytest.raises(WeightsMismatch, match=r"nothing fills lm_head.weight"):
            await advance(weights)
        await weights.cancel()

    clock.run(main())


def test_the_next_version_waits_for_the_verdict_on_the_last_one():
    async def main():
        world = World()
        weights, _, trainer = await serving(world, "a")
        await advance(weights)
        await advance(weights)
        assert world.asked == [("a", 1)]
        await weights.settled()
        assert world.asked == [("a", 1), ("a", 2)]
        assert [version for version, _ in trainer.published] == [1, 2]

    clock.run(main())


def test_an_engine_is_admitted_when_it_was_found_to_hold_the_version():
    async def main():
        world = World()
        weights, _, trainer = await serving(world, "a")
        await advance(weights)
        admitted = []

        def admit():
            admitted.append(1)

        assert await weights.bring_up_to_date(engine("late"), admit) is None
        world.logprobs["other"] = [0.0, 0.0, 0.0]
        assert "does not hold version 1" in await weights.bring_up_to_date(engine("other"), admit)
        assert admitted == [1]
        assert trainer.published[1:] == [(1, ["late"]), (1, ["other"])]
        await weights.settled()

    clock.run(main())


@pytest.mark.parametrize(("starts_served", "published"), [(True, []), (False, [(0, ["new"])])])
def test_an_engine_gets_the_initial_policy_where_it_is_not_in_the_files(starts_served, published):
    async def main():
        weights, _, trainer = await serving(World(), starts_served=starts_served)
        assert await weights.bring_up_to_date(engine("new"), lambda: None) is None
        assert trainer.published == published
        trainer.reports = [{"failed": {"new": "it refuses"}}]
        refused = await weights.bring_up_to_date(engine("new"), lambda: None)
        assert refused == (None if starts_served else "it refuses")

    clock.run(main())


def test_engine_and_trainer_at_odds_about_the_initial_weights_is_an_error_of_its_own():
    async def main():
        world = World()
        weights, _, trainer = await serving(world)
        world.logprobs["a"] = [0.0, 0.0, 0.0]
        with pytest.raises(WeightsMismatch, match="a: it does not hold version 0"):
            await weights.bring_up_to_date(engine("a"), None)
        assert trainer.published == []

    clock.run(main())


def test_a_question_that_cannot_be_put_is_a_verdict_too():
    """Else the answers that wait for it would wait for ever."""

    async def main():
        world = World()
        weights, roster, _ = await serving(world, "a")
        world.logprobs["a"] = ZeroDivisionError("a bug")
        await advance(weights)
        await weights.settled()
        assert roster.clients == []
        assert "a bug" in roster.lost.get_nowait()[1]

    clock.run(main())


def test_a_verdict_that_is_pending_at_the_end_is_given_up():
    async def main():
        world = World()
        weights, *_ = await serving(world, "a")
        world.logprobs["a"] = "silence"
        await advance(weights)
        await weights.cancel()
        assert len(asyncio.all_tasks()) == 1

    clock.run(main())
