"""Scopes in torch's profiler and in Nsight, and bounded recordings made with torch's profiler.

Both need torch to be imported by the program; nothing in here imports it.
"""
