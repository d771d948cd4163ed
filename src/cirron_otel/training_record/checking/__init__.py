"""Checking a training record: what it says, and whether it can be believed."""
