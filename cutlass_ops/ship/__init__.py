"""Build catalogues into bundles, and verify bundles.

This package imports only lower layers.
"""
