"""What is measured on models and read from their runs, and its pictures."""
