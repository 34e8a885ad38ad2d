"""Pure state machines: events in, actions out; failure and time are events."""
