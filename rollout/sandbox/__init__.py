"""Sandboxes: programs that a policy has written run where they can harm nobody.

    workflow, reward                    keeper.py             one process for each owner, without threads
    ────────────────                       │ clone
    local.py ──connection──────────────► box.py               one process for each sandbox: its namespaces
    remote.py ──HTTP──► serve.py           │ clone
                          └► local.py   running.py: init      one for each command, process 1 of its namespace
                                           │ spawn
                                        the command, and whatever it starts

`interface.py` is what workflows, environments and rewards use; `open.py` makes a sandbox from settings.
Only the command and its descendants run foreign code. Each process dies with the one above it, and the kernel
takes the mounts and files of a sandbox away with its last process.
"""
