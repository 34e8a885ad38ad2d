"""KV of other engines' prefix caches, found by content and read without pins."""
