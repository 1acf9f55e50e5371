"""Preflight checks: what would make a job on this cluster fail, hang or crawl, said beforehand."""
