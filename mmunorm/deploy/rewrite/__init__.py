"""Exact rewritings of graphs and models for runtimes."""
