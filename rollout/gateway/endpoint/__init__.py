"""The endpoint of a collector: agents of episodes talk to the policy as to any provider.

agent ──HTTP, key of an attempt──► gateway's application ──► attempt ──► recording of the episode ──► engines
                                                               │
                                                               └──turns──► trajectories

needed              whether a recipe needs an endpoint; imports the other modules, and SGLang
collector_endpoint  the application on a port of this process. Imports SGLang
attempts            all attempts that run, as the gateway's application knows its users, sessions and journal
attempt             one attempt at an episode: its sessions, its turns, its limits
trajectories        the trajectories of an attempt's turns
"""
