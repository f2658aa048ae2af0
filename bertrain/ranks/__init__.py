"""Processes that train together: process groups, heartbeats, signals, CPU binding and restarts."""
