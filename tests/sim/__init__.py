"""The real transfer engines and schedulers, under schedules of everything that can happen."""
