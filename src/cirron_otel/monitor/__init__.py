"""The training monitor: watches a run layer by layer and writes its training record.

One check is one pass over gradients and weights with one host read (``observing.py``), which gives
an ``Observation``; the checks (``checks/``) are pure: observation and what they remember in, events
out; ``telling.py`` puts those into the record and tells everybody. See ``docs/monitor.md``.
"""
