"""From a call to a launch: choose and load a kernel, keep its plan, record gradients, serve tracers.

Contains the public ops and their operators in PyTorch. Imports the rooms below.
"""
