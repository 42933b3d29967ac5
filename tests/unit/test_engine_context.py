import pytest

from slipstream.rollout.engine.context import served_length


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, 250),
        ({"context_length": 128}, 122),
        ({"max_total_tokens": 64, "context_length": 128}, 58),
        ({"max_total_tokens": 16384}, 250),
        ({"context_length": None}, 250),
    ],
)
def test_the_end_of_the_smallest_context_is_not_served(args, expected):
    assert served_length(256, args) == expected
