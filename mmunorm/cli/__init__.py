"""What the command-line tools share."""
