"""Where batches of the spool are sent to: one file per kind of receiver."""
