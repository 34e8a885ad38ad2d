"""Does the connector fit a release of vLLM? Told from both sources, which are never imported.

Some releases have no build that runs at hand. What vLLM's code calls with which arguments, and what
the connector takes from vLLM, stands in their sources all the same.
"""
