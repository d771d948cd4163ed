"""The training record: a diary that can be trusted.

Writing it needs neither torch nor OpenTelemetry, and reading it neither of them nor numpy.
"""
