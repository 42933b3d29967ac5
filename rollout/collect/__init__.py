"""From a slot to a group that is ready to be trained."""
