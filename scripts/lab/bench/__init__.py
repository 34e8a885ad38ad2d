"""What things cost: transfers, the link, plans, digests, the event log, and being idle."""
