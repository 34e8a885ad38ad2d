"""IO: the data plane and the control plane. Foreign exceptions are translated, and stop, here."""
