"""Helpers that every other package uses and that know nothing about GEMMs.

Element types, hardware limits, errors, environment variables, files, locks and processes.
This package imports no other package of the library.
"""
