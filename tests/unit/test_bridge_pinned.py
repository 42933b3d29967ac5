"""The pool of pinned host memory, with a stand-in for the calls of CUDA."""

from contextlib import nullcontext

import pytest
import torch

from slipstream.bridge.group import memory, pinned
from slipstream.bridge.group.pinned import PinnedPool

GPU = torch.device("cuda", 0)


class Registry:
    """The host memory that CUDA has pinned, by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.refuses = False

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.refuses:
            raise RuntimeError("cudaHostRegister failed with CUDA error 2")
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def registry(monkeypatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(memory, "cuda_runtime", lambda: registry)
    monkeypatch.setattr(pinned, "on", lambda device: nullcontext())
    return registry


def test_memory_is_pinned_once_at_the_size_that_was_asked_for(registry):
    pool = PinnedPool()
    for _ in range(3):
        buffer = pool.take(3000, GPU)
        assert buffer.nbytes == 3000
        pool.give_back(buffer)
    assert registry.calls == 1
    assert list(registry.pinned.values()) == [3000]
    assert pool.kept_bytes == 3000


def test_memory_in_use_is_given_to_no_one_else_and_the_smallest_that_fits_comes_first(registry):
    pool = PinnedPool()
    large, small = pool.take(900, GPU), pool.take(300, GPU)
    assert large.data_ptr() != small.data_ptr()
    for buffer in (large, small):
        pool.give_back(buffer)
    assert pool.take(200, GPU).data_ptr() == small.data_ptr()
    assert pool.take(200, GPU).data_ptr() == large.data_ptr()
    assert registry.calls == 2


def test_memory_that_is_too_small_gives_way_instead_of_staying_beside(registry):
    pool = PinnedPool()
    pool.give_back(pool.take(300, GPU))
    pool.give_back(pool.take(500, GPU))
    assert list(registry.pinned.values()) == [500]
    assert pool.kept_bytes == 500


def test_memory_that_cannot_be_pinned_is_used_and_not_kept(registry):
    registry.refuses = True
    pool = PinnedPool()
    pool.give_back(pool.take(300, GPU))
    assert pool.kept_bytes == 0


def test_on_a_cpu_nothing_is_pinned_kept_or_copied(registry):
    pool = PinnedPool()
    pool.give_back(pool.take(300, torch.device("cpu")))
    content = torch.arange(4)
    assert pool.copy(content) is content
    pool.give_back(content)
    assert pool.kept_bytes == registry.calls == 0
