"""From a call to a launch: check operands, choose and load a kernel, keep its plan.

Contains the public ops and their operators in PyTorch. Imports the rooms below.
"""
