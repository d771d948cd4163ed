"""Every error this package raises on purpose.

::

    CirronError
    +-- ConfigurationError        a setting has a value that cannot be used (also a ValueError)
    +-- CirronDependencyError     something named explicitly is not installed (also an ImportError)
    +-- SpoolError                the spool directory cannot be used
        +-- SpoolFormatError      a file in it is not a spool v1 batch (also a ValueError)
    +-- RecordError               a training record cannot be written, read, ended or signed
        +-- RecordExistsError     the directory holds a record already (also a FileExistsError)
        +-- RecordBusyError       another process writes the record
        +-- RecordDamagedError    the record has been changed or is no record (also a ValueError)
        +-- RecordKeyError        a key, or what makes the signatures, cannot be used
    +-- StopTraining              you asked for it: a finding stops the training at a clean point

They are raised by ``profile()`` before it has any effect, and by the readers and commands. After
``profile()`` nothing is raised into the user's program (see :mod:`cirron_otel._guard`), but for
``StopTraining``, and that only where ``stop_on=`` or a function of the user's asked for it.
"""

from __future__ import annotations


class CirronError(Exception):
    """The base of every error of this package."""


class ConfigurationError(CirronError, ValueError):
    """A setting cannot be used; the message names it, its value and where it came from."""


class CirronDependencyError(CirronError, ImportError):
    """Something asked for by name is not installed; the message says what to install."""


class SpoolError(CirronError):
    """The spool directory cannot be read or written; the message names it."""


class SpoolFormatError(SpoolError, ValueError):
    """A file in the spool is not a spool v1 batch; the message says where it departs."""


class RecordError(CirronError):
    """A training record cannot be used as asked; the message says why and what to do."""


class RecordExistsError(RecordError, FileExistsError):
    """The directory holds a training record already, and nobody said what to do with it."""


class RecordBusyError(RecordError):
    """Another process, or another journal of this one, is writing the record."""


class RecordDamagedError(RecordError, ValueError):
    """The files are no training record, or were changed after they had been written."""


class RecordKeyError(RecordError):
    """A key cannot be loaded, or does not make or fit the signature."""


class StopTraining(CirronError):  # noqa: N818 - raised to ask for something, as StopIteration is
    """Raise it in an ``on_finding`` function to end the training at the next clean point.

    It then leaves ``Monitor.step()``, or ``optimizer.step()`` before that has changed a weight,
    and is the program's to catch.
    """
