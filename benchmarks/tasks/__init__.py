"""Six small tasks, each learned by a policy that is made for it."""
