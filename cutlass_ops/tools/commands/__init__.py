"""The command line's commands. ``tools/cli`` parses their arguments, in a module of the same name."""
