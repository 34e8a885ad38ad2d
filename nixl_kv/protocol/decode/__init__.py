"""The decode side of the protocol: loads, and what each reads from which prefill rank."""
