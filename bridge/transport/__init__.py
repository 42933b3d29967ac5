"""The ways in which weights travel to the engines: ``weights.transport.type``.

    type         before the pause                             in the pause
    distributed  joins a group, if its members have changed   broadcasts each bucket
    tensor       gathers the first bucket                     sends each bucket through memory of the node
    disk         writes a checkpoint                          every engine reads it
    delta        sends what changed to the engines' replicas  every engine reads its replica

Each type is a module with a ``publish.publisher.Transport``. ``distributed`` builds on ``engine_group`` (the
members), ``rendezvous`` (the process group) and ``store`` (where it meets). ``delta`` builds on ``patches``
(the format of what changed) and ``replica`` (the copy of the weights beside an engine, which runs in the
engine's server).
"""
