"""Processes of a run: their placement, their handles and their end.

placement      which node has which rank and engine
ray_cluster    starts or joins Ray; ``configured_ray`` imports it
object_store   how much shared memory Ray needs
engine_spec    what the servers of engines are, of a recipe
actors         makes the Ray actors: a ``trainer_actor`` for each rank, a ``collector_actor`` for each
               collector, ``rollout.engine.actor`` for each node of an engine
handles        the actors as the driver calls them, with ``waits``
rank_group     all ranks as one object; ``trainer_failed`` has its errors
kept_process   a process that may outlive the driver: of a gateway
node_usage     what the processes of a run use on each node
stacks         where they stand when one hangs
local_ranks    ranks without Ray, for conversions and tests
guard          ends everything of a run on this machine when the driver was killed
"""
