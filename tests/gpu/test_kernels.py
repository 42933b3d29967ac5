"""The kernels that an engine compiles at its start, by the doctor's own check."""

import os

import pytest

from slipstream.backend.commands.compile_check import compilation, compile_sample, kernels, launch_kernels
from slipstream.rollout.engine.toolchain import find

pytestmark = pytest.mark.gpu(1, "sglang")


def test_a_kernel_compiles_with_what_an_engine_would_find():
    finding = compilation(compile_sample(find(os.environ), os.environ))
    assert not finding.wrong, finding.state


@pytest.mark.timeout(1200)  # the first compilation
def test_the_kernels_of_sglang_are_compiled_and_right():
    finding = kernels(launch_kernels(os.environ))
    assert not finding.wrong, finding.state
