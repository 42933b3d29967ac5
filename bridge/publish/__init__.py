"""Bring every engine to a new policy version.

endpoint       what the bridge requires of an engine
report         the result of a publication
publication    one version on its way: which engines still take part
bucket_stream  the exported buckets, each made while the previous one is sent
publisher      the order of the steps, and what it requires of a transport
"""
