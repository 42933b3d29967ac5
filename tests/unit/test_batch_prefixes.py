"""The invariants of the module's docstring, against a trie of its own."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.batch.context_parallel import share_of
from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.packing import distribute
from slipstream.backend.batch.prefixes import WORTH, dearest, keyed, shared_plan, taken, taken_in, tree_order
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.device_batch import on_device, unpacking_of
from slipstream.rollout.tokens.routes import NO_ROUTE
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.tries import tries
from tests.unit.test_batch_packing import quadratic

TREES = tries(10)
MANY = tries(167)


def trie(texts) -> set[tuple[int, ...]]:
    """The nodes of the prefix tree of some texts, a node for each token: the ids up to it."""
    return {tuple(text[: t + 1]) for text in texts for t in range(len(text))}


@st.composite
def forests(draw):
    """Texts that branch off, repeat or begin one another, in any order, and how they are packed."""
    texts = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=30))]
    for _ in range(draw(st.integers(0, 14))):
        stem = texts[draw(st.integers(0, len(texts) - 1))]
        own = draw(st.lists(st.integers(0, 2**31), max_size=12))
        texts.append(stem[: draw(st.integers(not own, len(stem)))] + own)
    ids = [np.array(text, np.int64) for text in draw(st.permutations(texts))]
    loss_N = np.array([draw(st.integers(0, len(each))) for each in ids])
    ranks, multiple = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    return ids, loss_N, ranks, multiple, draw(st.integers(5, 150))


def plain(ids, ranks: int, multiple: int, budget: int):
    lengths = [len(each) for each in ids]
    costs = quadratic(np.array(lengths)).tolist()
    return distribute(range(len(ids)), lengths, costs, ranks=ranks, budget=budget, multiple=multiple)


def check_order(ids) -> None:
    order = tree_order([ids[place] for place in range(len(ids))])
    texts = [tuple(ids[place]) for place in order]
    assert texts == sorted(texts)
    own = [text[take:] for text, take in zip(texts, taken([ids[p] for p in order]), strict=True)]
    assert sum(map(len, own)) == len(trie(texts))


def check_plan(ids, loss_N, ranks: int, multiple: int, budget: int) -> None:
    before = plain(ids, ranks, multiple, budget)
    plan, taken_N = shared_plan(before, ids, quadratic, loss_N=loss_N, budget=budget, multiple=multiple)
    assert sorted(place for packs in plan for pack in packs for place in pack) == list(range(len(ids)))
    assert len(plan) == ranks
    assert len({len(packs) for packs in plan}) == 1 and len(plan[0]) % multiple == 0
    if not taken_N.any():
        assert plan == before
        return
    assert dearest(plan, ids, quadratic, shares=True) <= (1 - WORTH) * dearest(before, ids, quadratic)
    assert (taken_N == taken_in(plan, ids)).all()
    for pack in (pack for packs in plan for pack in packs):
        nodes = trie(tuple(ids[place]) for place in pack)
        assert sum(len(ids[place]) - taken_N[place] for place in pack) == len(nodes)
        # The operations of a token depend on how many are before it, as those of a pair do here.
        at_depth = np.diff(quadratic(np.arange(200)))
        cost = sum(quadratic(np.array([len(ids[p]), taken_N[p]])) @ [1, -1] for p in pack)
        assert cost == pytest.approx(sum(at_depth[len(node) - 1] for node in nodes))
        if len(pack) > 1:
            assert max(len(nodes), loss_N[pack].sum()) <= budget


@TREES
@given(forests())
def test_a_pack_holds_each_node_of_its_prefix_tree_once(case):
    check_order(case[0])
    check_plan(*case)


@pytest.mark.slow
@MANY
@given(forests())
def test_five_hundred_packs_hold_each_node_once(case):
    check_order(case[0])
    check_plan(*case)


def group(prompt: int, completions: list[int], seed: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    stem = draw.integers(0, 1000, prompt)
    return [np.concatenate([stem, draw.integers(0, 1000, n)]) for n in completions]


def test_groups_share_their_prompts_and_ranks_their_work():
    ids = [text for seed in range(8) for text in group(100, [100] * 8, seed)]
    before = plain(ids, 4, 1, 4000)
    plan, taken_N = shared_plan(before, ids, np.array, loss_N=np.full(64, 100), budget=4000)
    assert taken_N.sum() == 7 * 8 * 100
    loads = [sum(len(ids[p]) - taken_N[p] for pack in packs for p in pack) for packs in plan]
    assert loads == [1800] * 4


def test_little_in_common_changes_nothing():
    ids = group(5, [100] * 8, 0)
    before = plain(ids, 1, 1, 4000)
    plan, taken_N = shared_plan(before, ids, quadratic, loss_N=np.full(8, 100), budget=4000)
    assert plan == before and not taken_N.any()


def test_equal_completions_keep_to_the_budget_of_the_lm_head():
    ids = [np.arange(100)] * 8
    plan, _ = shared_plan(plain(ids, 1, 1, 200), ids, quadratic, loss_N=np.full(8, 90), budget=200)
    assert max(len(pack) for pack in plan[0]) == 2


def test_tokens_share_with_those_that_took_the_same_experts():
    ids = [np.array([7, 8, 9]), np.array([7, 8, 9, 1]), np.array([7, 8])]
    first = np.array([[0, 1], [2, 3], [4, 5]], np.uint16)
    second = np.array([[0, 1], [2, 0], [4, 5], [6, 7]], np.uint16)
    assert taken(keyed(ids, [first, second, None])).tolist() == [0, 1, 0]
    assert taken(keyed(ids, [first, np.vstack([first, first[:1]]), first[:2]])).tolist() == [0, 3, 2]
    assert taken(keyed(ids, [None, None, None])).tolist() == taken(ids).tolist() == [0, 3, 2]


@TREES
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=5),
    st.data(),
)
def test_numbers_of_tokens_tell_ids_and_experts_apart(width: int, shapes, data):
    def array(n: int, *highest: int) -> list:
        return data.draw(
            st.lists(st.tuples(*[st.sampled_from([0, each]) for each in highest]), min_size=n, max_size=n)
        )

    ids = [np.array(array(n, 2**32 - 1), np.int64).reshape(-1) for n, _ in shapes]
    routes = [np.array(array(n, *[NO_ROUTE] * width), np.uint16) if known else None for n, known in shapes]
    rows = [
        (int(token), *(each[t].tolist() if each is not None else [NO_ROUTE] * width))
        for text, each in zip(ids, routes, strict=True)
        for t, token in enumerate(text)
    ]
    if all(each is None for each in routes):
        rows = [row[:1] for row in rows]
    numbers = np.concatenate(keyed(ids, routes)).tolist()
    assert len(set(zip(rows, numbers, strict=True))) == len(set(rows)) == len(set(numbers))


def trajectory(ids: np.ndarray, loss: int) -> Trajectory:
    trained_T = np.arange(len(ids)) >= max(1, len(ids) - loss)
    version_T = np.where(trained_T, 0, UNSAMPLED).astype(np.int32)
    return Trajectory(ids, trained_T, np.zeros(len(ids), np.float32), version_T, Finish.STOP, reward=1.0)


@TREES
@given(forests(), st.sampled_from([1, 4]))
def test_a_pack_gives_every_trajectory_its_tokens_and_its_targets(case, multiple: int):
    ids, loss_N, *_ = case
    check_pack(ids, loss_N, multiple)


def compacted(turns: int, seed: int) -> list[np.ndarray]:
    """An agent's turns, each a trajectory that repeats the one before, which it replaces now and then by a
    summary after the first tokens."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 1000, 5)]
    for turn in range(1, turns):
        kept = texts[-1][:5] if turn % 40 == 0 else texts[-1]
        texts.append(np.concatenate([kept, rng.integers(0, 1000, int(rng.integers(1, 4)))]))
    return texts


UNUSUAL = {
    "a trunk with a thousand leaves": group(40, [n % 17 for n in range(1000)], 0),
    "leaves that are the beginnings of others": [np.arange(n) for n in (9, 30, 1, 12, 30, 2)],
    "the same one again and again": [np.arange(40)] * 5,
    "one token each": [np.array([n % 3]) for n in range(7)],
    "a deep tree": [np.arange(100_000, 100_000 + n) for n in range(1, 150)],
    "agents that compact their history": compacted(130, 1) + compacted(130, 2),
    "trees of one kind beside plain ones": [
        *group(60, [5] * 6, 3),
        *(np.arange(n, n + 80) for n in range(6)),
    ],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_trees_are_packed_like_any_other(name: str):
    ids = UNUSUAL[name]
    loss_N = np.array([number % 3 * len(each) // 4 for number, each in enumerate(ids)])
    check_order(ids)
    for ranks, budget in ((1, 10_000), (2, 400)):
        check_plan(ids, loss_N, ranks, 1, budget)
    check_pack(ids, loss_N, 4)


def check_pack(ids: list[np.ndarray], loss_N: np.ndarray, multiple: int) -> None:
    batch = TrainBatch(0, tuple(map(trajectory, ids, loss_N.tolist())), np.arange(len(ids)))
    pack = tree_order(ids)
    taken_N = taken_in([[pack]], ids)
    micro, plain = (assemble(batch, pack, multiple, taken_N=each) for each in (taken_N, None))
    for name in ("target_M", "owner_M", "trajectory_M", "turn_M", "share_M", "is_last_M"):
        np.testing.assert_array_equal(getattr(micro, name), getattr(plain, name))
    for name in ("tokens_T", "position_T"):
        at = getattr(micro, name)
        np.testing.assert_array_equal(at[micro.index_M], getattr(plain, name)[plain.index_M])
        np.testing.assert_array_equal(at[micro.last_N], getattr(plain, name)[plain.last_N])
    assert len(micro.tokens_T) % multiple == 0 and micro.longest <= max(plain.longest, multiple)

    check_unpacking(micro, [ids[place] for place in pack])


def check_unpacking(micro: MicroBatch, texts: list[np.ndarray]) -> None:
    """Each token has a padded place, and the keys of a trajectory that takes tokens are all of its tokens."""
    device_batch = on_device(micro, share_of(micro, 1, 0), torch.device("cpu"), unpacks=True)
    unpacked = device_batch.pack.unpacked
    assert unpacked is not None
    queries = [branches.query_place for branches in unpacked.branches]
    places = torch.cat([unpacked.gather, *queries])
    assert (places[unpacked.restore_T] == torch.arange(len(micro.tokens_T))).all()
    for branches in unpacked.branches:
        rows, own, every = branches.shape
        assert rows == 1 or rows * every <= 2 * len(micro.tokens_T)
        keys = branches.key_place().numpy()
        mask = branches.mask(unpacked.tree, None, 0, own)[:, 0].numpy()
        for row, query_L in enumerate(branches.query_place.view(rows, own).numpy()):
            place = int(np.searchsorted(micro.cu_seqlens, query_L[0], side="right")) - 1
            text, take = texts[place], int(micro.taken_N[place])
            assert (keys[row][len(text) :] > branches.last_N[row].item()).all()
            np.testing.assert_array_equal(micro.tokens_T[keys[row][: len(text)]], text)
            np.testing.assert_array_equal(micro.position_T[keys[row][: len(text)]], np.arange(len(text)))
            np.testing.assert_array_equal(query_L[: len(text) - take], keys[row][take : len(text)])
            for query in range(len(text) - take):
                assert mask[row, query].tolist() == [key <= take + query for key in range(every)]
        for pairs in (1, 7, rows * own * every):
            blocks = branches.blocks(pairs)
            assert [query for block in blocks for query in range(*block)] == list(range(own))
            assert all((end - first) * rows * every <= max(pairs, rows * every) for first, end in blocks)


def test_a_long_trunk_with_many_leaves_takes_memory_for_its_own_tokens():
    draw = np.random.default_rng(0)
    stem = draw.integers(0, 1000, 20_000)
    leaves = [np.concatenate([stem, draw.integers(0, 1000, 5)]) for _ in range(200)]
    batch = TrainBatch(0, tuple(trajectory(ids, 4) for ids in leaves), np.arange(len(leaves)))
    pack = tree_order(leaves)
    taken_N = taken_in([[pack]], leaves)
    tracemalloc.start()
    micro = assemble(batch, pack, taken_N=taken_N)
    unpacking_of(micro.cu_seqlens, micro.taken_N, micro.taken_R3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(micro.tokens_T) <= 20_000 + 5 * 200
    assert peak < 100 * len(micro.tokens_T), "all leaves together have 190 times as many tokens"
