"""A small model that knows something: it follows links through a long prompt."""
