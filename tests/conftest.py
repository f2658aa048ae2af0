"""Settings shared by all tests."""

from hypothesis import settings

# A deadline per example is an assertion about the clock of a shared machine.
settings.register_profile("bertrain", deadline=None)
settings.load_profile("bertrain")
