"""The kinds of kernels: legality rules, rendering and time models.

Each kind has its own folder. Rules and C++ spellings shared by all kinds are in this folder. This package imports
`base`, `epilogue` and `declare`.
"""
