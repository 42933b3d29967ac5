"""The Triton kernels of the LM head, in Triton's interpreter against float64, and compiled for an H100."""

import pytest

from tests.interpreted_head import CASES, FURTHER, printed

SHARED_BYTES = 227 * 1024
"""Shared memory that one program may have on an H100."""


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    return printed("values", interpreted=True)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_entropies_and_gradients_are_those_of_float64_logits(errors, case: str):
    rounded = CASES[case].get("dtype") == "bfloat16"
    entropies = ["entropy"] if CASES[case].get("entropy") != "none" else []
    names = ["log-prob", *entropies, "gradient of hidden", "gradient of weight"]
    assert list(errors[case]) == (names if CASES[case]["tokens"] else ["gradient of weight"])
    for name, error in errors[case].items():
        # The gradient of bfloat16 logits is rounded to 8 bits, and so is that of its operands.
        assert error < (1e-2 if rounded and "gradient" in name else 1e-5), name


def test_log_probs_of_further_tokens_and_their_gradients_are_those_of_float64_logits(errors):
    assert len(errors[FURTHER]) == 4
    assert max(errors[FURTHER].values()) < 1e-5, errors[FURTHER]


def test_the_kernels_compile_for_an_h100_and_move_sixteen_bytes_at_a_time():
    compiled = printed("compiled", interpreted=False)
    assert len(compiled) == 4
    for kernel, figures in compiled.items():
        assert figures["shared"] <= SHARED_BYTES, kernel
        assert figures["vector loads"] >= (2 if "gradient" in kernel else 1), kernel
