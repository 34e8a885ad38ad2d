"""How much hypothesis draws: little by default, more with `--hypothesis-profile=slow`."""

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("slow", deadline=None, max_examples=1000)
settings.load_profile("default")
