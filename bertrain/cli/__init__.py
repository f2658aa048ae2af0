"""The command line: one command per function."""
