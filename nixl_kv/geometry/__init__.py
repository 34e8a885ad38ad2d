"""Pure arithmetic: which bytes of KV a rank has, and which of them it reads from a peer."""
