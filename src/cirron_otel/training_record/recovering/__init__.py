"""Ending a training record whose writer died."""
