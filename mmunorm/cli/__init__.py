"""Shared by the command-line tools."""
