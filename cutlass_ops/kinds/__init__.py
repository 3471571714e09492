"""The kinds of kernels, one folder each: what is legal, how it is rendered, how long it takes.

Here lie the rules and the C++ spelling that all kinds share. It imports `base`, `epilogue` and `declare`.
"""
