"""The run itself: what it is made of, its loops, and how it ends.

run         the course of a run; ``assemble`` makes its parts, ``ports`` says what the loops need of others
start       before anything runs: inputs, checks, the run folder, what a restart restores
processes   engines, collectors, gateways: started and kept alive
weights     the trainer: versions, checkpoints, and what becomes of a trainer that dies
loops       serving, collection, training, live users, evaluation; what ends a run
modes       serving alone, one half of a run, supervised training, a try
"""
