"""Errors, files, seeds, units, console, logs and facts about the machine. Every room may use it; it uses none."""
