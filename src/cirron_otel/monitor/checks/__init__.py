"""The checks, one file per family: pure, from observations and what they remember to events."""
