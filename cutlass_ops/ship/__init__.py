"""From a catalogue to a bundle, and whether a bundle is what it says.

It imports the rooms below.
"""
