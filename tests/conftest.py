"""Settings shared by all tests."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line sets it, before torch is loaded

# A deadline per example is an assertion about the clock of a shared machine.
settings.register_profile("bertrain", deadline=None, max_examples=60)
settings.load_profile("bertrain")
