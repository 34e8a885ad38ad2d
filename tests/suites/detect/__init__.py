"""Which faults the digest detects, between engines of many shapes."""
