"""Which node everything runs on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.cluster.placement import (
    Held,
    Node,
    Placement,
    PlacementError,
    place,
    place_again,
    place_engines,
    trainer_again,
)
from slipstream.configs.schema import RunConfig

JUDGE = {"type": "engines", "path": "unused"}


def config(
    *,
    data: int = 1,
    tensor: int = 1,
    engines: int = 1,
    engine_tensor: int = 1,
    engine_nodes: int = 1,
    device: str = "auto",
    slurm: int | None = 0,
    kind: str = "slurm",
    colocated: bool = False,
    transport: str = "disk",
    judge: dict[str, object] | None = None,
    fewest: int | None = None,
) -> RunConfig:
    cluster = {"type": "local"} if slurm == 0 else {"type": kind, "trainer_nodes": slurm}
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "actor": {"parallel": {"data": data, "tensor": tensor}},
            "rollout": {
                "max_head_offpolicyness": 0,
                "batch_size": 64,
                "n_samples_per_prompt": 2,
                "reward": "slipstream.rollout.reward.FinalAnswer",
                "engine": {
                    "count": engines,
                    "tensor_parallel": engine_tensor,
                    "nodes": engine_nodes,
                    "colocated": colocated,
                    "min_count": fewest,
                },
            },
            "weights": {"transport": {"type": transport}},
            "cluster": cluster | {"device": device},
            **({"judge": {"type": "model", "endpoint": JUDGE | judge}} if judge is not None else {}),
        }
    )


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"id{i}", f"10.0.0.{i}", n) for i, n in enumerate(gpus)]


def addresses(placed) -> list[int]:
    return [int(node.address.rpartition(".")[2]) for node in placed]


def engines_of(placement: Placement) -> list[int]:
    """Return the addresses of engines that have one node each."""
    return addresses(node for (node,) in placement.engines)


def test_on_one_machine_trainer_and_engines_share_the_gpus():
    placement = place(nodes(4), config(data=2, engines=2))
    assert placement.device == "cuda"
    assert addresses(placement.trainer) == engines_of(placement) == [0, 0]


def test_without_gpus_nothing_is_counted():
    placement = place(nodes(0), config(data=3, engines=5))
    assert placement.device == "cpu"
    assert addresses(placement.trainer) == [0] * 3
    assert engines_of(placement) == [0] * 5


def test_in_a_slurm_job_trainer_ranks_fill_the_first_nodes_and_engines_the_others():
    placement = place(nodes(8, 8, 8, 8), config(data=4, tensor=4, engines=4, engine_tensor=4, slurm=2))
    assert addresses(placement.trainer) == [0] * 8 + [1] * 8
    assert engines_of(placement) == [2, 2, 3, 3]


@pytest.mark.parametrize(("gpus", "ranks"), [(8, 4), (0, 4), (8, 6)])
def test_in_a_slurm_job_of_one_node_trainer_and_engines_share_it(gpus: int, ranks: int):
    placement = place(nodes(gpus), config(data=ranks, engines=2, slurm=None))
    assert addresses(placement.trainer) == [0] * ranks
    assert engines_of(placement) == [0, 0]


def test_one_node_is_not_shared_where_it_lacks_gpus_or_the_recipe_says_whose_it_is():
    with pytest.raises(PlacementError, match="there is room for 1"):
        place(nodes(8), config(data=7, engines=2, slurm=None))
    with pytest.raises(PlacementError, match="leaves none for the engines"):
        place(nodes(8), config(data=4, engines=2, slurm=1))


def test_nodes_of_a_cluster_of_others_are_divided_like_those_of_a_job():
    given = {"data": 4, "tensor": 4, "engines": 4, "engine_tensor": 4, "slurm": 2}
    joined, job = (place(nodes(8, 8, 8, 8), config(**given, kind=kind)) for kind in ("ray", "slurm"))
    assert joined == job


def test_on_cpu_nodes_of_a_slurm_job_ranks_are_consecutive_and_engines_spread():
    placement = place(nodes(0, 0, 0, 0), config(data=3, engines=3, slurm=2))
    assert addresses(placement.trainer) == [0, 0, 1]
    assert engines_of(placement) == [2, 3, 2]


def test_an_engine_is_on_as_many_nodes_as_the_recipe_says():
    placement = place(nodes(4, 3, 3, 4), config(data=4, engines=3, engine_tensor=2, slurm=1))
    assert engines_of(placement) == [1, 2, 3]
    with pytest.raises(PlacementError, match=r"5 engines .* need 2 GPUs each; there is room for 4"):
        place(nodes(4, 3, 3, 4), config(data=4, engines=5, engine_tensor=2, slurm=1))


def test_nodes_are_taken_in_the_order_of_their_addresses_as_numbers():
    shuffled = [Node(str(i), f"10.0.0.{i}", 1) for i in (10, 9, 2)]
    placement = place(shuffled, config(data=2, engines=1, slurm=2))
    assert addresses(placement.trainer) == [2, 9]
    assert engines_of(placement) == [10]


@pytest.mark.parametrize(
    ("given_order", "expected"),
    [
        (["fd00::10", "fd00::9"], ["fd00::9", "fd00::10"]),
        (["node-b", "node-a", "10.0.0.1"], ["10.0.0.1", "node-a", "node-b"]),
    ],
)
def test_addresses_may_be_long_ones_or_names(given_order, expected):
    found = place(
        [Node(a, a, 1) for a in given_order], config(data=len(expected) - 1, slurm=len(expected) - 1)
    )
    assert [node.address for node in (*found.trainer, *found.engines[0])] == expected


def test_a_job_without_nodes_for_the_engines_is_refused():
    with pytest.raises(PlacementError, match=r"2 nodes.*trainer_nodes=2 leaves none.*use more nodes"):
        place(nodes(8, 8), config(slurm=2))


def test_too_few_gpus_are_refused_with_what_is_left_of_them():
    with pytest.raises(
        PlacementError, match=r"9 trainer ranks .* 1 GPUs each; there is room for 8 .*10\.0\.0\.0: 8"
    ):
        place(nodes(8), config(data=9))
    with pytest.raises(
        PlacementError, match=r"1 engines .* 4 GPUs each; there is room for 0 \(free .*10\.0\.0\.0: 2\)"
    ):
        place(nodes(8), config(data=6, engines=1, engine_tensor=4))


def test_gpus_that_are_asked_for_and_not_there_are_refused():
    with pytest.raises(PlacementError, match=r"cluster\.device is gpu"):
        place(nodes(0), config(device="gpu"))


def test_gpus_that_are_there_can_be_left_alone():
    assert place(nodes(8), config(device="cpu", data=20)).device == "cpu"


def test_an_engine_over_several_nodes_has_equally_many_gpus_on_each():
    settings = {"data": 8, "engine_tensor": 8, "engine_nodes": 2, "slurm": 1}
    placement = place(nodes(8, 8, 3, 4, 8, 4), config(engines=3, **settings))
    assert [addresses(each) for each in placement.engines] == [[1, 3], [1, 4], [4, 5]]
    with pytest.raises(
        PlacementError, match=r"4 engines .* need 4 GPUs on each of 2 nodes; there is room for 3"
    ):
        place(nodes(8, 8, 3, 4, 8, 4), config(engines=4, **settings))


def test_engines_over_several_nodes_without_gpus_have_different_nodes_each():
    placement = place(nodes(0, 0, 0, 0), config(engines=2, engine_tensor=2, engine_nodes=2, slurm=1))
    assert [addresses(each) for each in placement.engines] == [[1, 2], [3, 1]]
    alone = config(engine_tensor=2, engine_nodes=2, slurm=1)
    assert [addresses(each) for each in place_engines(nodes(0, 0), alone).engines] == [[0, 1]]
    with pytest.raises(
        PlacementError, match=r"over 2 nodes \(rollout.engine.nodes\), and engines have 1 \(10"
    ):
        place(nodes(0, 0), alone)


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=6).filter(any),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_no_gpu_is_given_away_twice(gpus, ranks, engines, ranks_per_node, engine_nodes, slurm):
    try:
        placement = place(
            nodes(*gpus),
            config(
                data=ranks,
                engines=engines,
                engine_tensor=ranks_per_node * engine_nodes,
                engine_nodes=engine_nodes,
                slurm=slurm,
            ),
        )
    except PlacementError:
        return
    assert (len(placement.trainer), len(placement.engines)) == (ranks, engines)
    parts = [node for each in placement.engines for node in each]
    for node in nodes(*gpus):
        used = placement.trainer.count(node) + ranks_per_node * parts.count(node)
        assert used <= node.gpus
    assert all(len(set(each)) == len(each) == engine_nodes for each in placement.engines)
    if slurm:
        assert not set(placement.trainer) & set(parts)


def test_colocated_engines_have_the_gpus_of_trainer_ranks_on_one_node():
    found = place(nodes(8, 8), config(data=12, engines=5, engine_tensor=2, colocated=True))
    assert addresses(found.trainer) == [0] * 8 + [1] * 4
    assert engines_of(found) == [0, 0, 0, 0, 1]
    assert found.shared == (((0, 1),), ((2, 3),), ((4, 5),), ((6, 7),), ((8, 9),))


def test_a_colocated_engine_over_nodes_has_the_gpus_of_consecutive_ranks_on_each():
    found = place(nodes(4, 4), config(data=8, engines=2, engine_tensor=4, engine_nodes=2, colocated=True))
    assert [addresses(each) for each in found.engines] == [[0, 1], [0, 1]]
    assert found.shared == (((0, 1), (4, 5)), ((2, 3), (6, 7)))


def test_no_colocated_engine_is_on_gpus_of_two_nodes():
    with pytest.raises(
        PlacementError,
        match=r"3 engines .* on the trainer's GPUs need 2 GPUs each.*room for 2 .*0: 3, .*1: 3",
    ):
        place(nodes(3, 3), config(data=6, engines=3, engine_tensor=2, colocated=True))


def test_colocated_engines_share_memory_only_with_the_node_of_the_first_rank():
    alone = config(data=2, engines=1, colocated=True, transport="tensor")
    assert engines_of(place(nodes(1, 1), alone)) == [0]
    both = config(data=2, engines=2, colocated=True, transport="tensor")
    with pytest.raises(PlacementError, match=r"transport\.type is tensor.*use disk or delta"):
        place(nodes(1, 1), both)


def test_colocated_engines_without_gpus_are_where_ranks_are():
    found = place(nodes(0, 0), config(data=2, engines=3, colocated=True))
    assert engines_of(found) == [0, 1, 0]
    assert found.shared == ()


def test_the_judges_engines_take_what_trainer_and_engines_leave():
    placed = place(nodes(8), config(data=2, engines=2, judge={"count": 2, "tensor_parallel": 2}))
    assert addresses(placed.judge) == [0, 0]
    placed = place(nodes(8, 8, 8), config(data=8, engines=6, slurm=1, judge={"tensor_parallel": 4}))
    assert addresses(placed.judge) == [2]
    placed = place(nodes(8), config(data=4, engines=4, colocated=True, judge={"count": 4}))
    assert addresses(placed.judge) == [0] * 4
    assert addresses(place(nodes(0), config(judge={"count": 2})).judge) == [0, 0]
    assert place(nodes(0), config()).judge == ()


def test_a_judge_without_room_is_refused():
    with pytest.raises(PlacementError, match="engines of the judge"):
        place(nodes(4), config(data=2, engines=2, judge={}))


def test_a_run_begins_with_fewer_engines_if_nodes_are_missing_but_not_with_too_few():
    settings = config(data=4, engines=4, engine_tensor=4, slurm=1, fewest=2, judge={"count": 1})
    assert engines_of(place(nodes(8, 8, 8, 4), settings)) == [1, 1, 2, 2]
    assert engines_of(place(nodes(8, 8, 4), settings)) == [1, 1], "one GPU is left to the judge"
    assert engines_of(place_engines(nodes(4, 8), settings)) == [0, 1, 1]
    with pytest.raises(PlacementError, match=r"2 engines .* need 4 GPUs each; there is room for 1"):
        place(nodes(8, 4), settings)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
)
def test_engines_that_come_and_go_never_share_a_gpu_with_anything(gpus, ranks, spread, each, events):
    there = nodes(*gpus)
    trainer = tuple(node for node in there for _ in range(min(node.gpus, ranks)))
    placement = Placement(trainer, (), "cuda", trainers_own=frozenset({there[0].id}))
    held: list[Held] = []
    for number, comes in events:
        if not comes and held:
            del held[number % len(held)]
        elif (room := place_again(there, placement, held, {}, spread=spread, gpus=each)) is not None:
            assert len(set(room)) == spread and there[0] not in room
            held.append(Held(room, each))
        for node in there:
            used = trainer.count(node) + each * sum(one.nodes.count(node) for one in held)
            assert used <= node.gpus
    if not any(
        node.gpus - trainer.count(node) - each * sum(one.nodes.count(node) for one in held) >= each
        for node in there[1:]
    ):
        assert place_again(there, placement, held, {}, spread=1, gpus=each) is None


def test_a_node_that_has_lost_engines_is_used_last():
    there = nodes(2, 2, 2)
    placement = Placement((), (), "cuda")
    losses = {"10.0.0.0": 2, "10.0.0.1": 1}
    found = place_again(there, placement, (), losses, spread=1, gpus=1)
    assert found is not None and addresses(found) == [2]
    full = [Held((there[2],), 2)]
    found = place_again(there, placement, full, losses, spread=1, gpus=1)
    assert found is not None and addresses(found) == [1]


def again(there, placement: Placement, held: dict[str, Held], most: int = 9) -> tuple[list[int], list[str]]:
    """Return the nodes of the trainer's ranks, and the engines that give way: not the judge's."""
    movable = [engine for engine in held if not engine.startswith("judge")]
    placed, leaving = trainer_again(there, placement, held, {}, movable=movable, most=most)
    return addresses(placed.trainer), leaving


def test_a_trainer_that_has_lost_a_node_goes_to_a_spare_one_and_stays_where_it_can():
    first, lost, engines, spare, returned = nodes(8, 8, 8, 8, 8)
    placement = Placement((first,) * 8 + (lost,) * 8, (), "cuda", trainers_own=frozenset({first.id, lost.id}))
    held = {f"engine-{number}": Held((engines,), 2) for number in range(4)}
    there = [first, engines, spare]
    assert again(there, placement, held) == ([0] * 8 + [3] * 8, [])
    placed, _ = trainer_again(there, placement, held, {}, movable=held, most=4)
    assert placed.trainers_own == {first.id, spare.id}
    assert place_again(there, placed, held.values(), {}, spread=1, gpus=2) is None
    assert again([*there, lost], placement, held) == ([0] * 8 + [1] * 8, []), "nothing is lost"
    back = Node("new id", lost.address, 8)
    assert again([first, engines, back], placement, held) == ([0] * 8 + [1] * 8, [])
    assert again([first, returned, spare], placement, held)[0] == [0] * 8 + [3] * 8


def test_without_a_spare_node_only_so_many_engines_give_way_as_the_ranks_need():
    first, lost, many, few = nodes(4, 4, 8, 8)
    placement = Placement((first,) * 4 + (lost,) * 4, (), "cuda")
    held = {f"engine-{number}": Held((many,), 1) for number in range(8)}
    held |= {"engine-8": Held((few,), 2), "engine-9": Held((few,), 2), "judge-engine-0": Held((few,), 2)}
    there = [first, many, few]
    assert again(there, placement, held) == ([0] * 4 + [3] * 4, ["engine-8"])
    held["judge-engine-1"] = Held((few,), 2)
    held["judge-engine-2"] = Held((few,), 2)
    del held["engine-9"]
    assert again(there, placement, held) == ([0] * 4 + [2] * 4, [f"engine-{n}" for n in range(4)])
    with pytest.raises(
        PlacementError, match=r"lost 10\.0\.0\.1, and 4 engines would have to give way .*: 3 can"
    ):
        again(there, placement, held, most=3)
    with pytest.raises(PlacementError, match=r"no other node can have 4 ranks"):
        again([first], placement, held)


def test_an_engine_over_two_nodes_gives_way_once_for_two_lost_nodes():
    one, two, left, right = nodes(8, 8, 8, 8)
    placement = Placement((one,) * 8 + (two,) * 8, (), "cuda")
    held = {"engine-0": Held((left, right), 8)}
    assert again([left, right], placement, held, most=1) == ([2] * 8 + [3] * 8, ["engine-0"])


def test_without_gpus_ranks_go_beside_engines():
    first, lost, engines = nodes(0, 0, 0)
    placement = Placement((first, lost), (), "cpu")
    assert again([first, engines], placement, {"engine-0": Held((engines,), 0)}) == ([0, 2], [])
