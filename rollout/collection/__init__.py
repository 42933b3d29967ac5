"""Collection: assigned groups become ready groups.

messages    what the driver and its collectors say to each other
driver      the driver's side: slots, assignments, ready groups
collector   the process that runs episodes
"""
