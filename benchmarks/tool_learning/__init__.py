"""Learning to use a tool: a policy that misuses its calculator unlearns that from rewards of its answers."""
