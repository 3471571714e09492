"""Helpers that every other package uses and that know nothing about GEMMs.

Element types, instructions and hardware limits; machine code; errors, variables and sessions; files and locks;
processes, forks and what people see of them.
This package imports no other package of the library.
"""
