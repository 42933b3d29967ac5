"""Plain data of generation, on one page each: prompt, completion, trajectory, record, turn, conversation."""
