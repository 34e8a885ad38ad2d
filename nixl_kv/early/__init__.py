"""Both legs of a request at once: prefill's API server answers before the engine has computed."""
