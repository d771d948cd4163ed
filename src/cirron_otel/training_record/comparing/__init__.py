"""What differs between two training records."""
