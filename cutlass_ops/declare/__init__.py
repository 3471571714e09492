"""Frozen values that declare a kernel: configuration, specification, signature, device.

`kinds` checks whether they fit together. Imports `base` and `epilogue`.
"""
