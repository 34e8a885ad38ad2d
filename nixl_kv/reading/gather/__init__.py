"""GPUs of one host: a kernel reads memory that the other process has exported."""
