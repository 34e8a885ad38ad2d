"""Does KV move on the platforms that people run prefill and decode on?"""
