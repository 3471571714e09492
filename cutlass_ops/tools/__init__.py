"""What people ask on the command line: build, explain, inspect, examine the installation.

It imports every room.
"""
