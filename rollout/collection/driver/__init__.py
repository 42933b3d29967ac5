"""Collection on the driver: from a free slot to a group that is ready to be trained.

gate             waits for slots and batches on top of the control core, and writes every event down
intake           which prompt a ticket stands for
assignments      which collector works on which group, and what its events mean
server           the connections with collectors
group_ledger     the port through which events reach the ledger
listener         the port that hears of lost work, for metrics
collected_group  a group with what is recorded of it, until its batch
restored         what a restart goes on with
lost_groups      what the episode log is told of groups that ended untrained
questions        evaluations
"""
