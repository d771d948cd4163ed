"""What was recorded, in the forms of others: lines of text, TensorBoard's event files."""
