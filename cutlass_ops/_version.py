"""Versions of the library and of what it renders; nothing else states them."""

__version__ = "0.1.0"
"""The version of this library, as in ``pip``: MAJOR.MINOR.PATCH."""

# Part of every kernel's identity: raise it when templates or headers change what a spec means.
TEMPLATE_VERSION = 4
