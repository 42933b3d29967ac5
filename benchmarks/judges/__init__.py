"""Learning from live users by a judge's votes, by its hints, and by both, while the judge is often down."""
