"""The command ``cirron-otel``. One noun a file; needs the extra ``[cli]``."""
