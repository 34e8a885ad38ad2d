"""The prefill side of the protocol: offers, and who may read them."""
