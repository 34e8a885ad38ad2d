"""Schedules of everything that can happen between prefill and decode, and what must hold then."""
