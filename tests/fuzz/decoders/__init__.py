"""Fuzzing: every decoder gets what strangers may send, and only a documented error may come."""
