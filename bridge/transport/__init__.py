"""The ways in which weights travel to the engines: ``weights.transport.type``.

    type         before the pause                             in the pause
    shards       nothing                                      every rank sends its shards to every engine rank
    tensor       gathers the first bucket                     engines read each bucket in the sender's memory
    disk         writes a checkpoint                          every engine reads it
    delta        sends what changed to the engines' replicas  every engine reads its replica

Each type is a module with a ``publish.publisher.Transport``. ``shards`` is the head's part of shard-to-shard
publishing and ``sender`` that of every rank, which follows the head's ``commands``. ``shards`` and ``tensor``
give the engines' ranks orders (``ordering``); ``ways`` says which memory a rank reads. ``delta`` builds on
``patches`` (the format of what changed) and ``replica`` (the copy of the weights beside an engine, which runs
in the engine's server).

An adapter (``actor.lora.serve: adapter``) has a transport of its own, ``adapter``: its factors are small, and
engines load them while they generate. ``renamed`` sends nothing: a run without a trainer counts its versions.
"""
