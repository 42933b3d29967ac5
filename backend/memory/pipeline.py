"""Micro-batches whose activations a pipeline stage holds at the same time, by Megatron's schedules.

One part of the model per stage (1F1B): stage s of P has run P - s forward passes before its first backward
pass ends. With V parts per stage (interleaved, arXiv:2104.04473): (P - s - 1) * 2 + (V - 1) * P warm-up
passes of one part each, and one more.
"""


def parts_in_flight(stage: int, stages: int, chunks: int) -> list[int]:
    """Return for each part of the model on ``stage`` how many micro-batches have activations there."""
    if stages == 1:
        return [1]
    if chunks == 1:
        return [stages - stage]
    passes = (stages - stage - 1) * 2 + (chunks - 1) * stages + 1
    # The passes visit the parts in turns of ``stages`` micro-batches.
    held = [0] * chunks
    for number in range(passes):
        held[number // stages % chunks] += 1
    return held
