"""Sandboxes: programs that a policy has written run where they can harm nobody.

    workflow, reward                    keeper.py             one process for each owner, without threads
    ────────────────                       │ clone
    local.py ──connection──────────────► box.py               one process for each sandbox: its namespaces
    remote.py ──HTTP──► serve.py           │ clone
                          └► local.py   running.py: init      one for each command, process 1 of its namespace
                                           │ spawn
                                        the command, and whatever it starts

`interface.py` is what workflows, environments and rewards use; `open.py` makes a sandbox from settings.
`running.py` keeps the limits of a command: it adds up memory, processor time and processes of all that the
command has started (`usage.py`) and the bytes of its files, and ends all of them. The kernel
refuses what one process could take at once: by limits set at its start, and by `filter.py`, which forbids
system calls. `enclosure.py` makes the namespaces, `root.py` the files that commands see; `paths.py` opens
files that foreign code has named. `keeper_process.py` starts the keeper; `wire.py` and `protocol.py` are the
messages of `local.py` and of `remote.py`.

Only the command and its descendants run foreign code. Each process dies with the one above it, and the kernel
takes the mounts and files of a sandbox away with its last process.
"""
