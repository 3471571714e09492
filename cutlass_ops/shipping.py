"""Catalogues in Python, by the name that this module had before rooms: ``cutlass_ops.ship.shipping``."""

from cutlass_ops.ship.shipping import Catalogue, Kernels

__all__ = ["Catalogue", "Kernels"]
