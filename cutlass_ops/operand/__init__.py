"""Operands and other arguments of a call: checks, layouts, what they stand for, and the reference in PyTorch."""
