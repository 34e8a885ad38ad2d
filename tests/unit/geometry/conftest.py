"""A hypothesis profile for scripts/mutate: it does not search for smaller failing examples."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
