"""Starts ranks on this machine and jobs on clusters."""
