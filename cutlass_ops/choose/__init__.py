"""The choice of a kernel for a problem, from measurements and cost models.

No module here imports PyTorch. Imports the rooms below.
"""
