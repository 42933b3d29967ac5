"""The process that runs episodes: assignments in, events out. It decides nothing about admission or training.

collector_process  one life of a collector: its connection, what it was told, and its end
groups      one assigned group: its episodes, its filter, its verdict
episodes    one episode: attempts and the time limit
recording   the engines as one episode sees them, and the record that survives this process
evaluation  evaluation episodes
outbox      events, gathered into few frames
watchdog    ends a process in which a workflow blocks all others
"""
