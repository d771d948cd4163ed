"""Checkpoints looked into without training: what is broken, dead or new in a file of weights."""
