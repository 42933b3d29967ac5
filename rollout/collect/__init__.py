"""Collection: from a free slot to a group that is ready to be trained.

gate        waits for slots and batches on top of the control core, and writes every event down
intake      which prompt a ticket stands for
groups      one group: its episodes, its filter, its end
episodes    one episode: attempts and the time limit
judging     rewards, asked about finished episodes
generator   the engines as one episode sees them, with completions that survive a restart
journal     the port through which events reach the ledger
time_limit  one time limit for many episodes
"""
