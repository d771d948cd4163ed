"""Snapshots: what the weights and gradients of a model looked like at one moment."""
