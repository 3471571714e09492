"""Compiled kernels: kept on disk, checked, signed, packed into bundles, and loaded.

It imports `base`, `epilogue` and `declare`, and starts no compiler.
"""
