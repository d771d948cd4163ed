"""Writing a training record: lines and rows as they come, and how it ends."""
