"""Errors, files, seeds, units, console, logs and facts about the machine. Every subpackage may use it; it uses none."""
