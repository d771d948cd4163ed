"""From spool files to trees a person can read: sessions, their spans and marks, as text."""
