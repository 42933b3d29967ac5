"""The transport of a run falls back to the next one if its first publication fails, and only then."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.weights.interrupted import Stock
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.driver.weights.transports import SET_UP_S, TRANSPORTS_FILE, Transports
from slipstream.backend.driver.weights.verification import WeightsMismatch
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.roster import EngineRoster
from tests.unit.doubles import advance
from tests.unit.test_driver_trainer_loss import Batches, Client, Interrupted
from tests.unit.test_rollout_gpu_environment import VALID

SHARDS, TENSOR, DISK = "shards", "tensor", "disk"
ON_SLURM = {"cluster": {"type": "slurm", "device": "gpu"}}
Attempt = dict[str, Any] | TrainerFailed


def recipe(root: Path, **settings: Any) -> RunConfig:
    run = {**VALID["run"], "root": str(root)}
    config = RunConfig.model_validate({**VALID, "run": run, **settings})
    config.run.folder.mkdir(parents=True, exist_ok=True)
    return config


def cut_off(*names: str, **more: Any) -> dict[str, Any]:
    """The report of a publication in whose transfer these engines have failed."""
    failed = dict.fromkeys(names, "receive for version 1: broken")
    return {"failed": failed, "cut_off": list(names), **more}


class Trainer:
    """Each publication goes as the next of ``attempts`` says, and well when there is none."""

    def __init__(self, *attempts: Attempt) -> None:
        self.attempts = list(attempts)
        self.sent: list[tuple[int, str, list[str]]] = []

    async def train(self, batch: Any) -> dict[str, float]:
        return {}

    async def publish(self, version: int, engines: Any, transport: Any) -> PublishReport:
        names = [engine.name for engine in engines]
        self.sent.append((version, transport.type, names))
        attempt = self.attempts.pop(0) if self.attempts else {}
        if isinstance(attempt, TrainerFailed):
            raise attempt
        lost = attempt.get("failed", {})
        return PublishReport(version, [name for name in names if name not in lost], **attempt)

    def kill(self) -> None: ...


class World:
    def __init__(
        self,
        config: RunConfig,
        *attempts: Attempt,
        engines: tuple[str, ...] = ("a", "b"),
        stock: Stock | None = None,
        planned_s: float | None = None,
    ) -> None:
        self.trainer, self.batches, self.notes = Trainer(*attempts), Batches(), list[str]()
        self.roster = EngineRoster(lambda: self.batches.sampled_version, limit=4)
        self._engines = engines
        updates: Any = Interrupted(stock)
        self.transports = Transports(
            config, self.notes.append, updates=updates, planned_s=lambda config: planned_s
        )
        trainer: Any = self.trainer
        batches: Any = self.batches
        self.weights: Any = ServedWeights(
            trainer, self.roster, Separate(), batches, interrupted=updates, transports=self.transports
        )

    def publish(self, versions: int = 1) -> None:
        async def steps() -> None:
            for name in self._engines:
                client: Any = Client(name)
                self.roster.add(client)
            for _ in range(versions):
                self.batches.next_version = self.batches.version + 1
                await advance(self.weights, self.batches.version + 1)

        asyncio.run(steps())

    @property
    def ways(self) -> list[str]:
        return [transport for _, transport, _ in self.trainer.sent]

    @property
    def serving(self) -> list[str]:
        return [client.name for client in self.roster.clients]


def test_a_first_publication_that_reaches_no_engine_is_repeated_by_the_next_transport(tmp_path):
    world = World(recipe(tmp_path), cut_off("a", "b"))
    world.publish(3)
    assert world.trainer.sent == [
        (1, SHARDS, ["a", "b"]),
        *((version, TENSOR, ["a", "b"]) for version in (1, 2, 3)),
    ]
    assert world.serving == ["a", "b"], "nobody is started again"
    assert (world.batches.version, world.weights.transports_given_up) == (3, 1)
    [note] = world.notes
    assert "gives up weights.transport shards and goes on with tensor" in note and "broken" in note


def test_every_transport_that_the_layout_allows_is_tried_and_the_last_one_is_kept(tmp_path):
    both = cut_off("a", "b")
    world = World(recipe(tmp_path), both, both, both)
    world.publish()
    assert world.ways == [SHARDS, TENSOR, DISK]
    assert len(world.notes) == 2
    assert world.serving == [], "without another transport it is the engines' failure"


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        (ON_SLURM, [SHARDS, DISK]),
        ({"weights": {"transport": {"type": "tensor"}}}, [TENSOR, DISK]),
        ({"weights": {"transport": {"type": "disk"}}}, [DISK]),
        ({"weights": {"transport": {"type": "delta"}}}, ["delta"]),
        ({"weights": {"fall_back": False}}, [SHARDS]),
        ({"weights": {"verify": "digests"}}, [SHARDS]),
        (
            {
                "actor": {"lora": {"rank": 8, "alpha": 16, "serve": "adapter"}},
                "weights": {"interrupt": "abort"},
            },
            [SHARDS],
        ),
    ],
)
def test_only_transports_that_the_rules_allow_are_tried(tmp_path, settings: dict, ways: list[str]):
    world = World(recipe(tmp_path, **settings), *[cut_off("a", "b")] * 3)
    world.publish()
    assert world.ways == ways


@pytest.mark.parametrize(
    "first",
    [
        cut_off("a"),
        {"failed": {"a": "ask for version 1: no answer", "b": "pause for version 1: no answer"}},
    ],
    ids=["one engine of two", "no engine was reached by the transport"],
)
def test_a_failure_of_engines_alone_is_theirs(tmp_path, first: dict):
    world = World(recipe(tmp_path), first)
    world.publish()
    assert (world.ways, world.notes) == ([SHARDS], [])
    assert set(world.serving).isdisjoint(first["failed"])


def test_a_transport_that_has_brought_a_version_is_never_given_up(tmp_path):
    config = recipe(tmp_path)
    World(config).publish()
    for world in (World(config, {}, cut_off("a", "b")), World(config, cut_off("a", "b"))):
        world.publish(2)
        assert set(world.ways) == {SHARDS}, "by this process or by an earlier one of the run"
        assert not world.notes


def test_the_decision_survives_a_resume_and_is_told_once(tmp_path):
    config = recipe(tmp_path)
    World(config, cut_off("a", "b")).publish()
    resumed = World(config, cut_off("a", "b"))
    assert resumed.weights.transports_given_up == 1
    resumed.publish()
    assert (resumed.ways, resumed.notes) == ([TENSOR], [])
    kept = json.loads((config.run.folder / TRANSPORTS_FILE).read_text())
    assert kept["proven"] == [TENSOR] and list(kept["given_up"]) == [SHARDS]
    refused = recipe(tmp_path, weights={"fall_back": False})
    assert World(refused).transports.current.type == SHARDS
    (config.run.folder / TRANSPORTS_FILE).write_text("{")
    assert World(config).transports.current.type == SHARDS, "a record that is damaged ends no run"


def test_engines_that_do_not_answer_after_a_failed_transfer_are_started_again(tmp_path):
    """They may stand in the transfer for ever. The version is published for the others."""
    stock = Stock(outdated={"a": "cut off"}, failed={"b": "no answer"})
    world = World(recipe(tmp_path), cut_off("a", "b"), stock=stock)
    world.publish()
    assert world.trainer.sent == [(1, SHARDS, ["a", "b"]), (1, TENSOR, ["a"])]
    assert (world.serving, world.batches.version) == (["a"], 1)
    assert world.roster.lost.get_nowait()[1] == "receive for version 1: broken"


@pytest.mark.parametrize(
    ("planned_s", "took_s", "ways"),
    [
        (0.5, SET_UP_S + 5.1, [SHARDS, TENSOR]),
        (0.5, SET_UP_S + 4.9, [SHARDS, SHARDS]),
        (None, 1e4, [SHARDS, SHARDS]),
    ],
)
def test_ten_times_the_planned_time_is_too_long(tmp_path, planned_s, took_s: float, ways: list[str]):
    world = World(recipe(tmp_path), {"total_s": took_s}, {"total_s": 0.1}, planned_s=planned_s)
    world.publish(2)
    assert world.ways == ways, "the version has arrived: it is not sent again"
    assert len(world.notes) == (ways[1] != SHARDS)


@pytest.mark.parametrize(("raised", "ways"), [("", [SHARDS, TENSOR]), ("NotFinite", [SHARDS, SHARDS])])
def test_a_trainer_that_dies_in_the_first_publication_comes_back_with_the_next_transport(
    tmp_path, raised: str, ways: list[str]
):
    """NCCL's watchdog ends the process. A trainer whose weights are not finite has sent nothing."""
    world = World(recipe(tmp_path), TrainerFailed("the process of trainer rank 0 ended", raised=raised))
    with pytest.raises(TrainerFailed):
        world.publish()
    asyncio.run(world.weights.publish_copy(2))
    assert world.ways == ways


def test_a_loader_that_cannot_be_traced_falls_back_and_parameters_that_nothing_fills_do_not(tmp_path):
    world = World(recipe(tmp_path), cut_off("a", "b", unsuited="adds one"))
    world.publish()
    assert world.ways == [SHARDS, TENSOR] and "adds one" in world.notes[0]
    for folder, attempt, settings in (
        ("x", cut_off("a", "b", unsuited="adds one"), {"weights": {"fall_back": False}}),
        ("y", {**cut_off("a", "b"), "unservable": "nothing fills lm_head"}, {}),
    ):
        world = World(recipe(tmp_path / folder, **settings), attempt)
        with pytest.raises(WeightsMismatch, match=r"adds one|nothing fills"):
            world.publish()
        assert world.ways == [SHARDS]
