"""Latency, throughput and memory, measured after a correctness check."""
