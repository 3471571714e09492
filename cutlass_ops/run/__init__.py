"""From a call to a launch: operands are checked, a kernel is chosen and loaded, and its plan is kept.

The public ops lie here, and their meaning to PyTorch. It imports the rooms below.
"""
