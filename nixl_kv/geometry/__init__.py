"""Pure arithmetic: which bytes a rank holds, and which of them a peer must read."""
