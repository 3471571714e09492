"""Store, check, sign, bundle and load compiled kernels.

This package imports `base`, `epilogue` and `declare`, and starts no compiler.
"""
