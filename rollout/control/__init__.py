"""Decides which groups may start and which may be trained, and accounts for every group.

core            the state machine of groups and its proof; decides which groups are too stale
admission         ... whether one more group may start: an ``AdmissionPolicy``
consumption       ... when the oldest ready groups make a batch: ``ConsumptionPolicy``
slots             ... the groups that hold a slot
live_door         ... the turns of live users
versions          ... the tree of policy versions, the lag of a token, and errors of wrong calls
ends              ... why a group is never trained
policies        makes the core that a recipe describes
filters         whether a finished group is worth training
concurrency     how many trajectories are generated at one time
drift           holds the drift of the policy within limits
quarantine      finds groups that kill the trainer
"""
