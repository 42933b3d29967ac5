"""Processes of a run: their placement, their handles and their end.

placement      which node has which rank and engine; ``ray_cluster`` starts or joins Ray
object_store   how much shared memory Ray needs
actors         makes the Ray actors; ``trainer_actor`` is what a rank's process runs
rank_group     all ranks behind one proxy; ``handles`` and ``waits`` belong to it
local_ranks    ranks without Ray, for conversions and tests
guard          ends everything of a run on this machine when the driver was killed
"""
