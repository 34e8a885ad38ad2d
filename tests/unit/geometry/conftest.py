"""For scripts/mutate: what fails is not worth minutes of search for a smaller case."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
