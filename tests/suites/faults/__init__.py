"""What happens to requests when engines are killed, stopped, cut off and crowded out."""
