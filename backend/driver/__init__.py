"""The run itself: what it is made of, its loops, and how it ends.

run             the course of a run; ``assemble`` makes its parts, ``ports`` says what the loops need
serving, collection, training       the loops (judging: ``rollout/judge``)
collectors      keeps the processes alive in which episodes run
trainer, engines                    Ray actors behind the ports
served_weights  the only way in which weights move; ``verification`` compares what engines compute
skipped         updates that the trainer has skipped, which end the run when there are too many
devices         trainer and engines on GPUs of their own, or in turn on the same ones
evaluation, checkpointing           beside training
inputs, prepare, run_folder, resume before anything is started
sft             supervised training; ``stop`` ends a run on request
"""
