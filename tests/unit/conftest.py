"""How hypothesis runs in the unit tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline an example: a busy machine would turn it into noise. What must be fast has a test that measures it.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
