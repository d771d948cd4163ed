"""Inference in services: the ``request`` scope, its decorator, its streams and its middleware.

A request is what a service was asked once. It stands in the trace its caller began, under the
session in the tree of the spool; nothing of it is shared with the request beside it.
"""
