"""OTLP from spool rows: which spans they are (`rows`, `gathering`), and how they are written."""
