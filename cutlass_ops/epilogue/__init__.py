"""Epilogues as plain Python functions: traced once into an immutable expression graph."""
