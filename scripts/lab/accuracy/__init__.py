"""Are the answers right when prefill and decode are apart? lm-eval against a router says."""
